#include "segments.h"

#include <cmath>

namespace dslaunch {

double Fields::finite(const char* field) const {
    const double value = number<double>(field);
    if (!std::isfinite(value)) refuse_value(name_, '.', field, ": ", value, "; must be finite");
    return value;
}

double Fields::non_negative(const char* field) const {
    const double value = number<double>(field);
    if (!(value >= 0.0) || std::isinf(value)) refuse_value(name_, '.', field, ": ", value, "; must be finite and >= 0");
    return value;
}

double Fields::beta(const char* field) const {
    const double value = number<double>(field);
    if (!(value >= 0.0 && value < 1.0)) refuse_value(name_, '.', field, ": ", value, "; must be in [0, 1)");
    return value;
}

double Fields::step() const {
    const auto step = number<std::int64_t>("step");
    if (step < 1) refuse_value(name_, ".step: ", step, "; must be >= 1: the first step is step 1");
    return static_cast<double>(step);
}

Rounding Fields::rounding() const {
    if (attribute(segment_, "seed", name_, kind_).is_none()) return {false, 0, 0};
    const auto seed = number<std::int64_t>("seed");
    const auto first = number<std::int64_t>("first");
    if (seed < 0 || seed >> 32 != 0) refuse_value(name_, ".seed: ", seed, "; must be None or fit in 32 bits");
    if (first < 0) refuse_value(name_, ".first: ", first, "; must be >= 0");
    return {true, static_cast<unsigned int>(seed), first};
}

void Fields::check_has_states(const char* field, double value) const {
    if (lacking_.empty() || number<std::int64_t>("numel") == 0) return;
    refuse_value(lacking_, ": None, but ", name_, " has ", field, ' ', value, "; pass an array, of zeros before step 1");
}

void check_overlap(const std::vector<std::pair<std::int64_t, std::int64_t>>& ranges, const std::string& name) {
    std::vector<std::size_t> order(ranges.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    order.erase(std::remove_if(order.begin(), order.end(), [&](std::size_t i) { return ranges[i].second == 0; }),
                order.end());
    std::sort(order.begin(), order.end(),
              [&](std::size_t a, std::size_t b) { return ranges[a].first < ranges[b].first; });
    for (std::size_t k = 1; k < order.size(); ++k) {
        const auto [a_begin, a_numel] = ranges[order[k - 1]];
        const auto [b_begin, b_numel] = ranges[order[k]];
        if (b_begin < a_begin + a_numel) {
            refuse_value(name, '[', order[k], "]: elements [", b_begin, ", ", b_begin + b_numel, ") overlap ", name,
                         '[', order[k - 1], "], elements [", a_begin, ", ", a_begin + a_numel, ")");
        }
    }
}

void check_fits(std::int64_t offset, std::int64_t numel, std::int64_t shard_numel, const std::string& name) {
    if (offset < 0 || numel < 0 || offset > shard_numel || numel > shard_numel - offset) {
        refuse_value(name, ": offset ", offset, " and numel ", numel, " do not fit in the shard of ", shard_numel,
                     " elements");
    }
}

}  // namespace dslaunch
