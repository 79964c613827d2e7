// Random bits from a counter, and rounding by them. The bits are a function of numbers that every layout has: a
// key, made of the optimizer's step and the parameter's name, and the element's place in its parameter. So a
// value is rounded alike at every stage, on any number of ranks and in any memory.
//
// runtime/optimizers/random_bits.py has the same arithmetic in torch's operations.
#pragma once

#include "bfloat16.h"

namespace dslaunch {

// Different for every index. Only the low bits of an index differ between neighbours; afterwards all do.
DSLAUNCH_INLINE unsigned int spread(unsigned int index) {
    const unsigned int x = index * 0x9e3779b1u;
    return x ^ (x >> 15);
}

// 32 bits for an index that was spread: two multiplications as in xxHash's last steps (Collet, XXH32), which carry
// each bit of the key to every bit of the result. Instruction sets from SSE4.1 on multiply a vector at a time.
DSLAUNCH_INLINE unsigned int random_bits(unsigned int spread_index, unsigned int key) {
    unsigned int x = spread_index ^ key;
    x *= 0x85ebca77u;
    x ^= x >> 13;
    x *= 0xc2b2ae3du;
    return x ^ (x >> 16);
}

// Keys of the elements of one parameter in one step. A state takes the lower half of a number of 32 bits, the
// second state the upper half, and the parameter a number of its own.
struct Keys {
    unsigned int states;
    unsigned int param;
};

// `high` is the element's place in the parameter, without the lowest 32 bits.
DSLAUNCH_INLINE Keys keys_of(unsigned int seed, unsigned int high) {
    return {random_bits(spread(2 * high), seed), random_bits(spread(2 * high + 1), seed)};
}

// Rounds to the bfloat16 below or above, with the probability that makes the mean exact: by the lowest 16 of
// `bits`. What a bfloat16 holds stays as it is, infinity too, and a NaN stays a NaN.
DSLAUNCH_INLINE bfloat16 round_by(unsigned int bits, float value) {
    const unsigned int exact = bits_of(value);
    const unsigned int rounded = exact + (bits & 0xffffu);
    const unsigned int quiet_nan = exact | 0x00400000u;
    const bool is_nan = value != value;
    return bfloat16{static_cast<unsigned short>((is_nan ? quiet_nan : rounded) >> 16)};
}

// How a loop writes a value that it will read in the next step.
DSLAUNCH_INLINE void keep(float& to, float value, unsigned int) { to = value; }

DSLAUNCH_INLINE void keep(bfloat16& to, float value, unsigned int bits) { to = round_by(bits, value); }

}  // namespace dslaunch
