#include "../lion.h"
#include "step.cuh"

DSLAUNCH_STEP_KERNEL(Lion)
