// One float32 seen as a number and as bits, for host and device compilers alike: no vendor header is needed.
#pragma once

#if defined(__CUDACC__) || defined(__CUDACC_RTC__) || defined(__HIPCC__)
#define DSLAUNCH_INLINE __host__ __device__ __forceinline__
#else
// Always inlined: a function cloned per instruction set must not call one compiled for the oldest.
#define DSLAUNCH_INLINE __attribute__((always_inline)) inline
#endif

namespace dslaunch {

DSLAUNCH_INLINE unsigned int bits_of(float value) {
#if defined(__CUDA_ARCH__)
    return __float_as_uint(value);
#else
    unsigned int bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    return bits;
#endif
}

DSLAUNCH_INLINE float float_of(unsigned int bits) {
#if defined(__CUDA_ARCH__)
    return __uint_as_float(bits);
#else
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
#endif
}

DSLAUNCH_INLINE float square_root(float value) {
#if defined(__CUDA_ARCH__)
    return __fsqrt_rn(value);
#else
    return __builtin_sqrtf(value);
#endif
}

DSLAUNCH_INLINE double square_root(double value) {
#if defined(__CUDA_ARCH__)
    return __dsqrt_rn(value);
#else
    return __builtin_sqrt(value);
#endif
}

// How every loop reads an element and writes one, whatever its type: bfloat16.h and float16.h add theirs.
DSLAUNCH_INLINE float to_float(float value) { return value; }

DSLAUNCH_INLINE void assign(float& to, float value) { to = value; }

}  // namespace dslaunch
