"""Values that programs import from DeepSpeed."""

from __future__ import annotations

import os
from datetime import timedelta

from ..runtime.optimizers.registry import DEEPSPEED_CONSTANTS

TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
CROSS_RANK, CROSS_SIZE, LOCAL_RANK = "CROSS_RANK", "CROSS_SIZE", "LOCAL_RANK"
default_pg_timeout = timedelta(minutes=int(os.environ.get("DEEPSPEED_TIMEOUT", "10")))
MIN_SWAPPABLE_BYTES = 1024**2
HAS_TRITON = False  # none of our kernels is Triton's

DEEPSPEED_ENVIRONMENT_NAME = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
DEEPSPEED_ENVIRONMENT_PATHS = [os.path.expanduser("~"), "."]
DLTS_HOSTFILE = "/job/hostfile"

LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR = "LRRangeTest", "OneCycle", "WarmupLR"
WARMUP_DECAY_LR, WARMUP_COSINE_LR = "WarmupDecayLR", "WarmupCosineLR"
VALID_LR_SCHEDULES = [LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR]

globals().update(DEEPSPEED_CONSTANTS)  # ADAM_OPTIMIZER and others

MODEL_FILE_PREFIX, ZERO_FILE_PREFIX = "mp_rank_", "zero_pp_rank_"
OPTIM_FILE_SUFFIX, MODEL_FILE_SUFFIX = "_optim_states.pt", "_model_states.pt"
