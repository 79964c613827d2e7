"""Variables that the launcher sets for its workers, beside those of torchrun, and who sets each of them.

The file travels to nodes, whose Python may be 3.8.
"""

from __future__ import annotations

# The plan of a job sets them, the same on every host.
MESH = "DSLAUNCH_MESH"  # sizes and order of the axes, as --mesh takes them
TRACE = "DSLAUNCH_TRACE"  # the steps to trace, as 10-12
DROP_IN = "DSLAUNCH_DROP_IN"  # says whether `import deepspeed` is ours
NUMERICS = "DSLAUNCH_NUMERICS"  # part, steps and folder of a run of `dslaunch numerics`, as plain:3:/tmp/a
TRIAL = "DSLAUNCH_TRIAL"  # steps before and in the measurement of `dslaunch plan --tune`, as 2:5
ROLE = "DSLAUNCH_ROLE"  # trainer, or the name of a --role; only in a job with roles, as the next two
ROLE_INDEX = "DSLAUNCH_ROLE_INDEX"  # the place of its host among the role's hosts, from 0
SNAPSHOT_EVERY = "DSLAUNCH_SNAPSHOT_EVERY"  # steps, or seconds as 30s, between snapshots in memory
ATTEMPT = "DSLAUNCH_ATTEMPT"  # number of starts of the job before; only in a job with snapshots
KEPT_FILES = "DSLAUNCH_KEPT_FILES"  # why files of such a run are written; empty if they vanish with it

# The launcher sends them with the start: the addresses of the hosts of each role, joined by commas.
HOSTS_OF = "DSLAUNCH_HOSTS_"  # the beginning of the name, which ends with that of the role in capitals

# Variables that each host sets when it starts a rank.
DEVICES = "CUDA_VISIBLE_DEVICES"
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
THREADS = "OMP_NUM_THREADS"
MASTER_ADDR = "MASTER_ADDR"
MASTER_PORT = "MASTER_PORT"
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # torch writes there why a rank failed
PLACE_FILE = "DSLAUNCH_PLACE_FILE"  # file in which a rank writes its place along the axes
METRICS_PIPE = "DSLAUNCH_METRICS_PIPE"  # pipe into which a rank writes its numbers
METRICS_INTERVAL = "DSLAUNCH_METRICS_INTERVAL"  # seconds from one line to the next, at least
MILESTONES = "DSLAUNCH_MILESTONES"  # pipe into which a rank writes the phases of its start
MEMORY = "DSLAUNCH_MEMORY"  # socket of the agent that holds snapshots
BY_DISK = ".disk"  # added to the name of that file: a snapshot in memory is not enough
RESIZE_FILE = "DSLAUNCH_RESIZE_FILE"  # exists when ranks are asked to save and end
TRACE_FILE = "DSLAUNCH_TRACE_FILE"  # the beginning of the names of a rank's traces
PROFILER_LOG = "KINETO_LOG_LEVEL"

MAX_CONNECTIONS = "32"  # hardware queues of a process: CUDA has 8 by itself, and a training more streams
PROFILER_LOG_QUIET = "99"  # torch's profiler tells stderr that it begins and ends

# When a host sets the variables that it does not always set.
WITH_GPUS = "if the host has GPUs"
WITH_GPUS_UNSET = "if the host has GPUs and does not set it"
WITHOUT_GPUS_UNSET = "if the host has no GPUs and does not set it"
UNSET = "if the host does not set it"
