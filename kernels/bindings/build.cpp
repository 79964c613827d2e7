#include "build.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <omp.h>

#include <string>
#include <vector>

namespace nb = nanobind;

namespace dslaunch {
namespace {

// Newest last, as in CMakeLists.txt. Empty: the loops were compiled once.
std::vector<std::string> clone_targets() {
#if defined(DSLAUNCH_CLONE_TARGETS)
    return {DSLAUNCH_CLONE_TARGETS};
#else
    return {};
#endif
}

// Question of the loader before it takes a clone.
bool is_supported([[maybe_unused]] const std::string& target) {
#if defined(DSLAUNCH_CLONE_TARGETS)
    __builtin_cpu_init();
    if (target == "avx2") return __builtin_cpu_supports("avx2");
    if (target == "avx512f") return __builtin_cpu_supports("avx512f");
    if (target == "arch=x86-64-v4") {
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512vl");
    }
#endif
    return target == "default";
}

nb::typed<nb::dict, nb::str, nb::object> build_info() {
    nb::dict info;
    const std::vector<std::string> targets = clone_targets();
    std::string taken = "default";
    for (const std::string& target : targets) {
        if (is_supported(target)) taken = target;
    }
    info["compiler"] =
#if defined(__clang__)
        "clang " __clang_version__;
#else
        "GCC " __VERSION__;
#endif
    info["instruction_sets"] = targets;
    info["taken"] = taken;
    info["num_threads"] = omp_get_max_threads();
    return info;
}

}  // namespace

void bind_build(nb::module_& m) { m.def("build_info", build_info); }

}  // namespace dslaunch
