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

// Arrays of equal length that do not share memory, except that an unused `param_out` is null.
struct FlatAdam {
    float* param;
    const void* grad;  // float, or bfloat16 if `is_grad_bfloat16`
    bool is_grad_bfloat16;
    float* exp_avg;
    float* exp_avg_sq;
    bfloat16* param_out;
    double grad_scale;
    bool adam_w_mode;
};

// The plain loop: what every faster version must equal, bit for bit.
void adamw_step_reference(const FlatAdam& arrays, const std::vector<Segment>& segments);

// The same result on `num_threads` threads (0: OpenMP's default) with the widest vectors of this processor.
void adamw_step(const FlatAdam& arrays, const std::vector<Segment>& segments, int num_threads);

// The sum of squares in double; the same bits for every number of threads and every instruction set.
double squared_norm(const float* grad, std::int64_t numel, int num_threads);
double squared_norm(const bfloat16* grad, std::int64_t numel, int num_threads);

}  // namespace dslaunch
