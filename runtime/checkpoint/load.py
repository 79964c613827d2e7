"""Loading: every rank reads the file through a memory map and copies what its shards need. No collective moves data."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..optim.flat import FlatOptimizer
from ..zero.sub_buffer import Member, SubBuffer
from .format import FORMAT, LATEST_FILE, STATE_FILE
from .rng import restore_rng_state
from .training import Training

_LISTED = 5  # names in one message


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """What of a checkpoint to take."""

    strict: bool
    with_optimizer: bool
    with_scheduler: bool
    with_progress: bool


def load_checkpoint(
    training: Training, folder: Path, tag: str | None, plan: LoadPlan
) -> tuple[str, dict[str, Any]]:
    """Take the state of `folder`/`tag`, default the tag in `latest`; return its path and client_state.

    Nothing is changed unless everything fits.
    Order:  every rank must call this
    Errors: CheckpointError, on every rank, if one of them cannot read it or it does not fit
    """
    saved: dict[str, Any] = {}
    problem: str | None = None
    path = folder
    try:
        path, saved = _read(folder, tag)
        _check(training, saved, plan)
    except CheckpointError as error:
        problem = str(error)
    problems = training.comm.all_gather_objects(problem, what="the success of loading")
    for rank, text in enumerate(problems):
        if text is not None:
            raise CheckpointError(text if rank == 0 else f"on rank {rank}: {text}")
    _apply(training, saved, plan)
    return str(path), saved["client_state"]


def _read(folder: Path, tag: str | None) -> tuple[Path, dict[str, Any]]:
    if tag is None:
        latest = folder / LATEST_FILE
        if not latest.is_file():
            raise CheckpointError(
                f"{latest} does not exist; give the folder that save_checkpoint() wrote to, or a tag"
            )
        tag = latest.read_text().strip()
    path = folder / tag / STATE_FILE
    if not path.is_file():
        found = sorted(state.parent.name for state in folder.glob(f"*/{STATE_FILE}"))
        raise CheckpointError(f"{path} does not exist; {folder} holds {', '.join(found) or 'no checkpoint'}")
    try:
        saved = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # a damaged file raises whatever its damage leads to; re-raised as ours
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    if saved.get("format") != FORMAT:
        raise CheckpointError(f"{path} has format {saved.get('format')!r}; this version reads {FORMAT}")
    return path.parent, saved


def _members(training: Training) -> Iterator[tuple[SubBuffer, Member, int]]:
    """Every parameter, with its place in its sub-buffer."""
    for unit in training.model.units:
        for part in unit.parts:
            for place, member in enumerate(part.members):
                yield part, member, place


def _check(training: Training, saved: dict[str, Any], plan: LoadPlan) -> None:
    params = {member.name: member.param for _, member, _ in _members(training)}
    for what, ours in (("parameter", params), ("buffer", training.beside_units())):
        theirs = saved[f"{what}s"]
        _check_names(f"{what}s", set(ours), set(theirs), strict=plan.strict)
        for name in filter(theirs.__contains__, ours):
            here, there = (tuple(getattr(value, "shape", ())) for value in (ours[name], theirs[name]))
            if here != there:
                raise CheckpointError(
                    f"{what} '{name}' has shape {there} in the checkpoint and {here} in the model"
                )
    if plan.with_optimizer and training.optimizer is not None:
        trained = {member.name for part, member, _ in _members(training) if part.is_trained}
        _check_optimizer(training.optimizer, saved["optimizer"], trained, strict=plan.strict)


def _check_optimizer(
    optimizer: FlatOptimizer, saved: dict[str, Any] | None, trained: set[str], *, strict: bool
) -> None:
    advice = "load with load_optimizer_states=False to take the weights alone"
    if saved is None:
        raise CheckpointError(f"the checkpoint has no optimizer; {advice}")
    if saved["name"] != optimizer.rule.name:
        raise CheckpointError(
            f"the checkpoint's optimizer is {saved['name']}, this run's is {optimizer.rule.name}; {advice}"
        )
    if len(saved["groups"]) != len(optimizer.param_groups):
        raise CheckpointError(
            f"the checkpoint has {len(saved['groups'])} optimizer groups, this run {len(optimizer.param_groups)}; {advice}"
        )
    if saved["states"]:
        remembered = {*saved["states"], *saved.get("beside", {})}
        _check_names("optimizer states", trained, remembered, strict=strict)


def _check_names(what: str, ours: set[str], theirs: set[str], *, strict: bool) -> None:
    if strict and ours != theirs:
        raise CheckpointError(
            f"{what} differ: only in the model: {_listed(ours - theirs)}; only in the checkpoint: "
            f"{_listed(theirs - ours)}; load_module_strict=False takes what both have"
        )


def _listed(names: set[str]) -> str:
    shown = ", ".join(sorted(names)[:_LISTED])
    return (shown or "none") + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")


@torch.no_grad()
def _apply(training: Training, saved: dict[str, Any], plan: LoadPlan) -> None:
    for part in (part for unit in training.model.units for part in unit.parts):
        _apply_parameters(part, saved["parameters"])
    training.module.load_state_dict(saved["buffers"], strict=False)
    if plan.with_optimizer and training.optimizer is not None:
        _apply_optimizer(training.optimizer, saved["optimizer"])
        if saved.get("loss_scale") is not None:  # older ones, and other precisions, have none
            training.scaler.load_state_dict(saved["loss_scale"])
    if (
        plan.with_scheduler
        and saved["scheduler"] is not None
        and hasattr(training.scheduler, "load_state_dict")
    ):
        training.scheduler.load_state_dict(saved["scheduler"])
    if plan.with_progress:
        steps = training.config.gradient_accumulation_steps
        training.progress.restore(saved["progress"], gradient_accumulation_steps=steps)
        if training.loader is not None and saved.get("data") is not None:  # older ones have none
            training.loader.load_state_dict(saved["data"])
        _apply_rng(training, saved)
    training.model.zero_gradients()


def _apply_parameters(part: SubBuffer, saved: Mapping[str, Tensor]) -> None:
    with part.here(is_written=True):
        for place, member in enumerate(part.members):
            if member.name in saved:
                part.load(place, saved[member.name])
                if part.is_trained:
                    part.copy_fragment(place, saved[member.name], part.master)


def _apply_optimizer(optimizer: FlatOptimizer, saved: dict[str, Any]) -> None:
    optimizer.num_steps = saved["num_steps"]
    for group, hyper in zip(optimizer.param_groups, saved["groups"], strict=True):
        group.update(hyper)
    optimizer.rule.reset_states(sorted({name for states in saved["states"].values() for name in states}))
    for part in optimizer.parts:
        with part.here(is_written=True):
            for place, member in enumerate(part.members):
                for name, whole in saved["states"].get(member.name, {}).items():
                    if name in part.states:
                        part.copy_fragment(place, whole, part.states[name])
    optimizer.rule.load_beside(saved.get("beside", {}))  # older ones have none


def _apply_rng(training: Training, saved: dict[str, Any]) -> None:
    world = training.comm.mesh.world
    if saved["world_size"] == world.size:
        restore_rng_state(saved["rng"][world.index])
    elif world.index == 0:
        logging.getLogger("dslaunch").warning(
            "the checkpoint was written by %d ranks and is read by %d: random numbers do not continue where they were",
            saved["world_size"],
            world.size,
        )
