// Sums of squares whose result does not depend on the number of threads or on the vectors' width, because the
// order of additions is fixed: element i of a block goes to partial sum i % num_lanes, lanes are added in
// order, then blocks.
#pragma once

#include <cstdint>

#include "../bfloat16.h"
#include "../float16.h"

namespace dslaunch {

// Four of the widest vectors (8 doubles): an addition need not wait for the one before it.
constexpr int num_lanes = 32;

// Adds the next elements of a block to its lanes: their squares, or `are_squares`. All calls but a block's
// last one take a multiple of num_lanes.
template <bool are_squares = false>
DSLAUNCH_INLINE void add_squares(double* __restrict lanes, const float* __restrict data, std::int64_t numel) {
    double sums[num_lanes];  // a copy stays in registers
    for (int lane = 0; lane < num_lanes; ++lane) sums[lane] = lanes[lane];
    std::int64_t i = 0;
    for (; i + num_lanes <= numel; i += num_lanes) {
        for (int lane = 0; lane < num_lanes; ++lane) {
            const double x = data[i + lane];
            sums[lane] += are_squares ? x : x * x;
        }
    }
    for (int lane = 0; i < numel; ++i, ++lane) {
        const double x = data[i];
        sums[lane] += are_squares ? x : x * x;
    }
    for (int lane = 0; lane < num_lanes; ++lane) lanes[lane] = sums[lane];
}

// The same for 16-bit elements, which become float32 a tile at a time: two loops of two widths each are
// faster than one of three.
constexpr std::int64_t square_tile_numel = 16 * num_lanes;

DSLAUNCH_INLINE void add_squares(double* __restrict lanes, const bfloat16* __restrict data, std::int64_t numel) {
    float tile[square_tile_numel];
    for (std::int64_t at = 0; at < numel; at += square_tile_numel) {
        const std::int64_t size = numel - at < square_tile_numel ? numel - at : square_tile_numel;
        for (std::int64_t i = 0; i < size; ++i) tile[i] = to_float(data[at + i]);
        add_squares(lanes, tile, size);
    }
}

// A float16's square is exact in float32: 22 bits, from 2^-48 to 2^32.
// (A bfloat16's may be too large or too small.)
DSLAUNCH_INLINE void add_squares(double* __restrict lanes, const float16* __restrict data, std::int64_t numel) {
    float tile[square_tile_numel];
    for (std::int64_t at = 0; at < numel; at += square_tile_numel) {
        const std::int64_t size = numel - at < square_tile_numel ? numel - at : square_tile_numel;
        for (std::int64_t i = 0; i < size; ++i) {
            const float x = to_float(data[at + i]);
            tile[i] = x * x;
        }
        add_squares<true>(lanes, tile, size);
    }
}

DSLAUNCH_INLINE double sum_of_lanes(const double* lanes) {
    double sum = 0.0;
    for (int lane = 0; lane < num_lanes; ++lane) sum += lanes[lane];
    return sum;
}

}  // namespace dslaunch
