#pragma once

#include <nanobind/nanobind.h>

namespace dslaunch {

// Adds what kernels/disk.py calls.
void bind_disk(nanobind::module_& m);

}  // namespace dslaunch
