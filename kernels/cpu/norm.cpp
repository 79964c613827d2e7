// The sum of squares of flat arrays, in one read.
//
// The order of additions is fixed, so the result does not depend on the number of threads or on the vectors' width:
// element i of a block goes to partial sum i % num_lanes, lanes are added in order, then blocks, then arrays.

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

// A range of one array, and its sum.
struct Block {
    const GradArray* grad;
    std::int64_t begin;
    std::int64_t numel;
    double sum;
};

double block_sum(const Block& block) {
    const GradArray& grad = *block.grad;
    return grad.is_bfloat16 ? norm_block_bfloat16(static_cast<const bfloat16*>(grad.data) + block.begin, block.numel)
                            : norm_block(static_cast<const float*>(grad.data) + block.begin, block.numel);
}

}  // namespace

double squared_norm(const std::vector<GradArray>& grads, int num_threads) {
    std::vector<Block> blocks;
    for (const GradArray& grad : grads) {
        for (std::int64_t begin = 0; begin < grad.numel; begin += block_numel) {
            blocks.push_back({&grad, begin, std::min(block_numel, grad.numel - begin), 0.0});
        }
    }
    for_each_block(static_cast<std::int64_t>(blocks.size()), num_threads, [&](std::int64_t i) {
        Block& block = blocks[static_cast<std::size_t>(i)];
        block.sum = block_sum(block);
    });
    double sum = 0.0;
    for (std::size_t i = 0; i < blocks.size();) {
        const GradArray* const grad = blocks[i].grad;
        double of_grad = 0.0;
        for (; i < blocks.size() && blocks[i].grad == grad; ++i) of_grad += blocks[i].sum;
        sum += of_grad;
    }
    return sum;
}

}  // namespace dslaunch
