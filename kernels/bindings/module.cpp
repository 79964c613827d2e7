// The Python edge: read the arguments, refuse what the loops cannot take, release the GIL, call.

#include "disk.h"
#include "steps.h"

NB_MODULE(_C, m) {
    dslaunch::bind_adam(m);
    dslaunch::bind_lion(m);
    dslaunch::bind_adagrad(m);
    dslaunch::bind_sgd(m);
    dslaunch::bind_lamb(m);
    dslaunch::bind_norm(m);
    dslaunch::bind_disk(m);
}
