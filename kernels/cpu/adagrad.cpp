#include "../adagrad.h"
#include "update.h"

DSLAUNCH_CPU_STEP(Adagrad)
