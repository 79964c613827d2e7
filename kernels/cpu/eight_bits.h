// Steps of states of 8 bits: a tile of them at a time is float32 in cache, where the loops of float32 states do the
// step. So types and optimizers multiply no loops.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../eight_bits.h"

namespace dslaunch {

// Elements of a tile: two states of it are 8 KiB, and starting a loop costs nothing beside it.
constexpr std::int64_t scaled_tile_numel = 4 * scaled_numel;

// A run of states: `numel` elements from the first one of a block on, and the blocks' scales.
struct ScaledRun {
    eight_bits* codes;
    float* scales;
    std::int64_t numel;
};

// Random bits of a run: `place` is that of its first element, and `shift` chooses the half of the bits.
struct ScaledBits {
    unsigned int place;
    unsigned int key;
    int shift;
};

template <bool is_signed>
DSLAUNCH_INLINE void decode_run(const ScaledRun& run, float* __restrict values) {
    for (std::int64_t at = 0; at < run.numel; at += scaled_numel) {
        const Scale scale = scale_of(run.scales[at / scaled_numel]);
        const std::int64_t numel = std::min<std::int64_t>(scaled_numel, run.numel - at);
        const eight_bits* const codes = run.codes + at;
        for (std::int64_t i = 0; i < numel; ++i) values[at + i] = Codes<is_signed>::decode(codes[i], scale);
    }
}

template <bool is_signed>
DSLAUNCH_INLINE void encode_run(const ScaledRun& run, const float* __restrict values, const ScaledBits& bits) {
    for (std::int64_t at = 0; at < run.numel; at += scaled_numel) {
        const std::int64_t numel = std::min<std::int64_t>(scaled_numel, run.numel - at);
        const Scale scale = scale_of(largest_of(values + at, numel));
        run.scales[at / scaled_numel] = scale.largest;
        eight_bits* const codes = run.codes + at;
        const unsigned int place = bits.place + static_cast<unsigned int>(at);
        for (std::int64_t i = 0; i < numel; ++i) {
            const unsigned int own = random_bits(spread(place + static_cast<unsigned int>(i)), bits.key);
            codes[i] = Codes<is_signed>::encode(values[at + i], scale, own >> bits.shift);
        }
    }
}

// With the widest vectors of this processor.
void decode_signed(const ScaledRun& run, float* values);
void decode_unsigned(const ScaledRun& run, float* values);
void encode_signed(const ScaledRun& run, const float* values, const ScaledBits& bits);
void encode_unsigned(const ScaledRun& run, const float* values, const ScaledBits& bits);

template <bool is_plain>
void decode(const ScaledRun& run, float* values, bool is_signed) {
    if (is_plain) return is_signed ? decode_run<true>(run, values) : decode_run<false>(run, values);
    is_signed ? decode_signed(run, values) : decode_unsigned(run, values);
}

template <bool is_plain>
void encode(const ScaledRun& run, const float* values, const ScaledBits& bits, bool is_signed) {
    if (is_plain) return is_signed ? encode_run<true>(run, values, bits) : encode_run<false>(run, values, bits);
    is_signed ? encode_signed(run, values, bits) : encode_unsigned(run, values, bits);
}

}  // namespace dslaunch
