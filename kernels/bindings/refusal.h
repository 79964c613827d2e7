// How a bad argument is refused: what was given, what is allowed.
#pragma once

#include <nanobind/nanobind.h>

#include <sstream>
#include <string>

namespace nb = nanobind;

namespace dslaunch {

template <typename... Parts>
std::string text(const Parts&... parts) {
    std::ostringstream out;
    out.precision(15);
    (out << ... << parts);
    return out.str();
}

template <typename... Parts>
[[noreturn]] void refuse_value(const Parts&... parts) {
    throw nb::value_error(text(parts...).c_str());
}

template <typename... Parts>
[[noreturn]] void refuse_type(const Parts&... parts) {
    throw nb::type_error(text(parts...).c_str());
}

inline std::string type_of(nb::handle object) { return nb::type_name(object.type()).c_str(); }

}  // namespace dslaunch
