#include "../lion.h"
#include "update.h"

DSLAUNCH_CPU_STEP(Lion)
