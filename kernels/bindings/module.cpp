// The Python edge: read the arguments, refuse what the loops cannot take, release the GIL, call.

#include "build.h"
#include "disk.h"
#include "steps.h"

NB_MODULE(_C, m) {
    dslaunch::bind_steps(m);
    dslaunch::bind_lamb(m);
    dslaunch::bind_norm(m);
    dslaunch::bind_build(m);
    dslaunch::bind_disk(m);
}
