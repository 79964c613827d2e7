// What the CPU kernels offer over flat arrays. Sizes and offsets count elements. Nothing is checked here: the
// bindings do that once.
#pragma once

#include <cstdint>
#include <vector>

#include "../adam.h"

namespace dslaunch {

// A run of elements that share hyper-parameters.
struct Segment {
    std::int64_t offset;
    std::int64_t numel;
    AdamHyper hyper;
};

// A gradient to be read; in a shard, of the elements from `offset` on.
struct GradArray {
    std::int64_t offset;
    std::int64_t numel;
    const void* data;  // float, or bfloat16 if `is_bfloat16`
    bool is_bfloat16;
};

// Arrays of equal length that do not share memory, with each other or with another shard's, except that an unused
// `param_out` is null.
struct AdamShard {
    float* param;
    std::vector<GradArray> grads;  // in order; elements that none has are left alone
    float* exp_avg;
    float* exp_avg_sq;
    bfloat16* param_out;
    std::vector<Segment> segments;
};

// What all shards of one step have in common.
struct AdamOptions {
    double grad_scale;
    bool adam_w_mode;
};

// The plain loop: what every faster version must equal, bit for bit.
void adamw_step_reference(const std::vector<AdamShard>& shards, const AdamOptions& options);

// The same result on `num_threads` threads (0: OpenMP's default) with the widest vectors of this processor.
void adamw_step(const std::vector<AdamShard>& shards, const AdamOptions& options, int num_threads);

// The sum of squares in double; the same bits for every number of threads and every instruction set.
double squared_norm(const std::vector<GradArray>& grads, int num_threads);

}  // namespace dslaunch
