// The Python edge: read the arguments, refuse what the loops cannot take, release the GIL, call.

#include <nanobind/nanobind.h>

#include "build.h"
#include "disk.h"
#include "steps.h"

NB_MODULE(_C, m) {
    // Objects that a program holds when it ends, such as an engine with parameters on NVMe, are not always
    // collected. Without this line nanobind then prints 40 lines on leaks.
    nanobind::set_leak_warnings(false);
    dslaunch::bind_steps(m);
    dslaunch::bind_lamb(m);
    dslaunch::bind_norm(m);
    dslaunch::bind_build(m);
    dslaunch::bind_disk(m);
}
