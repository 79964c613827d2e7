// Adam over flat arrays on the CPU: the plain loop, then the one that uses every core and vector unit.

#include "blocks.h"
#include "flat.h"

namespace dslaunch {
namespace {

// A range of a shard's elements under one set of coefficients, with their gradients in one piece.
struct Block {
    const AdamShard* shard;
    const GradArray* grad;
    std::int64_t begin;
    std::int64_t end;
    AdamCoefficients coefficients;
};

// __restrict on parameters: the arrays do not share memory, so the loop needs no check for it at run time. (On
// local pointers clang 14 ignores the word, makes that check, finds it too long and does not vectorise.)
template <bool adam_w, bool has_out, typename Grad>
DSLAUNCH_INLINE void update_range(const AdamCoefficients c, std::int64_t numel, float* __restrict param,
                                  const Grad* __restrict grad, float* __restrict exp_avg,
                                  float* __restrict exp_avg_sq, bfloat16* __restrict param_out) {
    for (std::int64_t i = 0; i < numel; ++i) {
        float p = param[i];
        float m = exp_avg[i];
        float v = exp_avg_sq[i];
        adam_element<adam_w>(p, to_float(grad[i]), m, v, c);
        param[i] = p;
        exp_avg[i] = m;
        exp_avg_sq[i] = v;
        if (has_out) param_out[i] = to_bfloat16(p);
    }
}

template <typename Grad, bool has_out>
DSLAUNCH_INLINE void update_block(const Block& block, bool adam_w_mode) {
    const AdamShard& shard = *block.shard;
    const std::int64_t at = block.begin;
    const Grad* grad = static_cast<const Grad*>(block.grad->data) + (at - block.grad->offset);
    bfloat16* param_out = has_out ? shard.param_out + at : nullptr;
    if (adam_w_mode) {
        update_range<true, has_out>(block.coefficients, block.end - at, shard.param + at, grad, shard.exp_avg + at,
                                    shard.exp_avg_sq + at, param_out);
    } else {
        update_range<false, has_out>(block.coefficients, block.end - at, shard.param + at, grad, shard.exp_avg + at,
                                     shard.exp_avg_sq + at, param_out);
    }
}

}  // namespace

// ---- version 0: the plain loop ---------------------------------------------------------------------------

namespace {

void update_plainly(const AdamShard& shard, const Segment& segment, const GradArray& grad, const AdamOptions& options) {
    const AdamCoefficients c = adam_coefficients(segment.hyper, options.adam_w_mode, options.grad_scale);
    const std::int64_t end = std::min(segment.offset + segment.numel, grad.offset + grad.numel);
    for (std::int64_t i = std::max(segment.offset, grad.offset); i < end; ++i) {
        const float g = grad.is_bfloat16 ? to_float(static_cast<const bfloat16*>(grad.data)[i - grad.offset])
                                         : static_cast<const float*>(grad.data)[i - grad.offset];
        float& p = shard.param[i];
        if (options.adam_w_mode) {
            adam_element<true>(p, g, shard.exp_avg[i], shard.exp_avg_sq[i], c);
        } else {
            adam_element<false>(p, g, shard.exp_avg[i], shard.exp_avg_sq[i], c);
        }
        if (shard.param_out != nullptr) shard.param_out[i] = to_bfloat16(p);
    }
}

}  // namespace

void adamw_step_reference(const std::vector<AdamShard>& shards, const AdamOptions& options) {
    for (const AdamShard& shard : shards) {
        for (const Segment& segment : shard.segments) {
            for (const GradArray& grad : shard.grads) update_plainly(shard, segment, grad, options);
        }
    }
}

// ---- version 1: one vector loop per combination of types; threads share the blocks of all shards ----------

DSLAUNCH_CLONES void adam_block_float(const Block& block, bool adam_w_mode) {
    update_block<float, false>(block, adam_w_mode);
}

DSLAUNCH_CLONES void adam_block_float_out(const Block& block, bool adam_w_mode) {
    update_block<float, true>(block, adam_w_mode);
}

DSLAUNCH_CLONES void adam_block_bfloat16(const Block& block, bool adam_w_mode) {
    update_block<bfloat16, false>(block, adam_w_mode);
}

DSLAUNCH_CLONES void adam_block_bfloat16_out(const Block& block, bool adam_w_mode) {
    update_block<bfloat16, true>(block, adam_w_mode);
}

namespace {

void adam_block(const Block& block, bool adam_w_mode) {
    const bool has_out = block.shard->param_out != nullptr;
    const auto update = block.grad->is_bfloat16 ? (has_out ? adam_block_bfloat16_out : adam_block_bfloat16)
                                                : (has_out ? adam_block_float_out : adam_block_float);
    update(block, adam_w_mode);
}

std::vector<Block> cut_into_blocks(const std::vector<AdamShard>& shards, const AdamOptions& options) {
    std::vector<Block> blocks;
    for (const AdamShard& shard : shards) {
        for (const Segment& segment : shard.segments) {
            const AdamCoefficients c = adam_coefficients(segment.hyper, options.adam_w_mode, options.grad_scale);
            for (const GradArray& grad : shard.grads) {
                const std::int64_t end = std::min(segment.offset + segment.numel, grad.offset + grad.numel);
                for (std::int64_t begin = std::max(segment.offset, grad.offset); begin < end; begin += block_numel) {
                    blocks.push_back({&shard, &grad, begin, std::min(begin + block_numel, end), c});
                }
            }
        }
    }
    return blocks;
}

}  // namespace

void adamw_step(const std::vector<AdamShard>& shards, const AdamOptions& options, int num_threads) {
    const std::vector<Block> blocks = cut_into_blocks(shards, options);
    for_each_block(static_cast<std::int64_t>(blocks.size()), num_threads,
                   [&](std::int64_t i) { adam_block(blocks[static_cast<std::size_t>(i)], options.adam_w_mode); });
}

}  // namespace dslaunch
