#include "../adam.h"
#include "update.h"

DSLAUNCH_CPU_STEP(Adam)
