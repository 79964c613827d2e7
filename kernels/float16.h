// IEEE float16 <-> float by bit operations: 1 bit of sign, 5 of exponent (bias 15), 10 of fraction.
//
// Every case is worked out and one is selected, because loops with branches become no vectors.
#pragma once

#include "scalar.h"

namespace dslaunch {

struct float16 {
    unsigned short bits;
};

// Exact. A subnormal is built as 2^-14 plus its value and gets 2^-14 taken off again: no float32 on
// the way is subnormal, so a processor set to flush those to zero gives the same. Of the two ways to
// read the bits the smaller number is right: they give 2^-15 + x/2 and x for a subnormal, x and 2x -
// 2^-14 for a normal one.
DSLAUNCH_INLINE float to_float(float16 value) {
    const unsigned int sign = static_cast<unsigned int>(value.bits & 0x8000) << 16;
    const unsigned int wide = static_cast<unsigned int>(value.bits & 0x7fff) << 13;
    const float normal = float_of(wide + 0x38000000u);  // the biases differ by 112
    const float subnormal = float_of(wide + 0x38800000u) - float_of(0x38800000u);
    const float finite = subnormal < normal ? subnormal : normal;
    // infinity, NaN: the largest exponent stays the largest
    const float special = float_of(wide + 0x70000000u);
    return float_of(sign | bits_of(normal >= 65536.0f ? special : finite));
}

// Rounds to nearest, ties to even; from 65520 on to infinity. A NaN keeps its sign and the upper bits of
// its payload, and becomes quiet. Selected by comparing numbers: where bits were compared, GCC 12 left
// some loops scalar.
DSLAUNCH_INLINE float16 to_float16(float value) {
    const unsigned int bits = bits_of(value);
    const unsigned int magnitude = bits & 0x7fffffffu;
    const float size = float_of(magnitude);
    // The fraction is rounded by adding just less than half a unit, or half for an odd one; the carry may
    // reach the exponent, and infinity.
    const unsigned int normal = (magnitude - 0x38000000u + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13;
    // Below 2^-14 a unit is 2^-24, which is that of float32 from 0.5 on: the addition itself rounds.
    const unsigned int subnormal = bits_of(size + 0.5f) - 0x3f000000u;
    const unsigned int quiet_nan = ((magnitude >> 13) & 0x03ffu) | 0x7e00u;
    const unsigned int finite = size < float_of(0x38800000u) ? subnormal : normal;
    const unsigned int number = size >= 65536.0f ? 0x7c00u : finite;
    return float16{static_cast<unsigned short>((bits >> 16 & 0x8000u) | (value != value ? quiet_nan : number))};
}

DSLAUNCH_INLINE void assign(float16& to, float value) { to = to_float16(value); }

}  // namespace dslaunch
