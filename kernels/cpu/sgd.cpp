// SGD over flat arrays on the CPU: the plain loop, then the one that uses every core and vector unit.

#include "update.h"

namespace dslaunch {
namespace {

template <SgdMode mode>
struct Sgd {
    static constexpr int num_states = mode == SgdMode::without_momentum ? 0 : 1;
    using Coefficients = SgdCoefficients;
    static DSLAUNCH_INLINE void update(float& p, float g, float& b, float&, const Coefficients& c) {
        sgd_element<mode>(p, g, b, c);
    }
};

using SgdBlock = Block<SgdHyper, SgdCoefficients>;

SgdMode mode_of(const SgdBlock& block) {
    const SgdHyper& h = block.segment->hyper;
    if (h.momentum == 0.0) return SgdMode::without_momentum;
    return h.nesterov ? SgdMode::nesterov : SgdMode::with_momentum;
}

auto cut(const Shards<SgdHyper>& shards, double grad_scale, std::int64_t max_numel) {
    return cut_into_blocks(shards, max_numel, [&](const Segment<SgdHyper>& segment) {
        return sgd_coefficients(segment.hyper, grad_scale);
    });
}

}  // namespace

void sgd_step_reference(const Shards<SgdHyper>& shards, double grad_scale) {
    for (const SgdBlock& block : cut(shards, grad_scale, uncut)) {
        switch (mode_of(block)) {
            case SgdMode::nesterov: update_plainly<Sgd<SgdMode::nesterov>>(block); break;
            case SgdMode::with_momentum: update_plainly<Sgd<SgdMode::with_momentum>>(block); break;
            default: update_plainly<Sgd<SgdMode::without_momentum>>(block);
        }
    }
}

DSLAUNCH_CLONES void sgd_block(const SgdBlock& block, SgdMode mode) {
    switch (mode) {
        case SgdMode::nesterov: return update_block<Sgd<SgdMode::nesterov>>(block);
        case SgdMode::with_momentum: return update_block<Sgd<SgdMode::with_momentum>>(block);
        default: return update_block<Sgd<SgdMode::without_momentum>>(block);
    }
}

void sgd_step(const Shards<SgdHyper>& shards, double grad_scale, int num_threads) {
    update_blocks(cut(shards, grad_scale, block_numel), num_threads,
                  [](const SgdBlock& block) { sgd_block(block, mode_of(block)); });
}

}  // namespace dslaunch
