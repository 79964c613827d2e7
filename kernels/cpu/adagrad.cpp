// Adagrad over flat arrays on the CPU: the plain loop, then the one that uses every core and vector unit.

#include "update.h"

namespace dslaunch {
namespace {

struct Adagrad {
    static constexpr int num_states = 1;
    using Coefficients = AdagradCoefficients;
    static DSLAUNCH_INLINE void update(float& p, float g, float& s, float&, const Coefficients& c) {
        adagrad_element(p, g, s, c);
    }
};

auto cut(const Shards<AdagradHyper>& shards, double grad_scale, std::int64_t max_numel) {
    return cut_into_blocks(shards, max_numel, [&](const Segment<AdagradHyper>& segment) {
        return adagrad_coefficients(segment.hyper, grad_scale);
    });
}

}  // namespace

void adagrad_step_reference(const Shards<AdagradHyper>& shards, double grad_scale) {
    for (const auto& block : cut(shards, grad_scale, uncut)) update_plainly<Adagrad>(block);
}

DSLAUNCH_CLONES void adagrad_block(const Block<AdagradHyper, AdagradCoefficients>& block) {
    update_block<Adagrad>(block);
}

void adagrad_step(const Shards<AdagradHyper>& shards, double grad_scale, int num_threads) {
    update_blocks(cut(shards, grad_scale, block_numel), num_threads, adagrad_block);
}

}  // namespace dslaunch
