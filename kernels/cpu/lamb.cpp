// LAMB over flat arrays on the CPU, in two passes: for each the plain loop, then the one that uses every
// core and vector unit. The second pass is an optimizer of its own, without states, whose gradient is the
// direction.

#include "squares.h"
#include "update.h"

namespace dslaunch {
namespace {

static_assert(lamb_num_lanes == num_lanes);

using LambBlock = Block<LambHyper, LambCoefficients>;

std::vector<LambBlock> cut(const Shards<LambHyper>& shards, double grad_scale) {
    return cut_into_blocks(shards, lamb_block_numel, [&](const Segment<LambHyper>& segment) {
        return Lamb::coefficients(segment.hyper, 0, grad_scale);
    });
}

// Adds the sums of all blocks up for each segment of each shard; lamb.h says in which order.
std::vector<LambSums> sums_of_segments(const Shards<LambHyper>& shards, const std::vector<LambBlock>& blocks,
                                       const std::vector<LambSums>& sums) {
    std::vector<LambSums> added;
    std::size_t i = 0;
    for (const auto& shard : shards) {
        for (const auto& segment : shard.segments) {
            double param_lanes[num_lanes] = {};
            double update_lanes[num_lanes] = {};
            for (int lane = 0; i < blocks.size() && blocks[i].segment == &segment; ++i) {
                param_lanes[lane] += sums[i].param_square;
                update_lanes[lane] += sums[i].update_square;
                lane = (lane + 1) % num_lanes;
            }
            added.push_back({sum_of_lanes(param_lanes), sum_of_lanes(update_lanes)});
        }
    }
    return added;
}

}  // namespace

// ---- the first pass, version 0: the plain loop ------------------------------------------------------------

namespace {

LambSums direct_plainly(const LambBlock& block, bool eps_inside_sqrt) {
    const Shard<LambHyper>& shard = *block.shard;
    double param_lanes[num_lanes] = {};
    double update_lanes[num_lanes] = {};
    for (std::int64_t i = block.begin; i < block.end; ++i) {
        const double p = static_cast<const float*>(shard.param)[i];
        const float g = load(block.grad->data, block.grad->dtype, i - block.grad->offset);
        float m = load(shard.states[0], shard.state_dtype, i);
        float v = load(shard.states[1], shard.state_dtype, i);
        float direction = static_cast<const float*>(shard.param)[i];
        eps_inside_sqrt ? Lamb::update<1>(direction, g, m, v, block.coefficients)
                        : Lamb::update<0>(direction, g, m, v, block.coefficients);
        const double u = direction;
        store(shard.states[0], shard.state_dtype, i, m);
        store(shard.states[1], shard.state_dtype, i, v);
        shard.update[i] = direction;
        param_lanes[(i - block.begin) % num_lanes] += p * p;
        update_lanes[(i - block.begin) % num_lanes] += u * u;
    }
    return {sum_of_lanes(param_lanes), sum_of_lanes(update_lanes)};
}

}  // namespace

std::vector<LambSums> lamb_directions_reference(const Shards<LambHyper>& shards, const StepOptions& options) {
    const std::vector<LambBlock> blocks = cut(shards, options.grad_scale);
    std::vector<LambSums> sums;
    for (const LambBlock& block : blocks) sums.push_back(direct_plainly(block, options.mode == 1));
    return sums_of_segments(shards, blocks, sums);
}

// ---- the first pass, version 1: vectors and threads; the squares are added while their elements are in cache ----

namespace {

constexpr std::int64_t tile_numel = 1024;  // 20 kB of five float arrays

template <bool eps_inside_sqrt, typename Grad, typename State>
DSLAUNCH_INLINE void direct_range(const LambCoefficients c, std::int64_t numel, const float* __restrict param,
                                  const Grad* __restrict grad, State* __restrict exp_avg, State* __restrict exp_avg_sq,
                                  float* __restrict update) {
    for (std::int64_t i = 0; i < numel; ++i) {
        float m = to_float(exp_avg[i]);
        float v = to_float(exp_avg_sq[i]);
        float direction = param[i];
        Lamb::update<eps_inside_sqrt>(direction, to_float(grad[i]), m, v, c);
        update[i] = direction;
        assign(exp_avg[i], m);
        assign(exp_avg_sq[i], v);
    }
}

template <bool eps_inside_sqrt, typename Grad, typename State>
DSLAUNCH_INLINE LambSums direct_types(const LambBlock& block) {
    const Shard<LambHyper>& shard = *block.shard;
    const float* const param = static_cast<const float*>(shard.param);
    double param_lanes[num_lanes] = {};
    double update_lanes[num_lanes] = {};
    for (std::int64_t at = block.begin; at < block.end; at += tile_numel) {
        const std::int64_t numel = std::min(tile_numel, block.end - at);
        direct_range<eps_inside_sqrt>(block.coefficients, numel, param + at,
                                      static_cast<const Grad*>(block.grad->data) + (at - block.grad->offset),
                                      static_cast<State*>(shard.states[0]) + at,
                                      static_cast<State*>(shard.states[1]) + at, shard.update + at);
        add_squares(param_lanes, param + at, numel);
        add_squares(update_lanes, shard.update + at, numel);
    }
    return {sum_of_lanes(param_lanes), sum_of_lanes(update_lanes)};
}

template <bool eps_inside_sqrt, typename Grad>
DSLAUNCH_INLINE LambSums direct_grad(const LambBlock& block) {
    return block.shard->state_dtype == Dtype::bfloat16 ? direct_types<eps_inside_sqrt, Grad, bfloat16>(block)
                                                       : direct_types<eps_inside_sqrt, Grad, float>(block);
}

template <bool eps_inside_sqrt>
DSLAUNCH_INLINE LambSums direct(const LambBlock& block) {
    switch (block.grad->dtype) {
        case Dtype::bfloat16: return direct_grad<eps_inside_sqrt, bfloat16>(block);
        case Dtype::float16: return direct_grad<eps_inside_sqrt, float16>(block);
        default: return direct_grad<eps_inside_sqrt, float>(block);
    }
}

}  // namespace

DSLAUNCH_CLONES LambSums lamb_direction_block(const LambBlock& block, bool eps_inside_sqrt) {
    return eps_inside_sqrt ? direct<true>(block) : direct<false>(block);
}

std::vector<LambSums> lamb_directions(const Shards<LambHyper>& shards, const StepOptions& options, int num_threads) {
    const std::vector<LambBlock> blocks = cut(shards, options.grad_scale);
    std::vector<LambSums> sums(blocks.size());
    for_each_block(static_cast<std::int64_t>(blocks.size()), num_threads, [&](std::int64_t i) {
        const auto place = static_cast<std::size_t>(i);
        sums[place] = lamb_direction_block(blocks[place], options.mode == 1);
    });
    return sums_of_segments(shards, blocks, sums);
}

// ---- the second pass --------------------------------------------------------------------------------------

namespace {

struct LambApply {
    static constexpr int num_states = 0;
    static constexpr bool may_narrow = false;
    using Coefficients = float;  // the step size
    static DSLAUNCH_INLINE void update(float& p, float u, float&, float&, float step_size) {
        lamb_element(p, u, step_size);
    }
};

using ApplyBlock = Block<LambHyper, float>;

// The blocks of the second pass, and the directions that they read as gradients, where the gradients were.
struct ApplyBlocks {
    Shards<LambHyper> shards;
    std::vector<ApplyBlock> blocks;
};

ApplyBlocks cut_to_apply(const Shards<LambHyper>& shards, const std::vector<LambSums>& sums, bool bias_correction,
                         std::int64_t max_numel) {
    ApplyBlocks made{shards, {}};
    for (auto& shard : made.shards) {
        for (GradArray& grad : shard.grads) {
            grad.data = shard.update + grad.offset;
            grad.dtype = Dtype::float32;
        }
    }
    std::size_t place = 0;
    made.blocks = cut_into_blocks(made.shards, max_numel, [&](const Segment<LambHyper>& segment) {
        const LambSums& of_segment = sums[place++];
        return lamb_step_size(lamb_base_step_size(segment.hyper, bias_correction), segment.hyper.min_coeff,
                              segment.hyper.max_coeff, of_segment.param_square, of_segment.update_square);
    });
    return made;
}

}  // namespace

void lamb_apply_reference(const Shards<LambHyper>& shards, const std::vector<LambSums>& sums, bool bias_correction) {
    const ApplyBlocks cut = cut_to_apply(shards, sums, bias_correction, uncut);
    for (const ApplyBlock& block : cut.blocks) update_plainly<LambApply>(block);
}

DSLAUNCH_CLONES void lamb_apply_block(const ApplyBlock& block) { update_grad<LambApply, float>(block); }

void lamb_apply(const Shards<LambHyper>& shards, const std::vector<LambSums>& sums, bool bias_correction,
                int num_threads) {
    const ApplyBlocks cut = cut_to_apply(shards, sums, bias_correction, block_numel);
    update_blocks(cut.blocks, num_threads, lamb_apply_block);
}

}  // namespace dslaunch
