#include "../sgd.h"
#include "update.h"

DSLAUNCH_CPU_STEP(Sgd)
