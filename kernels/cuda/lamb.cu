// LAMB's first pass (DSLAUNCH_MODE 1: eps inside the root), and what comes of its sums.
// lamb_apply.cu is the second pass.
//
// The sums have the bits of the CPU's, on every chip and at every address: lamb.h fixes the order, and a
// block there is a chunk here. So a segment is one run, and `Run.head` is 0 or `unaligned`.

#include "../lamb.h"
#include "step.cuh"

namespace dslaunch {

static_assert(lamb_block_numel == chunk_numel);

// Adds value(k, i) for i from 0 to numel - 1, into lanes and lanes in order; thread k of 0 and 1 gets the sum
// of its k. All threads must come, and see afterwards what others wrote before.
template <typename Value>
__device__ __forceinline__ double sum_in_lanes(long long numel, const Value& value) {
    __shared__ double lanes[2 * lamb_num_lanes];
    __syncthreads();
    if (threadIdx.x < 2 * lamb_num_lanes) {
        const unsigned int k = threadIdx.x / lamb_num_lanes;
        double sum = 0.0;
        for (long long i = threadIdx.x % lamb_num_lanes; i < numel; i += lamb_num_lanes) sum += value(k, i);
        lanes[threadIdx.x] = sum;
    }
    __syncthreads();
    double sum = 0.0;
    if (threadIdx.x < 2) {
        for (int lane = 0; lane < lamb_num_lanes; ++lane) sum += lanes[threadIdx.x * lamb_num_lanes + lane];
    }
    return sum;
}

// A segment of the call and its chunks, counted through all launches of the first pass.
struct LambSegment {
    double base_step_size;
    double min_coeff;
    double max_coeff;
    unsigned int first_chunk;
    unsigned int num_chunks;
};

// As many as fit in 4 KiB of kernel parameters, by value.
struct LambSegments {
    unsigned int first;  // index among the call's segments
    unsigned int num_segments;
    LambSegment of[120];
};

}  // namespace dslaunch

// `Run.param_out` is where the direction goes. `sums` has two numbers for each chunk of this launch: of the
// squares of the parameter, and of the direction.
extern "C" __global__ void __launch_bounds__(dslaunch::num_threads, 2)
    lamb_directions(const __grid_constant__ dslaunch::Table<dslaunch::LambCoefficients> table, double* sums) {
    using namespace dslaunch;
    using OneStep = Step<InMode<Lamb, DSLAUNCH_MODE>, DSLAUNCH_GRAD, DSLAUNCH_STATE, float, true>;
    const float factor = factor_of(table);
    if (!is_finite(factor)) return;
    for_each_chunk(table, [&](const Run& run, long long begin, long long end) {
        const LambCoefficients c = coefficients_of(table, run, factor);
        for_each_of_chunk(
            run, begin, end, [&](const Run& of, long long i) { OneStep::one(of, i, c); },
            [&](const Run& of, long long i) { OneStep::pack(of, i, c); });
        const float* const update = static_cast<const float*>(run.param_out);
        const double sum = sum_in_lanes(end - begin, [&](unsigned int k, long long i) {
            const double x = k == 0 ? run.param[begin + i] : update[begin + i];
            return x * x;
        });
        const long long chunk = run.first_chunk + begin / chunk_numel;
        if (threadIdx.x < 2) sums[2 * chunk + threadIdx.x] = sum;
    });
}

// From the sums of all chunks to two for each segment of the call, and the number that its direction
// is multiplied with.
extern "C" __global__ void __launch_bounds__(dslaunch::num_threads)
    lamb_step_sizes(const __grid_constant__ dslaunch::LambSegments segments, const double* of_chunks, double* sums,
                    float* step_sizes) {
    using namespace dslaunch;
    for (unsigned int place = blockIdx.x; place < segments.num_segments; place += gridDim.x) {
        const LambSegment& segment = segments.of[place];
        const double* const of_segment = of_chunks + 2ll * segment.first_chunk;
        const double sum =
            sum_in_lanes(segment.num_chunks, [&](unsigned int k, long long i) { return of_segment[2 * i + k]; });
        double* const two = sums + 2ll * (segments.first + place);
        if (threadIdx.x < 2) two[threadIdx.x] = sum;
        __syncthreads();
        if (threadIdx.x == 0) {
            step_sizes[segments.first + place] =
                lamb_step_size(segment.base_step_size, segment.min_coeff, segment.max_coeff, two[0], two[1]);
        }
    }
}
