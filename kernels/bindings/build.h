#pragma once

#include <nanobind/nanobind.h>

namespace dslaunch {

// Adds `build_info`: how this module was compiled, and what of it this processor runs.
void bind_build(nanobind::module_& m);

}  // namespace dslaunch
