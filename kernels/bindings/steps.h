// What module.cpp puts together: each adds the calls of its file.
#pragma once

#include <nanobind/nanobind.h>

namespace dslaunch {

void bind_adam(nanobind::module_& m);
void bind_lion(nanobind::module_& m);
void bind_adagrad(nanobind::module_& m);
void bind_sgd(nanobind::module_& m);
void bind_lamb(nanobind::module_& m);
void bind_norm(nanobind::module_& m);

}  // namespace dslaunch
