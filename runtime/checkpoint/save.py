"""Saving: every rank writes 1/world of everything, and nothing of it is gathered.

`prepare` is for the thread that trains, and takes what changes; `Prepared.write` may run beside it.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from ..errors import CheckpointError
from ..optim.rule import ByName, hyper_parameters
from .format import TRAINING_FILE, check_is_plain
from .manifest import Manifest, Span, digest
from .rng import rng_state
from .shelf import PartShelves, Shelf, model_name, shelf_of_tensors, split_beside
from .store import LATEST, MANIFEST, Store, is_tag
from .training import Training
from .writer import ShelfPlanner, ShelfWriter

_log = logging.getLogger("dslaunch")
_NO_GROUP = "the process group was destroyed meanwhile; call engine.destroy() first, which waits for a save"


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """How to save."""

    save_latest: bool = True
    exclude_frozen_parameters: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A checkpoint that only has to be written. Files beside the shelves are there on rank 0 only."""

    store: Store
    tag: str
    shelves: tuple[Shelf, ...]
    rank: int
    world_size: int
    manifest: Manifest  # without files
    small_files: Mapping[str, bytes] = field(default_factory=dict)
    save_latest: bool = True
    keep_last: int | None = None

    @property
    def where(self) -> str:
        """The folder that it will be."""
        return f"{self.store.where}/{self.tag}"

    def write(self, group: dist.ProcessGroup | None) -> None:
        """Write it, and point `latest` at it.

        Order:  a collective of `group`; no rank goes on before the checkpoint is there
        Errors: CheckpointError, on every rank, if one of them cannot write
        """
        writer = _Writer(self)
        if self.world_size > 1 and not dist.is_initialized():
            raise CheckpointError(f"checkpoint {self.where} cannot be written: {_NO_GROUP}")
        try:
            save({}, storage_writer=writer, planner=ShelfPlanner(self.shelves), process_group=group)
        except CheckpointException as error:  # of all ranks, and none of them writes any more
            if self.rank == 0 and dist.is_initialized():
                self.store.abandon(self.tag)
            rank, (failure, _) = next(iter(sorted(error.failures.items())))
            where = "" if self.world_size == 1 else f" on rank {rank}"
            raise CheckpointError(
                f"checkpoint {self.where} cannot be written{where}: {failure}; what was saved before is still there"
            ) from failure
        except (RuntimeError, ValueError) as error:
            why = "another rank has ended" if dist.is_initialized() else _NO_GROUP
            raise CheckpointError(
                f"checkpoint {self.where} cannot be written: {why}; what was saved before is still there"
            ) from error


class _Writer(ShelfWriter):
    """Makes the folder before any rank writes, and a checkpoint of it when all have."""

    def __init__(self, prepared: Prepared) -> None:
        store, tag = prepared.store, prepared.tag
        super().__init__(store, store.partial_of(tag), rank=prepared.rank)
        self._prepared = prepared

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        if len(plans) != self._prepared.world_size:  # without a group every rank would take itself for all
            raise AssertionError(f"{len(plans)} of {self._prepared.world_size} ranks: {_NO_GROUP}")
        self._store.begin(self._prepared.tag)
        return plans

    def finish(self, metadata: Any, results: list[Any]) -> None:
        super().finish(metadata, results)
        one = self._prepared
        for name, data in one.small_files.items():
            self._store.put(f"{self._folder}/{name}", data)
            self.files[name] = (Span(0, len(data), digest(data)),)
        manifest = one.manifest.with_files(self.files)
        self._store.put(f"{self._folder}/{MANIFEST}", manifest.to_json())
        self._store.publish(self._folder, one.tag)
        if one.save_latest:
            self._store.put(LATEST, one.tag.encode())
        if one.keep_last is not None:
            prune(self._store, keep_last=one.keep_last)


def prune(store: Store, *, keep_last: int) -> list[str]:
    """Remove all checkpoints but the newest ones, and the one that `latest` names; return what was removed."""
    latest = store.latest()
    doomed = [tag for tag in store.tags()[:-keep_last] if tag != latest]
    for tag in doomed:
        store.remove(tag)
    return doomed


def prepare(
    training: Training, store: Store, tag: str, client_state: dict[str, Any], options: SaveOptions
) -> Prepared:
    """Agree on the tag, and put together what rank 0 writes for all.

    Order:  a collective
    Errors: CheckpointError, on every rank, for what a checkpoint cannot hold
    """
    tag = _agreed_tag(training, tag)
    beside_tensors: dict[str, Tensor] = {}
    beside: ByName = {}
    if training.optimizer is not None:
        beside_tensors, beside = split_beside(training.optimizer.rule.beside())
    comm = training.comm
    gathered = comm.gather_objects((rng_state(), beside), what="random number states")
    left_out = _left_out(training) if options.exclude_frozen_parameters else frozenset()
    parts = [part for unit in training.model.units for part in unit.parts]
    shelves = [PartShelves(part).to_write(left_out=left_out) for part in parts]
    problem: str | None = None
    small_files: dict[str, bytes] = {}
    others = training.beside_units()
    if gathered is not None:  # rank 0
        tensors = {model_name(name): value for name, value in others.items() if isinstance(value, Tensor)}
        shelves.append(shelf_of_tensors(tensors))
        try:
            state = _describe(training, client_state, others, left_out) | {
                "rng": [rng for rng, _ in gathered]
            }
            if state["optimizer"] is not None:
                state["optimizer"]["beside"] = _merged([own for _, own in gathered])
            small_files = {TRAINING_FILE: _saved(state)}
        except CheckpointError as error:
            problem = str(error)
    shelves.append(shelf_of_tensors(beside_tensors))
    problem = comm.all_gather_objects(problem, what="what a checkpoint holds")[0]
    if problem is not None:
        raise CheckpointError(problem)
    return Prepared(
        store=store,
        tag=tag,
        shelves=tuple(shelves),
        rank=comm.mesh.world.index,
        world_size=comm.mesh.world.size,
        manifest=_manifest(training, tag),
        small_files=small_files,
        save_latest=options.save_latest,
        keep_last=training.config.checkpoint.keep_last,
    )


def _left_out(training: Training) -> frozenset[str]:
    members = (member for unit in training.model.units for part in unit.parts for member in part.members)
    return frozenset(member.name for member in members if not member.param.requires_grad)


def _agreed_tag(training: Training, tag: str) -> str:
    """Return rank 0's."""
    tags = training.comm.all_gather_objects(tag, what="the tag of a checkpoint")
    if not is_tag(tags[0]):
        raise CheckpointError(
            f"tag {tags[0]!r} is no name of a folder; write one without '/' that does not begin with '.'"
        )
    validation = training.config.checkpoint.tag_validation
    other = next((rank for rank, theirs in enumerate(tags) if theirs != tags[0]), None)
    if other is not None and validation != "Ignore":
        text = f"save_checkpoint() was given tag {tags[0]!r} on rank 0 and {tags[other]!r} on rank {other}"
        if validation == "Fail":
            raise CheckpointError(f"{text}; give all ranks the same (checkpoint.tag_validation is Fail)")
        if training.comm.mesh.world.index == 0:
            _log.warning("%s; rank 0's is taken", text)
    return str(tags[0])


def _manifest(training: Training, tag: str) -> Manifest:
    from ... import __version__  # late: the facade imports this

    return Manifest(
        tag=tag,
        version=__version__,
        torch_version=str(torch.__version__),
        written_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        world_size=training.comm.mesh.world.size,
        zero_stage=training.config.zero.stage,
        global_steps=training.progress.global_steps,
        files={},
    )


def _describe(
    training: Training, client_state: dict[str, Any], others: Mapping[str, Any], left_out: frozenset[str]
) -> dict[str, Any]:
    """Return what is in training.pt, but for random numbers and what the optimizer remembers beside its states."""
    has_state = hasattr(training.scheduler, "state_dict")
    extra_state = {name: value for name, value in others.items() if not isinstance(value, Tensor)}
    scheduler = training.scheduler.state_dict() if has_state else None
    check_is_plain(client_state, "client_state")
    check_is_plain(extra_state, "the module's extra state")
    check_is_plain(scheduler, "the scheduler's state")
    return {
        "world_size": training.comm.mesh.world.size,
        "buffers": sorted(others),
        "left_out": sorted(left_out),
        "aliases": training.aliases(),
        "optimizer": _describe_optimizer(training),
        "extra_state": extra_state,
        "scheduler": scheduler,
        "progress": training.progress.to_dict(),
        "data": None if training.loader is None else training.loader.state_dict(),
        "loss_scale": training.scaler.state_dict() if training.scaler.is_dynamic else None,
        "client_state": client_state,
        "config": training.config.describe(),
    }


def _describe_optimizer(training: Training) -> dict[str, Any] | None:
    optimizer = training.optimizer
    if optimizer is None:
        return None
    return {
        "name": optimizer.rule.name,
        "num_steps": optimizer.num_steps,
        "groups": [hyper_parameters(group) for group in optimizer.param_groups],
        "state_names": sorted({name for part in optimizer.parts for name in part.states}),
    }


def _merged(ranks: Sequence[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """What the ranks remember, each of its own parameters."""
    merged: dict[str, dict[str, Any]] = {}
    for own in ranks:
        merged |= {name: values for name, values in own.items() if values}
    return merged


def _saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
