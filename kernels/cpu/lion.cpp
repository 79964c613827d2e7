// Lion over flat arrays on the CPU: the plain loop, then the one that uses every core and vector unit.

#include "update.h"

namespace dslaunch {
namespace {

struct Lion {
    static constexpr int num_states = 1;
    using Coefficients = LionCoefficients;
    static DSLAUNCH_INLINE void update(float& p, float g, float& m, float&, const Coefficients& c) {
        lion_element(p, g, m, c);
    }
};

auto cut(const Shards<LionHyper>& shards, double grad_scale, std::int64_t max_numel) {
    return cut_into_blocks(shards, max_numel, [&](const Segment<LionHyper>& segment) {
        return lion_coefficients(segment.hyper, grad_scale);
    });
}

}  // namespace

void lion_step_reference(const Shards<LionHyper>& shards, double grad_scale) {
    for (const auto& block : cut(shards, grad_scale, uncut)) update_plainly<Lion>(block);
}

DSLAUNCH_CLONES void lion_block(const Block<LionHyper, LionCoefficients>& block) { update_block<Lion>(block); }

void lion_step(const Shards<LionHyper>& shards, double grad_scale, int num_threads) {
    update_blocks(cut(shards, grad_scale, block_numel), num_threads, lion_block);
}

}  // namespace dslaunch
