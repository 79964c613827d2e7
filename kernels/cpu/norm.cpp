// The sum of squares of flat arrays, in one read; see squares.h for the order of additions.
// Arrays are added in order.

#include "blocks.h"
#include "flat.h"
#include "squares.h"

namespace dslaunch {
namespace {

template <typename T>
DSLAUNCH_INLINE double sum_of_squares(const void* data, std::int64_t begin, std::int64_t numel) {
    double lanes[num_lanes] = {};
    add_squares(lanes, static_cast<const T*>(data) + begin, numel);
    return sum_of_lanes(lanes);
}

}  // namespace

DSLAUNCH_CLONES double norm_block(const GradArray& grad, std::int64_t begin, std::int64_t numel) {
    switch (grad.dtype) {
        case Dtype::bfloat16: return sum_of_squares<bfloat16>(grad.data, begin, numel);
        case Dtype::float16: return sum_of_squares<float16>(grad.data, begin, numel);
        default: return sum_of_squares<float>(grad.data, begin, numel);
    }
}

namespace {

// A range of one array, and its sum.
struct NormBlock {
    const GradArray* grad;
    std::int64_t begin;
    std::int64_t numel;
    double sum;
};

}  // namespace

double squared_norm(const std::vector<GradArray>& grads, int num_threads) {
    std::vector<NormBlock> blocks;
    for (const GradArray& grad : grads) {
        for (std::int64_t begin = 0; begin < grad.numel; begin += block_numel) {
            blocks.push_back({&grad, begin, std::min(block_numel, grad.numel - begin), 0.0});
        }
    }
    for_each_block(static_cast<std::int64_t>(blocks.size()), num_threads, [&](std::int64_t i) {
        NormBlock& block = blocks[static_cast<std::size_t>(i)];
        block.sum = norm_block(*block.grad, block.begin, block.numel);
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
