// Functions that module.cpp calls: each adds the calls of its file.
#pragma once

#include <nanobind/nanobind.h>

namespace dslaunch {

void bind_steps(nanobind::module_& m);
void bind_lamb(nanobind::module_& m);
void bind_norm(nanobind::module_& m);

}  // namespace dslaunch
