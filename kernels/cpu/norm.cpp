// The sum of squares of a flat array, in one read.
//
// The order of additions is fixed, so the result does not depend on the number of threads or on the vectors'
// width: element i of a block goes to partial sum i % num_lanes, lanes are added in order, then blocks in order.

#include "blocks.h"
#include "flat.h"

namespace dslaunch {
namespace {

// Four of the widest vectors (8 doubles): an addition need not wait for the one before it.
constexpr int num_lanes = 32;

template <typename T>
DSLAUNCH_INLINE double sum_of_squares(const T* grad, std::int64_t numel) {
    double lanes[num_lanes] = {};
    std::int64_t i = 0;
    for (; i + num_lanes <= numel; i += num_lanes) {
        for (int lane = 0; lane < num_lanes; ++lane) {
            const double g = to_float(grad[i + lane]);
            lanes[lane] += g * g;
        }
    }
    for (int lane = 0; i < numel; ++i, ++lane) {
        const double g = to_float(grad[i]);
        lanes[lane] += g * g;
    }
    double sum = 0.0;
    for (const double lane : lanes) sum += lane;
    return sum;
}

}  // namespace

DSLAUNCH_CLONES double norm_block(const float* grad, std::int64_t numel) { return sum_of_squares(grad, numel); }

DSLAUNCH_CLONES double norm_block_bfloat16(const bfloat16* grad, std::int64_t numel) {
    return sum_of_squares(grad, numel);
}

namespace {

template <typename T>
double sum_blocks(const T* grad, std::int64_t numel, int num_threads, double (*block_sum)(const T*, std::int64_t)) {
    const std::int64_t num_blocks = (numel + block_numel - 1) / block_numel;
    std::vector<double> sums(static_cast<std::size_t>(num_blocks));
    for_each_block(num_blocks, num_threads, [&](std::int64_t block) {
        const std::int64_t begin = block * block_numel;
        sums[static_cast<std::size_t>(block)] = block_sum(grad + begin, std::min(block_numel, numel - begin));
    });
    double sum = 0.0;
    for (const double block : sums) sum += block;
    return sum;
}

}  // namespace

double squared_norm(const float* grad, std::int64_t numel, int num_threads) {
    return sum_blocks(grad, numel, num_threads, norm_block);
}

double squared_norm(const bfloat16* grad, std::int64_t numel, int num_threads) {
    return sum_blocks(grad, numel, num_threads, norm_block_bfloat16);
}

}  // namespace dslaunch
