"""Saving: shards are gathered unit by unit to rank 0's host memory, which writes one file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..comm.collectives import Collectives
from ..errors import CheckpointError
from ..optim.rule import hyper_parameters
from ..zero.sub_buffer import SubBuffer
from .format import FORMAT, LATEST_FILE, STATE_FILE, check_is_plain, write_atomically
from .rng import rng_state
from .training import Training


def save_checkpoint(
    training: Training, folder: Path, tag: str, client_state: dict[str, Any], *, save_latest: bool
) -> None:
    """Write `folder`/`tag` and then point `latest` at it. See "One checkpoint" in format.py.

    Order:  a collective; no rank goes on before the file is on the disk
    Errors: CheckpointError, on every rank, if rank 0 cannot write it
    """
    parameters, optimizer = _gather(training)
    rng = training.comm.gather_objects(rng_state(), what="random number states")
    problem: str | None = None
    if rng is not None:  # rank 0
        state = _describe(training, client_state)
        state |= {"parameters": parameters, "optimizer": optimizer, "rng": rng}
        try:
            check_is_plain(client_state, "client_state")
            check_is_plain(state["buffers"], "the module's extra state")
            check_is_plain(state["scheduler"], "the scheduler's state")
            write_atomically(folder / tag / STATE_FILE, lambda file: torch.save(state, file))
            if save_latest:
                write_atomically(folder / LATEST_FILE, lambda file: file.write(tag.encode()))
        except CheckpointError as error:
            problem = str(error)
        except (OSError, RuntimeError) as error:  # torch's writer makes a RuntimeError of a full disk
            problem = f"checkpoint {folder / tag} cannot be written: {error}"
    problem = training.comm.all_gather_objects(problem, what="the success of saving")[0]
    if problem is not None:
        raise CheckpointError(problem)


def _describe(training: Training, client_state: dict[str, Any]) -> dict[str, Any]:
    has_state = hasattr(training.scheduler, "state_dict")
    return {
        "format": FORMAT,
        "world_size": training.comm.mesh.world.size,
        "buffers": {
            name: value.cpu() if isinstance(value, Tensor) else value
            for name, value in training.beside_units().items()
        },
        "scheduler": training.scheduler.state_dict() if has_state else None,
        "progress": training.progress.to_dict(),
        "data": None if training.loader is None else training.loader.state_dict(),
        "loss_scale": training.scaler.state_dict() if training.scaler.is_dynamic else None,
        "client_state": client_state,
        "config": training.config.describe(),
    }


def _gather(training: Training) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """Return parameters and optimizer by name on rank 0, empty shells elsewhere."""
    parameters: dict[str, Tensor] = {}
    for unit in training.model.units:
        for part in unit.parts:
            if part.is_trained or part.is_sharded:
                with part.here():
                    parameters |= _whole(part, part.master, training.comm)
            elif training.comm.mesh.world.index == 0:
                parameters |= by_name(part, part.values.flat)
    optimizer = training.optimizer
    if optimizer is None:
        return parameters, None
    states: dict[str, dict[str, Tensor]] = {}
    for part in optimizer.parts:
        with part.here():
            for state_name, shard in part.states.items():
                for name, tensor in _whole(part, shard, training.comm).items():
                    states.setdefault(name, {})[state_name] = tensor
    return parameters, {
        "name": optimizer.rule.name,
        "num_steps": optimizer.num_steps,
        "groups": [hyper_parameters(group) for group in optimizer.param_groups],
        "states": states,
        "beside": _merged(training.comm.gather_objects(optimizer.rule.beside(), what="a checkpoint")),
    }


def _merged(ranks: list[dict[str, dict[str, Any]]] | None) -> dict[str, dict[str, Any]]:
    """What the ranks remember, each of its own parameters."""
    merged: dict[str, dict[str, Any]] = {}
    for own in ranks or ():
        merged |= {name: values for name, values in own.items() if values}
    return merged


def _whole(part: SubBuffer, shard: Tensor, comm: Collectives) -> dict[str, Tensor]:
    flat = comm.gather_to_first(part.on_device(shard), what=part.label)
    return {} if flat is None else by_name(part, flat)


def by_name(part: SubBuffer, flat: Tensor) -> dict[str, Tensor]:
    """Copy each parameter's elements out: torch.save writes the whole storage behind a view."""
    return {
        member.name: flat[slot.offset : slot.offset + slot.numel].view(slot.shape).to("cpu", copy=True)
        for member, slot in zip(part.members, part.layout.slots, strict=True)
    }
