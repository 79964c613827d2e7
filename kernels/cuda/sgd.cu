#include "../sgd.h"
#include "step.cuh"

DSLAUNCH_STEP_KERNEL(Sgd)
