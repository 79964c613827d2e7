// How every optimizer walks over its shards: cut into blocks, pick the loop for their types,
// update each element.
//
// A Rule is an optimizer in one mode, as InMode in optimizer.h:
//   static constexpr int num_states;   0, 1 or 2
//   static constexpr bool may_narrow;  whether parameters may be bfloat16, and states be rounded by random bits
//   using Coefficients = ...;
//   static void update(float& p, float g, float& first_state, float& second_state, const Coefficients& c);
#pragma once

#include <limits>
#include <type_traits>

#include "../bfloat16.h"
#include "../float16.h"
#include "../random_bits.h"
#include "blocks.h"
#include "eight_bits.h"
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
    void* states[2];  // of the shard, or where a tile of them is float32: an element is at its place in the shard
    Dtype state_dtype;

    // The place in its parameter of the element at `begin`.
    std::int64_t place() const { return segment->rounding.first + (begin - segment->offset); }

    Keys keys() const { return keys_of(segment->rounding.seed, static_cast<unsigned int>(place() >> 32)); }
};

// Places of a parameter that share their keys.
constexpr std::int64_t keyed_numel = std::int64_t{1} << 32;

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
                    Block<Hyper, Coefficients> block{&shard, &segment, &*grad, begin, end, c,
                                                         {shard.states[0], shard.states[1]}, shard.state_dtype};
                    const std::int64_t keyed = keyed_numel - (block.place() & (keyed_numel - 1));
                    block.end = begin + std::min({end - begin, max_numel, keyed});
                    begin = block.end;
                    blocks.push_back(block);
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

inline void keep(void* data, Dtype dtype, std::int64_t i, float value, bool is_random, unsigned int bits) {
    if (!is_random || dtype != Dtype::bfloat16) return store(data, dtype, i, value);
    static_cast<bfloat16*>(data)[i] = round_by(bits, value);
}

template <typename Rule, typename Hyper>
void update_plainly(const Block<Hyper, typename Rule::Coefficients>& block) {
    const Shard<Hyper>& shard = *block.shard;
    const Keys keys = block.keys();
    const bool is_random = block.segment->rounding.is_random;
    for (std::int64_t i = block.begin; i < block.end; ++i) {
        const float g = load(block.grad->data, block.grad->dtype, i - block.grad->offset);
        float p = load(shard.param, shard.param_dtype, i);
        float states[2] = {};
        for (int s = 0; s < Rule::num_states; ++s) states[s] = load(block.states[s], block.state_dtype, i);
        Rule::update(p, g, states[0], states[1], block.coefficients);
        const unsigned int index = spread(static_cast<unsigned int>(block.place() + (i - block.begin)));
        const unsigned int bits = random_bits(index, keys.states);
        for (int s = 0; s < Rule::num_states; ++s) {
            keep(block.states[s], block.state_dtype, i, states[s], is_random, s == 0 ? bits : bits >> 16);
        }
        keep(shard.param, shard.param_dtype, i, p, is_random, random_bits(index, keys.param));
        if (shard.param_out != nullptr) {
            store(shard.param_out, shard.out_dtype, i, load(shard.param, shard.param_dtype, i));
        }
    }
}

// ---- version 1: one vector loop for each combination of types ---------------------------------------------

// __restrict on parameters: the arrays do not share memory, so the loop needs no check for it at run time.
// (On local pointers clang 14 ignores the word, makes that check, finds it too long and does not vectorise.)
// Out is void if there is no copy to write. Random bits that no array needs are not worked out.
template <typename Rule, bool is_random, typename Grad, typename Param, typename State, typename Out>
DSLAUNCH_INLINE void update_range(const typename Rule::Coefficients c, const Keys keys, unsigned int place,
                                  std::int64_t numel, Param* __restrict param, const Grad* __restrict grad,
                                  State* __restrict first_state, State* __restrict second_state,
                                  Out* __restrict param_out) {
    for (std::int64_t i = 0; i < numel; ++i) {
        float p = to_float(param[i]);
        float first = 0.0f;
        float second = 0.0f;
        if constexpr (Rule::num_states > 0) first = to_float(first_state[i]);
        if constexpr (Rule::num_states > 1) second = to_float(second_state[i]);
        Rule::update(p, to_float(grad[i]), first, second, c);
        if constexpr (is_random) {
            const unsigned int index = spread(place + static_cast<unsigned int>(i));
            const unsigned int bits = random_bits(index, keys.states);
            keep(param[i], p, random_bits(index, keys.param));
            if constexpr (Rule::num_states > 0) keep(first_state[i], first, bits);
            if constexpr (Rule::num_states > 1) keep(second_state[i], second, bits >> 16);
            if constexpr (!std::is_void_v<Out>) assign(param_out[i], to_float(param[i]));
        } else {
            assign(param[i], p);
            if constexpr (Rule::num_states > 0) assign(first_state[i], first);
            if constexpr (Rule::num_states > 1) assign(second_state[i], second);
            if constexpr (!std::is_void_v<Out>) assign(param_out[i], p);
        }
    }
}

// One type after another is chosen; each function adds one to the list.

template <typename Rule, bool is_random, typename Grad, typename Param, typename State, typename Out, typename Hyper>
DSLAUNCH_INLINE void update_types(const Block<Hyper, typename Rule::Coefficients>& block) {
    const Shard<Hyper>& shard = *block.shard;
    const std::int64_t at = block.begin;
    State* const first = Rule::num_states > 0 ? static_cast<State*>(block.states[0]) + at : nullptr;
    State* const second = Rule::num_states > 1 ? static_cast<State*>(block.states[1]) + at : nullptr;
    Out* param_out = nullptr;
    if constexpr (!std::is_void_v<Out>) param_out = static_cast<Out*>(shard.param_out) + at;
    update_range<Rule, is_random, Grad, Param, State, Out>(
        block.coefficients, block.keys(), static_cast<unsigned int>(block.place()), block.end - at,
        static_cast<Param*>(shard.param) + at, static_cast<const Grad*>(block.grad->data) + (at - block.grad->offset),
        first, second, param_out);
}

template <typename Rule, bool is_random, typename Grad, typename State, typename Hyper>
DSLAUNCH_INLINE void update_out(const Block<Hyper, typename Rule::Coefficients>& block) {
    if (block.shard->param_out == nullptr) return update_types<Rule, is_random, Grad, float, State, void>(block);
    switch (block.shard->out_dtype) {
        case Dtype::bfloat16: return update_types<Rule, is_random, Grad, float, State, bfloat16>(block);
        case Dtype::float16: return update_types<Rule, is_random, Grad, float, State, float16>(block);
        default: return update_types<Rule, is_random, Grad, float, State, float>(block);
    }
}

// A bfloat16 parameter is always rounded by random bits, and its copies are bfloat16.
template <typename Rule, typename Grad, typename State, typename Hyper>
DSLAUNCH_INLINE void update_narrow(const Block<Hyper, typename Rule::Coefficients>& block) {
    if (block.shard->param_out == nullptr) return update_types<Rule, true, Grad, bfloat16, State, void>(block);
    update_types<Rule, true, Grad, bfloat16, State, bfloat16>(block);
}

template <typename Rule, typename Grad, typename Hyper>
DSLAUNCH_INLINE void update_grad(const Block<Hyper, typename Rule::Coefficients>& block) {
    const bool is_narrow = Rule::may_narrow && block.shard->param_dtype == Dtype::bfloat16;
    if constexpr (Rule::num_states > 0) {
        if (block.state_dtype == Dtype::bfloat16) {
            if constexpr (Rule::may_narrow) {
                if (is_narrow) return update_narrow<Rule, Grad, bfloat16>(block);
                if (block.segment->rounding.is_random) return update_out<Rule, true, Grad, bfloat16>(block);
            }
            return update_out<Rule, false, Grad, bfloat16>(block);
        }
    }
    if constexpr (Rule::may_narrow) {
        if (is_narrow) return update_narrow<Rule, Grad, float>(block);
    }
    update_out<Rule, false, Grad, float>(block);
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

// A block whose states are of 8 bits: tile by tile, by `step` of a block whose states are float32. Tiles begin where
// blocks of scales do.
template <typename Kind, bool is_plain, typename Step>
void step_in_tiles(const BlockOf<Kind>& block, const Step& step) {
    float tiles[2][scaled_tile_numel];
    const Keys keys = block.keys();
    for (std::int64_t at = block.begin; at < block.end; at += scaled_tile_numel) {
        BlockOf<Kind> tile = block;
        tile.begin = at;
        tile.end = std::min(at + scaled_tile_numel, block.end);
        tile.state_dtype = Dtype::float32;
        const auto run = [&](int s) {
            return ScaledRun{static_cast<eight_bits*>(block.states[s]) + at,
                             block.shard->scales[s] + at / scaled_numel, tile.end - at};
        };
        for (int s = 0; s < 2; ++s) {
            decode<is_plain>(run(s), tiles[s], Kind::is_signed[s]);
            tile.states[s] = tiles[s] - at;
        }
        step(tile);
        for (int s = 0; s < 2; ++s) {
            const ScaledBits bits{static_cast<unsigned int>(tile.place()), keys.states, 16 * s};
            encode<is_plain>(run(s), tiles[s], bits, Kind::is_signed[s]);
        }
    }
}

// In tiles where the block's states are of 8 bits, else at once.
template <typename Kind, bool is_plain, typename Step>
void step_any(const BlockOf<Kind>& block, const Step& step) {
    if constexpr (Kind::has_eight_bits) {
        if (block.state_dtype == Dtype::eight_bits) return step_in_tiles<Kind, is_plain>(block, step);
    }
    step(block);
}

}  // namespace dslaunch

#define DSLAUNCH_CPU_STEP(Kind)                                                                              \
    namespace dslaunch {                                                                                     \
    void cpu_step_reference(Kind, const ShardsOf<Kind>& shards, const StepOptions& options) {                \
        const auto step = [&](const auto& block) { step_block<Kind, true>(block, options.mode); };           \
        for (const auto& block : cut<Kind>(shards, options, uncut)) step_any<Kind, true>(block, step);       \
    }                                                                                                        \
    DSLAUNCH_CLONES void Kind##_block(const BlockOf<Kind>& block, int mode) { step_block<Kind, false>(block, mode); } \
    void cpu_step(Kind, const ShardsOf<Kind>& shards, const StepOptions& options, int num_threads) {         \
        const auto step = [&](const auto& block) { Kind##_block(block, options.mode); };                     \
        update_blocks(cut<Kind>(shards, options, block_numel), num_threads,                                  \
                      [&](const auto& block) { step_any<Kind, false>(block, step); });                       \
    }                                                                                                        \
    }
