"""The files of a checkpoint.

One checkpoint
--------------
`<dir>/<tag>/` holds the whole training state by parameter name, every tensor with its true shape, so any
stage and any number of ranks can read it; `<dir>/latest` holds the newest tag.

    __<rank>_0.distcp   that rank's part of parameters, masters and optimizer states:
                        1/world of each; see writer.py
    .metadata           torch.distributed.checkpoint's index: which box of which tensor is where;
                        for names see tensor_runs.py
    training.pt         all else; plain data and small tensors, which torch.load(weights_only=True) reads
    manifest.json       all files with their bytes and digests; written last

training.pt:

    world_size      ranks that wrote it
    buffers         names of buffers, integer parameters and extra states of modules
    left_out        names of the parameters that were not saved (exclude_frozen_parameters)
    frozen          names of the parameters that need no gradient, saved or not
    aliases         other name -> name, of tied parameters
    kept_dtypes     names of packed bits and their scales, which keep their dtype in every export
    no_weights      names of tensors that no state_dict has, and no export
    optimizer       None, or {name, num_steps, groups: hyper-parameters, state_names: of states with a number
                    per element, beside: name -> what the optimizer remembers otherwise, e.g. a step count}
    extra_state     of modules, by its key in their state_dict
    scheduler       its state_dict, or None
    loss_scale      fp16's dynamic scale and what it depends on, or None
    progress        global_steps, global_samples, skipped_steps, micro_steps
    data            epoch, num_samples given in it to all ranks, length of the training data;
                    None without a loader
    rng             per rank: torch, cuda, python, numpy
    client_state    that of the first rank which gave one; {} if none did
    client_states   what each rank gets at a load by as many ranks; only there if ranks gave different ones
    config          the ds_config in effect
"""

from __future__ import annotations

import os
import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch

from ...errors import CheckpointError

TRAINING_FILE = "training.pt"

_PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.Tensor,
    torch.Size,
    torch.dtype,
    torch.device,
)
_SEQUENCES = (list, tuple, set)
_MAPPINGS = (dict, OrderedDict, Counter)


def write_atomically(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file under a temporary name of its own, bring it to the disk,
    and only then give it its name.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with partial.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the name is as durable as the bytes
    finally:
        os.close(folder)


def check_is_plain(value: Any, where: str) -> None:
    """Refuse what torch.load(weights_only=True) would refuse later, when it is too late.

    Errors: CheckpointError naming the place
    """
    kind = type(value)  # exactly: numpy.float64 is a float, too, and cannot be read back
    if kind in _MAPPINGS:
        for key, item in value.items():
            check_is_plain(key, f"a key of {where}")
            check_is_plain(item, f"{where}[{key!r}]")
    elif kind in _SEQUENCES:
        for index, item in enumerate(value):
            check_is_plain(item, f"{where}[{index}]")
    elif kind not in _PLAIN:
        raise CheckpointError(
            f"{where} is a {kind.__module__}.{kind.__qualname__}; a checkpoint holds numbers, strings, "
            "tensors, and lists and dicts of them: convert it, e.g. with vars() or .item()"
        )
