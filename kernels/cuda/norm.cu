// The sum of squares of many arrays, in float64 and in one read. Infinities and NaN come through.
//
// The order of additions depends on nothing but the lengths of the arrays, so the result has the same bits on
// every chip and for every address: pack k of a chunk belongs to thread k % num_threads, a block adds its
// threads pairwise, chunk c of a launch belongs to block c % num_partials (the host's grid), and one last
// block adds the blocks pairwise.

#include "../bfloat16.h"
#include "../float16.h"
#include "runs.cuh"

namespace dslaunch {

// A run has no coefficients here.
struct NoCoefficients {
    float grad_scale;
};

// Adds what the threads of this block have, pairwise; all threads must come here.
__device__ __forceinline__ double sum_of_block(double mine) {
    __shared__ double sums[num_threads];
    sums[threadIdx.x] = mine;
    for (unsigned int half = num_threads / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    return sums[0];  // right in thread 0
}

// `Run.head` is 0, or `unaligned`: then the same elements are read one by one.
template <typename Grad, typename AnyTable>
__device__ __forceinline__ void add_squares(const AnyTable& table, double* partials) {
    double sum = 0.0;
    for_each_chunk(table, [&](const Run& run, long long begin, long long end) {
        const Grad* grad = static_cast<const Grad*>(run.grad);
#pragma unroll 1
        for (long long i = begin + threadIdx.x * pack_numel; i < end; i += num_threads * pack_numel) {
            Elements<Grad> pack = {};
            if (run.head != unaligned && i + pack_numel <= end) {
                pack = load(grad + i);
            } else {
#pragma unroll
                for (int e = 0; e < pack_numel; ++e) {
                    if (i + e < end) pack.of[e] = grad[i + e];
                }
            }
#pragma unroll
            for (int e = 0; e < pack_numel; ++e) {  // a zero more changes no bit
                const double g = to_float(pack.of[e]);
                sum += g * g;
            }
        }
    });
    const double total = sum_of_block(sum);
    if (threadIdx.x == 0) partials[blockIdx.x] += total;
}

}  // namespace dslaunch

extern "C" __global__ void __launch_bounds__(dslaunch::num_threads)
    norm_add(const __grid_constant__ dslaunch::Table<dslaunch::NoCoefficients> table, double* partials) {
    using namespace dslaunch;
    add_squares<DSLAUNCH_GRAD>(table, partials);
}

// One block: zeros for all that follow.
extern "C" __global__ void __launch_bounds__(dslaunch::num_threads) norm_begin(double* partials, unsigned int numel) {
    for (unsigned int i = threadIdx.x; i < numel; i += dslaunch::num_threads) partials[i] = 0.0;
}

// One block: the sum of all partial sums.
extern "C" __global__ void __launch_bounds__(dslaunch::num_threads) norm_end(const double* partials, unsigned int numel,
                                                                             double* total) {
    double sum = 0.0;
    for (unsigned int i = threadIdx.x; i < numel; i += dslaunch::num_threads) sum += partials[i];
    const double all = dslaunch::sum_of_block(sum);
    if (threadIdx.x == 0) *total = all;
}
