// bfloat16 <-> float by bit operations.
#pragma once

#include "scalar.h"

namespace dslaunch {

// The upper half of a float32.
struct bfloat16 {
    unsigned short bits;
};

DSLAUNCH_INLINE float to_float(bfloat16 value) { return float_of(static_cast<unsigned int>(value.bits) << 16); }

// Rounds to nearest, ties to even. A NaN stays a NaN: its quiet bit is set, because rounding could
// carry its payload into the exponent (giving infinity, or flipping the sign) and truncation could
// leave no payload at all.
DSLAUNCH_INLINE bfloat16 to_bfloat16(float value) {
    const unsigned int bits = bits_of(value);
    const unsigned int rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    const unsigned int quiet_nan = bits | 0x00400000u;
    const bool is_nan = value != value;  // one vector instruction; comparing the bits takes three
    return bfloat16{static_cast<unsigned short>((is_nan ? quiet_nan : rounded) >> 16)};
}

DSLAUNCH_INLINE void assign(bfloat16& to, float value) { to = to_bfloat16(value); }

}  // namespace dslaunch
