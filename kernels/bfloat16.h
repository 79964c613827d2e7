// bfloat16 <-> float by bit operations: no compiler's 16-bit type and no vendor header is needed.
#pragma once

#if defined(__CUDACC__) || defined(__CUDACC_RTC__) || defined(__HIPCC__)
#define DSLAUNCH_INLINE __host__ __device__ __forceinline__
#else
// Always inlined: a function cloned per instruction set must not call one compiled for the oldest.
#define DSLAUNCH_INLINE __attribute__((always_inline)) inline
#endif

namespace dslaunch {

// The upper half of a float32.
struct bfloat16 {
    unsigned short bits;
};

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

DSLAUNCH_INLINE float to_float(float value) { return value; }

DSLAUNCH_INLINE float to_float(bfloat16 value) { return float_of(static_cast<unsigned int>(value.bits) << 16); }

// Rounds to nearest, ties to even. A NaN stays a NaN: its quiet bit is set, because rounding could carry its
// payload into the exponent (giving infinity, or flipping the sign) and truncation could leave no payload at all.
DSLAUNCH_INLINE bfloat16 to_bfloat16(float value) {
    const unsigned int bits = bits_of(value);
    const unsigned int rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    const unsigned int quiet_nan = bits | 0x00400000u;
    const bool is_nan = value != value;  // one vector instruction; comparing the bits takes three
    return bfloat16{static_cast<unsigned short>((is_nan ? quiet_nan : rounded) >> 16)};
}

}  // namespace dslaunch
