// The Python edge: read the arguments, refuse what the loops cannot take, release the GIL, call.

#include "build.h"
#include "disk.h"
#include "steps.h"

NB_MODULE(_C, m) {
    // A program may end while an engine is alive, in a cycle or a global: that is no fault to be told on its screen.
    nanobind::set_leak_warnings(false);
    dslaunch::bind_steps(m);
    dslaunch::bind_lamb(m);
    dslaunch::bind_norm(m);
    dslaunch::bind_build(m);
    dslaunch::bind_disk(m);
}
