// Adam over flat arrays on the CPU: the plain loop, then the one that uses every core and vector unit.

#include "blocks.h"
#include "flat.h"

namespace dslaunch {
namespace {

// A range of elements under one set of coefficients.
struct Block {
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
DSLAUNCH_INLINE void update_block(const FlatAdam& arrays, const Block& block) {
    const std::int64_t at = block.begin;
    const Grad* grad = static_cast<const Grad*>(arrays.grad) + at;
    bfloat16* param_out = has_out ? arrays.param_out + at : nullptr;
    if (arrays.adam_w_mode) {
        update_range<true, has_out>(block.coefficients, block.end - at, arrays.param + at, grad, arrays.exp_avg + at,
                                    arrays.exp_avg_sq + at, param_out);
    } else {
        update_range<false, has_out>(block.coefficients, block.end - at, arrays.param + at, grad, arrays.exp_avg + at,
                                     arrays.exp_avg_sq + at, param_out);
    }
}

}  // namespace

// ---- version 0: the plain loop ---------------------------------------------------------------------------

void adamw_step_reference(const FlatAdam& arrays, const std::vector<Segment>& segments) {
    for (const Segment& segment : segments) {
        const AdamCoefficients c = adam_coefficients(segment.hyper, arrays.adam_w_mode, arrays.grad_scale);
        for (std::int64_t i = segment.offset; i < segment.offset + segment.numel; ++i) {
            const float g = arrays.is_grad_bfloat16 ? to_float(static_cast<const bfloat16*>(arrays.grad)[i])
                                                    : static_cast<const float*>(arrays.grad)[i];
            float& p = arrays.param[i];
            if (arrays.adam_w_mode) {
                adam_element<true>(p, g, arrays.exp_avg[i], arrays.exp_avg_sq[i], c);
            } else {
                adam_element<false>(p, g, arrays.exp_avg[i], arrays.exp_avg_sq[i], c);
            }
            if (arrays.param_out != nullptr) arrays.param_out[i] = to_bfloat16(p);
        }
    }
}

// ---- version 1: one vector loop per combination of types; threads share blocks ---------------------------

DSLAUNCH_CLONES void adam_block_float(const FlatAdam& arrays, const Block& block) {
    update_block<float, false>(arrays, block);
}

DSLAUNCH_CLONES void adam_block_float_out(const FlatAdam& arrays, const Block& block) {
    update_block<float, true>(arrays, block);
}

DSLAUNCH_CLONES void adam_block_bfloat16(const FlatAdam& arrays, const Block& block) {
    update_block<bfloat16, false>(arrays, block);
}

DSLAUNCH_CLONES void adam_block_bfloat16_out(const FlatAdam& arrays, const Block& block) {
    update_block<bfloat16, true>(arrays, block);
}

namespace {

std::vector<Block> cut_into_blocks(const FlatAdam& arrays, const std::vector<Segment>& segments) {
    std::vector<Block> blocks;
    for (const Segment& segment : segments) {
        const AdamCoefficients c = adam_coefficients(segment.hyper, arrays.adam_w_mode, arrays.grad_scale);
        const std::int64_t end = segment.offset + segment.numel;
        for (std::int64_t begin = segment.offset; begin < end; begin += block_numel) {
            blocks.push_back({begin, std::min(begin + block_numel, end), c});
        }
    }
    return blocks;
}

}  // namespace

void adamw_step(const FlatAdam& arrays, const std::vector<Segment>& segments, int num_threads) {
    const bool has_out = arrays.param_out != nullptr;
    const auto update = arrays.is_grad_bfloat16 ? (has_out ? adam_block_bfloat16_out : adam_block_bfloat16)
                                                : (has_out ? adam_block_float_out : adam_block_float);
    const std::vector<Block> blocks = cut_into_blocks(arrays, segments);
    for_each_block(static_cast<std::int64_t>(blocks.size()), num_threads,
                   [&](std::int64_t i) { update(arrays, blocks[static_cast<std::size_t>(i)]); });
}

}  // namespace dslaunch
