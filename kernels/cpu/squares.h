// Sums of squares whose result does not depend on the number of threads or on the vectors' width, because the order of
// additions is fixed: element i of a block goes to partial sum i % num_lanes, lanes are added in order, then blocks.
#pragma once

#include <cstdint>

#include "../scalar.h"

namespace dslaunch {

// Four of the widest vectors (8 doubles): an addition need not wait for the one before it.
constexpr int num_lanes = 32;

// Adds the squares of the next elements of a block to its lanes. All calls but a block's last one take a multiple of
// num_lanes.
template <typename T>
DSLAUNCH_INLINE void add_squares(double* __restrict lanes, const T* __restrict data, std::int64_t numel) {
    double sums[num_lanes];  // a copy stays in registers
    for (int lane = 0; lane < num_lanes; ++lane) sums[lane] = lanes[lane];
    std::int64_t i = 0;
    for (; i + num_lanes <= numel; i += num_lanes) {
        for (int lane = 0; lane < num_lanes; ++lane) {
            const double x = to_float(data[i + lane]);
            sums[lane] += x * x;
        }
    }
    for (int lane = 0; i < numel; ++i, ++lane) {
        const double x = to_float(data[i]);
        sums[lane] += x * x;
    }
    for (int lane = 0; lane < num_lanes; ++lane) lanes[lane] = sums[lane];
}

DSLAUNCH_INLINE double sum_of_lanes(const double* lanes) {
    double sum = 0.0;
    for (int lane = 0; lane < num_lanes; ++lane) sum += lanes[lane];
    return sum;
}

}  // namespace dslaunch
