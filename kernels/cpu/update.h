// How every optimizer walks over its shards: cut into blocks, pick the loop for their types,
// update each element.
//
// A Rule is an optimizer in one mode, as InMode in optimizer.h:
//   static constexpr int num_states;   0, 1 or 2
//   using Coefficients = ...;
//   static void update(float& p, float g, float& first_state, float& second_state, const Coefficients& c);
#pragma once

#include <limits>
#include <type_traits>

#include "../bfloat16.h"
#include "../float16.h"
#include "blocks.h"
#include "flat.h"

namespace dslaunch {

// A range of a shard's elements in one segment, with their gradients in one piece.
template <typename Hyper, typename Coefficients>
struct Block {
    const Shard<Hyper>* shard;
    const Segment<Hyper>* segment;
    const GradArray* grad;
    std::int64_t begin;
    std::int64_t end;
    Coefficients coefficients;
};

// Shard after shard, segment after segment: what has a gradient, in blocks of at most `max_numel` elements.
// `coefficients_of` makes a segment's coefficients.
template <typename Hyper, typename CoefficientsOf>
auto cut_into_blocks(const Shards<Hyper>& shards, std::int64_t max_numel, const CoefficientsOf& coefficients_of) {
    using Coefficients = decltype(coefficients_of(shards[0].segments[0]));
    std::vector<Block<Hyper, Coefficients>> blocks;
    for (const Shard<Hyper>& shard : shards) {
        for (const Segment<Hyper>& segment : shard.segments) {
            const Coefficients c = coefficients_of(segment);
            const std::int64_t segment_end = segment.offset + segment.numel;
            auto grad = std::partition_point(shard.grads.begin(), shard.grads.end(), [&](const GradArray& piece) {
                return piece.offset + piece.numel <= segment.offset;
            });
            for (; grad != shard.grads.end() && grad->offset < segment_end; ++grad) {
                const std::int64_t end = std::min(segment_end, grad->offset + grad->numel);
                std::int64_t begin = std::max(segment.offset, grad->offset);
                while (begin < end) {
                    const std::int64_t stop = end - begin > max_numel ? begin + max_numel : end;
                    blocks.push_back({&shard, &segment, &*grad, begin, stop, c});
                    begin = stop;
                }
            }
        }
    }
    return blocks;
}

// ---- version 0: the plain loop; types are looked up for every element -------------------------------------

constexpr std::int64_t uncut = std::numeric_limits<std::int64_t>::max();

inline float load(const void* data, Dtype dtype, std::int64_t i) {
    switch (dtype) {
        case Dtype::bfloat16: return to_float(static_cast<const bfloat16*>(data)[i]);
        case Dtype::float16: return to_float(static_cast<const float16*>(data)[i]);
        default: return static_cast<const float*>(data)[i];
    }
}

inline void store(void* data, Dtype dtype, std::int64_t i, float value) {
    switch (dtype) {
        case Dtype::bfloat16: return assign(static_cast<bfloat16*>(data)[i], value);
        case Dtype::float16: return assign(static_cast<float16*>(data)[i], value);
        default: return assign(static_cast<float*>(data)[i], value);
    }
}

template <typename Rule, typename Hyper>
void update_plainly(const Block<Hyper, typename Rule::Coefficients>& block) {
    const Shard<Hyper>& shard = *block.shard;
    for (std::int64_t i = block.begin; i < block.end; ++i) {
        const float g = load(block.grad->data, block.grad->dtype, i - block.grad->offset);
        float states[2] = {};
        for (int s = 0; s < Rule::num_states; ++s) states[s] = load(shard.states[s], shard.state_dtype, i);
        Rule::update(shard.param[i], g, states[0], states[1], block.coefficients);
        for (int s = 0; s < Rule::num_states; ++s) store(shard.states[s], shard.state_dtype, i, states[s]);
        if (shard.param_out != nullptr) store(shard.param_out, shard.out_dtype, i, shard.param[i]);
    }
}

// ---- version 1: one vector loop for each combination of types ---------------------------------------------

// __restrict on parameters: the arrays do not share memory, so the loop needs no check for it at run time.
// (On local pointers clang 14 ignores the word, makes that check, finds it too long and does not vectorise.)
// Out is void if there is no copy to write.
template <typename Rule, typename Grad, typename State, typename Out>
DSLAUNCH_INLINE void update_range(const typename Rule::Coefficients c, std::int64_t numel, float* __restrict param,
                                  const Grad* __restrict grad, State* __restrict first_state,
                                  State* __restrict second_state, Out* __restrict param_out) {
    for (std::int64_t i = 0; i < numel; ++i) {
        float p = param[i];
        float first = 0.0f;
        float second = 0.0f;
        if constexpr (Rule::num_states > 0) first = to_float(first_state[i]);
        if constexpr (Rule::num_states > 1) second = to_float(second_state[i]);
        Rule::update(p, to_float(grad[i]), first, second, c);
        param[i] = p;
        if constexpr (Rule::num_states > 0) assign(first_state[i], first);
        if constexpr (Rule::num_states > 1) assign(second_state[i], second);
        if constexpr (!std::is_void_v<Out>) assign(param_out[i], p);
    }
}

// One type after another is chosen; each function adds one to the list.

template <typename Rule, typename Grad, typename State, typename Out, typename Hyper>
DSLAUNCH_INLINE void update_types(const Block<Hyper, typename Rule::Coefficients>& block) {
    const Shard<Hyper>& shard = *block.shard;
    const std::int64_t at = block.begin;
    State* const first = Rule::num_states > 0 ? static_cast<State*>(shard.states[0]) + at : nullptr;
    State* const second = Rule::num_states > 1 ? static_cast<State*>(shard.states[1]) + at : nullptr;
    Out* param_out = nullptr;
    if constexpr (!std::is_void_v<Out>) param_out = static_cast<Out*>(shard.param_out) + at;
    update_range<Rule, Grad, State, Out>(block.coefficients, block.end - at, shard.param + at,
                                         static_cast<const Grad*>(block.grad->data) + (at - block.grad->offset), first,
                                         second, param_out);
}

template <typename Rule, typename Grad, typename State, typename Hyper>
DSLAUNCH_INLINE void update_grad_state(const Block<Hyper, typename Rule::Coefficients>& block) {
    if (block.shard->param_out == nullptr) return update_types<Rule, Grad, State, void>(block);
    switch (block.shard->out_dtype) {
        case Dtype::bfloat16: return update_types<Rule, Grad, State, bfloat16>(block);
        case Dtype::float16: return update_types<Rule, Grad, State, float16>(block);
        default: return update_types<Rule, Grad, State, float>(block);
    }
}

template <typename Rule, typename Grad, typename Hyper>
DSLAUNCH_INLINE void update_grad(const Block<Hyper, typename Rule::Coefficients>& block) {
    if constexpr (Rule::num_states > 0) {
        if (block.shard->state_dtype == Dtype::bfloat16) return update_grad_state<Rule, Grad, bfloat16>(block);
    }
    update_grad_state<Rule, Grad, float>(block);
}

// To be called from a function with DSLAUNCH_CLONES, into which everything above is inlined.
template <typename Rule, typename Hyper>
DSLAUNCH_INLINE void update_block(const Block<Hyper, typename Rule::Coefficients>& block) {
    switch (block.grad->dtype) {
        case Dtype::bfloat16: return update_grad<Rule, bfloat16>(block);
        case Dtype::float16: return update_grad<Rule, float16>(block);
        default: return update_grad<Rule, float>(block);
    }
}

// Threads share the blocks of all shards.
template <typename Blocks, typename Update>
void update_blocks(const Blocks& blocks, int num_threads, const Update& update) {
    for_each_block(static_cast<std::int64_t>(blocks.size()), num_threads,
                   [&](std::int64_t i) { update(blocks[static_cast<std::size_t>(i)]); });
}

// ---- an optimizer's two loops, as cpu/flat.h declares them ---------------------------------------------------

template <typename Kind>
using BlockOf = Block<typename Kind::Hyper, typename Kind::Coefficients>;

template <typename Kind>
auto cut(const ShardsOf<Kind>& shards, const StepOptions& options, std::int64_t max_numel) {
    return cut_into_blocks(shards, max_numel, [&](const Segment<typename Kind::Hyper>& segment) {
        return Kind::coefficients(segment.hyper, options.mode, options.grad_scale);
    });
}

// In the mode of the block's segment, which is `mode` or one above it; `wanted` is that of the call.
template <typename Kind, bool is_plain, int mode = 0>
DSLAUNCH_INLINE void step_block(const BlockOf<Kind>& block, int wanted) {
    if constexpr (mode + 1 < Kind::num_modes) {
        if (Kind::mode_of(block.segment->hyper, wanted) != mode) {
            return step_block<Kind, is_plain, mode + 1>(block, wanted);
        }
    }
    if constexpr (is_plain) {
        update_plainly<InMode<Kind, mode>>(block);
    } else {
        update_block<InMode<Kind, mode>>(block);
    }
}

}  // namespace dslaunch

#define DSLAUNCH_CPU_STEP(Kind)                                                                              \
    namespace dslaunch {                                                                                     \
    void cpu_step_reference(Kind, const ShardsOf<Kind>& shards, const StepOptions& options) {                \
        for (const auto& block : cut<Kind>(shards, options, uncut)) step_block<Kind, true>(block, options.mode); \
    }                                                                                                        \
    DSLAUNCH_CLONES void Kind##_block(const BlockOf<Kind>& block, int mode) { step_block<Kind, false>(block, mode); } \
    void cpu_step(Kind, const ShardsOf<Kind>& shards, const StepOptions& options, int num_threads) {         \
        update_blocks(cut<Kind>(shards, options, block_numel), num_threads,                                  \
                      [&](const auto& block) { Kind##_block(block, options.mode); });                        \
    }                                                                                                        \
    }
