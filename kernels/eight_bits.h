// States of 8 bits: floating-point numbers with 3 bits of mantissa, scaled block by block.
//
// A block is `scaled_numel` elements of one parameter, the first of which is at a multiple of it, and has one
// float32: its largest absolute value, the scale. An element is a code:
//
//   signed    1 bit of sign, 4 of exponent, 3 of mantissa     moments
//   unsigned                 5 of exponent, 3 of mantissa     moments of squares
//
// Code 0 (but for the sign) is 0; the largest code is the scale itself, exactly; any other is
// (1 + mantissa / 8) * 2^(exponent - bias) * scale / 1.875, with the bias at which the largest would be the scale:
// 15 or 31. So an element is at most one part in 8 away from what was kept, and if it is below the smallest code
// (1.8e-5 of the scale, or 2.8e-10) it becomes 0 or that, by random bits: one of squares never 0, which a step
// would divide by. All is done by operations on bits, without a table. A scale that is not finite makes its whole
// block NaN.
#pragma once

#include "random_bits.h"

namespace dslaunch {

// Elements that share a scale.
constexpr long long scaled_numel = 256;

struct eight_bits {
    unsigned char code;
};

// What is constant over a block.
struct Scale {
    float largest;   // of the absolute values
    float zero;      // 0, or NaN where `largest` is not finite
    float unit;      // what a code's number is multiplied with
    float per_unit;  // what a value is multiplied with before it becomes a code
};

DSLAUNCH_INLINE Scale scale_of(float largest) {
    constexpr float top = 1.875f;
    constexpr float finite = 3.4028235e38f;
    const float quotient = top / largest;  // infinity for 0 and the smallest numbers
    return {largest, largest - largest, largest * (1.0f / top), quotient < finite ? quotient : finite};
}

template <bool is_signed>
struct Codes {
    static constexpr int largest = is_signed ? 127 : 255;
    static constexpr unsigned int bias = (is_signed ? 127 - 15 : 127 - 31) << 3;  // in bits of a float32 >> 20

    static DSLAUNCH_INLINE float smallest() { return float_of((bias + 1) << 20); }

    static DSLAUNCH_INLINE float decode(eight_bits from, const Scale& scale) {
        const unsigned int code = is_signed ? from.code & 0x7fu : from.code;
        float value = float_of((code + bias) << 20) * scale.unit;
        value = code == static_cast<unsigned int>(largest) ? scale.largest : value;
        value = code == 0u ? scale.zero : value;
        return is_signed ? float_of(bits_of(value) | (from.code & 0x80u) << 24) : value;
    }

    // By the lower half of `bits`.
    static DSLAUNCH_INLINE eight_bits encode(float value, const Scale& scale, unsigned int bits) {
        const unsigned int half = bits & 0xffffu;
        const float size = float_of(bits_of(value) & 0x7fffffffu);
        const float scaled = size * scale.per_unit;
        int code = static_cast<int>((bits_of(scaled) + (half << 4)) >> 20) - static_cast<int>(bias);
        code = code < largest ? code : largest;
        const float threshold = is_signed ? static_cast<float>(static_cast<int>(half)) * (smallest() / 65536.0f) : 0.0f;
        code = scaled < smallest() ? (threshold < scaled ? 1 : 0) : code;
        code = size >= scale.largest ? largest : code;
        code = size == 0.0f ? 0 : code;
        const unsigned int sign = is_signed ? bits_of(value) >> 24 & 0x80u : 0u;
        return {static_cast<unsigned char>(static_cast<unsigned int>(code) | sign)};
    }
};

// The largest absolute value of a block, NaN if there is one: the bits of numbers of one sign have their order.
DSLAUNCH_INLINE float largest_of(const float* values, long long numel) {
    int most = 0;
    for (long long i = 0; i < numel; ++i) {
        const int bits = static_cast<int>(bits_of(values[i]) & 0x7fffffffu);
        most = bits > most ? bits : most;
    }
    return float_of(static_cast<unsigned int>(most));
}

}  // namespace dslaunch
