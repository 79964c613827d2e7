// Adam and AdamW over flat arrays on the CPU: the plain loop, then the one that uses every core and vector unit.

#include "update.h"

namespace dslaunch {
namespace {

template <bool adam_w>
struct Adam {
    static constexpr int num_states = 2;
    using Coefficients = AdamCoefficients;
    static DSLAUNCH_INLINE void update(float& p, float g, float& m, float& v, const Coefficients& c) {
        adam_element<adam_w>(p, g, m, v, c);
    }
};

auto cut(const Shards<AdamHyper>& shards, const AdamOptions& options, std::int64_t max_numel) {
    return cut_into_blocks(shards, max_numel, [&](const Segment<AdamHyper>& segment) {
        return adam_coefficients(segment.hyper, options.adam_w_mode, options.grad_scale);
    });
}

}  // namespace

void adamw_step_reference(const Shards<AdamHyper>& shards, const AdamOptions& options) {
    for (const auto& block : cut(shards, options, uncut)) {
        options.adam_w_mode ? update_plainly<Adam<true>>(block) : update_plainly<Adam<false>>(block);
    }
}

DSLAUNCH_CLONES void adam_block(const Block<AdamHyper, AdamCoefficients>& block, bool adam_w_mode) {
    adam_w_mode ? update_block<Adam<true>>(block) : update_block<Adam<false>>(block);
}

void adamw_step(const Shards<AdamHyper>& shards, const AdamOptions& options, int num_threads) {
    update_blocks(cut(shards, options, block_numel), num_threads,
                  [&](const auto& block) { adam_block(block, options.adam_w_mode); });
}

}  // namespace dslaunch
