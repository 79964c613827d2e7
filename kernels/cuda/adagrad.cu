#include "../adagrad.h"
#include "step.cuh"

DSLAUNCH_STEP_KERNEL(Adagrad)
