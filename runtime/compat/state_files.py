"""Files with what a checkpoint says beside its weights, for programs that open DeepSpeed's
files by torch.load.

A checkpoint of DeepSpeed has such files. For one of ours they are made when they are asked for, in a
temporary folder of this process that goes with it: the checkpoint stays as it was written. Lightning's
convert_zero_checkpoint_to_fp32_state_dict() reads the stage in one and takes its own entries from the other.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import tempfile
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.deepspeed.folder import is_deepspeed
from ..checkpoint.export.source import locate
from ..checkpoint.opened import open_checkpoint
from ..errors import CheckpointError
from ..placement.stage_policy import Placement, policy_for_stage

_MODEL, _OPTIMIZER = "model_states", "optim_states"
_SHARDED_PREFIX = "zero_pp_rank_0_"
_NUMBER = re.compile(r"(\d+)")

_Where = str | os.PathLike[str]


def get_optim_files(checkpoint_dir: _Where) -> list[str]:
    """Return the files that tell of the optimizer: DeepSpeed's, one a rank,
    or one with its `zero_stage` and the ds_config.

    Errors: CheckpointError if the folder holds no checkpoint
    """
    return _deepspeeds(checkpoint_dir, _OPTIMIZER) or [str(_make(checkpoint_dir, _OPTIMIZER))]


def get_model_state_files(checkpoint_dir: _Where) -> list[str]:
    """Return the files that tell of the model: DeepSpeed's, or the one of `get_model_state_file`.

    Errors: CheckpointError if the folder holds no checkpoint
    """
    return _deepspeeds(checkpoint_dir, _MODEL) or [str(_make(checkpoint_dir, _MODEL))]


def get_model_state_file(checkpoint_dir: _Where, zero_stage: int) -> str:
    """Return the file with client_state, its entries beside counters and the ds_config.

    Of a checkpoint of ours it has no weights: get_fp32_state_dict_from_zero_checkpoint() returns those.
    Errors: CheckpointError if the folder holds no checkpoint, or DeepSpeed's of another stage
    """
    files = _deepspeeds(checkpoint_dir, _MODEL)
    path = Path(files[0]) if files else _make(checkpoint_dir, _MODEL)
    is_sharded, is_wanted = path.name.startswith(_SHARDED_PREFIX), _is_per_rank(int(zero_stage))
    if is_sharded != is_wanted:
        raise CheckpointError(
            f"get_model_state_file({str(checkpoint_dir)!r}, zero_stage={int(zero_stage)}): the checkpoint is "
            f"of {'stage 3' if is_sharded else 'a stage below 3'}; give the zero_stage that "
            "get_optim_files() tells"
        )
    return str(path)


def _deepspeeds(where: _Where, what: str) -> list[str]:
    """Return the files in the order of ranks; none if the folder has no checkpoint of DeepSpeed's."""
    folder = Path(where)
    files = sorted(
        map(str, folder.glob(f"*_{what}.pt")),
        key=lambda path: [int(n) for n in _NUMBER.findall(Path(path).name)],
    )
    if not files and is_deepspeed(folder):
        raise CheckpointError(f"{folder} has no *_{what}.pt: it is of ZeRO stage 0, or damaged")
    return files


def _make(where: _Where, what: str) -> Path:
    """Write one anew each time, for the checkpoint may have changed."""
    store, tag = locate(where, None)
    reader = open_checkpoint(store, tag)
    training = reader.training()
    stage = int(training["config"].get("zero_optimization", {}).get("stage", 0))
    is_per_rank = _is_per_rank(stage)
    folder = _folder() / sha256(reader.where.encode()).hexdigest()[:16]
    folder.mkdir(exist_ok=True)
    # Named as DeepSpeed names its own.
    prefix = _SHARDED_PREFIX if what == _OPTIMIZER or is_per_rank else ""
    path = folder / f"{prefix}mp_rank_00_{what}.pt"
    if what == _OPTIMIZER:
        state = {"zero_stage": stage, "partition_count": training["world_size"]}
        saved: dict[str, Any] = {"optimizer_state_dict": state, "ds_config": training["config"]}
    else:
        counters = {
            name: training["progress"][name] for name in ("global_steps", "global_samples", "skipped_steps")
        }
        saved = {
            **training["client_state"],
            **counters,
            "dp_world_size": training["world_size"],
            "mp_world_size": 1,
            "ds_config": training["config"],
        }
    torch.save(saved, path)
    return path


def _is_per_rank(zero_stage: int) -> bool:
    """Whether DeepSpeed gives each rank a file of the model: where parameters are sharded."""
    return policy_for_stage(zero_stage).parameters is Placement.SHARDED


@cache
def _folder() -> Path:
    path = tempfile.mkdtemp(prefix="dslaunch-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return Path(path)
