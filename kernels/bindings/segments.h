// Segments and their numbers: which elements of a shard share hyper-parameters.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <string>
#include <type_traits>
#include <vector>

#include "../cpu/flat.h"
#include "refusal.h"

namespace dslaunch {

inline nb::object attribute(nb::handle owner, const char* field, const std::string& name, const std::string& kind) {
    if (!nb::hasattr(owner, field)) {
        const char* article = std::strchr("AEIOU", kind[0]) != nullptr ? "an " : "a ";
        refuse_type(name, ": a ", type_of(owner), " without '", field, "'; must be ", article, kind);
    }
    return owner.attr(field);
}

// The fields of one segment object, each read with its check. `lacking` is the name of a state that the shard
// does not have, or empty.
class Fields {
  public:
    Fields(nb::handle segment, std::string name, const std::string& kind, const std::string& lacking)
        : segment_(segment), name_(std::move(name)), kind_(kind), lacking_(lacking) {}

    const std::string& name() const { return name_; }

    template <typename T>
    T number(const char* field) const {
        const nb::object object = attribute(segment_, field, name_, kind_);
        T value;
        if (!nb::try_cast(object, value)) {
            refuse_type(name_, '.', field, ": ", nb::repr(object).c_str(), "; must be ",
                        std::is_same_v<T, bool>       ? "True or False"
                        : std::is_integral_v<T> ? "an int that fits in 64 bits"
                                                      : "a float");
        }
        return value;
    }

    // `seed` and `first`; a segment whose seed is None is rounded to nearest.
    Rounding rounding() const;

    double finite(const char* field) const;
    double non_negative(const char* field) const;
    double beta(const char* field) const;   // in [0, 1)
    double step() const;                    // 1 or more
    bool boolean(const char* field) const { return number<bool>(field); }

    // For an optimizer that needs its states with this value of a field.
    void check_has_states(const char* field, double value) const;

    template <typename... Parts>
    [[noreturn]] void refuse(const Parts&... parts) const {
        refuse_value(name_, parts...);
    }

  private:
    nb::handle segment_;
    std::string name_;
    const std::string& kind_;
    const std::string& lacking_;
};

// Errors if two segments that are not empty have an element in common; pairs are offset and numel.
void check_overlap(const std::vector<std::pair<std::int64_t, std::int64_t>>& ranges, const std::string& name);

// Errors if the elements are not all in the shard.
void check_fits(std::int64_t offset, std::int64_t numel, std::int64_t shard_numel, const std::string& name);

template <typename Kind>
std::vector<Segment<typename Kind::Hyper>> read_segments(nb::handle objects, const std::string& name,
                                                         std::int64_t shard_numel, const std::string& lacking) {
    const std::string kind = text(Kind::name, "Segment");
    std::vector<Segment<typename Kind::Hyper>> segments;
    std::vector<std::pair<std::int64_t, std::int64_t>> ranges;
    for (nb::handle object : objects) {
        const Fields fields(object, text(name, '[', segments.size(), ']'), kind, lacking);
        const auto offset = fields.number<std::int64_t>("offset");
        const auto numel = fields.number<std::int64_t>("numel");
        check_fits(offset, numel, shard_numel, fields.name());
        segments.push_back({offset, numel, Kind::read(fields), fields.rounding()});
        ranges.emplace_back(offset, numel);
    }
    check_overlap(ranges, name);
    return segments;
}

}  // namespace dslaunch
