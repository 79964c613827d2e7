// Calls of the CPU kernels over flat arrays. Sizes and offsets count elements. Nothing is checked here: the
// bindings do that once.
#pragma once

#include <cstdint>
#include <vector>

#include "../lamb.h"

namespace dslaunch {

enum class Dtype : unsigned char { float32, bfloat16, float16, eight_bits };

// A gradient to be read; in a shard, of the elements from `offset` on.
struct GradArray {
    std::int64_t offset;
    std::int64_t numel;
    const void* data;
    Dtype dtype;
};

// How values that are kept in 16 bits are rounded: to nearest, or by random bits (random_bits.h).
struct Rounding {
    bool is_random;
    unsigned int seed;   // of the parameter and the step
    std::int64_t first;  // the place in its parameter of the segment's first element
};

// A run of elements that share hyper-parameters.
template <typename Hyper>
struct Segment {
    std::int64_t offset;
    std::int64_t numel;
    Hyper hyper;
    Rounding rounding;
};

// Arrays of equal length that do not share memory, with each other or with another shard's. An array that the
// optimizer does not have, or the caller does not want, is null.
template <typename Hyper>
struct Shard {
    void* param;
    Dtype param_dtype;  // float32 or bfloat16
    std::vector<GradArray> grads;  // in order; elements that none has are left alone
    void* states[2];               // in the order of the optimizer's element
    Dtype state_dtype;             // float32, bfloat16 or eight_bits
    float* scales[2];              // of the states' blocks, where they are eight_bits
    void* param_out;
    Dtype out_dtype;
    float* update;  // LAMB: between its two passes
    std::vector<Segment<Hyper>> segments;
};

template <typename Hyper>
using Shards = std::vector<Shard<Hyper>>;

template <typename Kind>
using ShardsOf = Shards<typename Kind::Hyper>;

// ---- steps -----------------------------------------------------------------------------------------------
//
// Each `_reference` is the plain loop: what every faster version must equal, bit for bit. The other has that
// result on `num_threads` threads (0: OpenMP's default) with the widest vectors of this processor.
// `grad_scale` is multiplied into every gradient first.

struct StepOptions {
    double grad_scale;
    int mode;  // one of the optimizer's header
};

// Declares the step of an element-wise optimizer, whose file has DSLAUNCH_CPU_STEP; its type says which.
#define DSLAUNCH_DECLARE_CPU_STEP(Kind)                                                                    \
    void cpu_step_reference(Kind, const ShardsOf<Kind>& shards, const StepOptions& options);               \
    void cpu_step(Kind, const ShardsOf<Kind>& shards, const StepOptions& options, int num_threads);

// LAMB in two passes. Between them the caller may add up the sums of a parameter that lies in several
// segments or ranks.

// Sums over those elements of a segment that have a gradient, in an order that no number of threads changes.
struct LambSums {
    double param_square = 0.0;
    double update_square = 0.0;
};

// The first pass writes the states and `update`; the sums are one for each segment, shard after shard.
std::vector<LambSums> lamb_directions_reference(const Shards<LambHyper>& shards, const StepOptions& options);
std::vector<LambSums> lamb_directions(const Shards<LambHyper>& shards, const StepOptions& options, int num_threads);

// The second pass writes `param` and `param_out`; `sums` as the first returned them.
void lamb_apply_reference(const Shards<LambHyper>& shards, const std::vector<LambSums>& sums, bool bias_correction);
void lamb_apply(const Shards<LambHyper>& shards, const std::vector<LambSums>& sums, bool bias_correction,
                int num_threads);

// The sum of squares in double; the same bits for every number of threads and every instruction set.
double squared_norm(const std::vector<GradArray>& grads, int num_threads);

}  // namespace dslaunch
