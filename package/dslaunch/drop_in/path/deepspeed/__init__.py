"""`deepspeed` of dslaunch: see dslaunch/drop_in/names."""

import os

from dslaunch.drop_in.serve import serve

__getattr__, __dir__ = serve("deepspeed")

if os.environ.get("DSLAUNCH_SNAPSHOT_EVERY"):
    from dslaunch.runtime.compat.trainer_snapshots import watch

    watch()
