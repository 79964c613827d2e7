// Speed of this machine's memory: a plain loop, shared by threads as the kernels share
// theirs. benchmarks/memory_copy.py compiles it, without the pattern that would turn the loop
// into a call of memcpy.

#include <cstdint>

extern "C" void copy(float* __restrict to, const float* __restrict from, std::int64_t numel, int num_threads) {
#pragma omp parallel for num_threads(num_threads) schedule(static)
    for (std::int64_t i = 0; i < numel; ++i) to[i] = from[i];
}
