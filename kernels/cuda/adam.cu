#include "../adam.h"
#include "step.cuh"

DSLAUNCH_STEP_KERNEL(Adam)
