"""Saving: every rank writes 1/world of everything, and nothing of it is gathered.

`prepare` is for the thread that trains, and takes what changes; `PreparedSave.write` may run beside it.
"""

from __future__ import annotations

import io
import itertools
import logging
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..step.rule import ByName, hyper_parameters
from ..strided import is_strided
from . import client_state
from .deepspeed.recovery_script import put_scripts
from .files.format import TRAINING_FILE, check_is_plain
from .files.manifest import FileSpan, Manifest, digest
from .files.tensor_runs import SubBufferRuns, TensorRuns, model_name, runs_of_tensors, split_beside
from .files.writer import METADATA, Written, make_metadata, spans_of, write_runs
from .rank_notes import RankNotes
from .storage.store import LATEST, MANIFEST, Store, is_tag
from .training_state import Training, rng_state

_log = logging.getLogger("dslaunch")

T = TypeVar("T")
_NUMBERS = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """Options of a save."""

    save_latest: bool = True
    exclude_frozen_parameters: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedSave:
    """A checkpoint that only has to be written. Files beside the tensors are there on rank 0 only."""

    notes: RankNotes
    store: Store
    tag: str
    all_runs: tuple[TensorRuns, ...]
    rank: int
    world_size: int
    manifest: Manifest  # manifest without files
    small_files: Mapping[str, bytes] = field(default_factory=dict)
    save_latest: bool = True
    keep_last: int | None = None

    @property
    def where(self) -> str:
        """Path of the new checkpoint's folder."""
        return f"{self.store.where}/{self.tag}"

    def write(self) -> None:
        """Write the checkpoint, and point `latest` at it.

        Order:  every rank calls this; none goes on before the checkpoint is there
        Errors: CheckpointError, the same on every rank, if one of them cannot write
        """
        try:
            with self.notes:
                problem = self._write()
        except CheckpointError as error:
            problem = f": {error}"
        if problem is not None:
            raise CheckpointError(
                f"checkpoint {self.where} cannot be written{problem}; what was saved before is still there"
            )

    def _write(self) -> str | None:
        """Write, and return the error of any rank, with its number."""
        notes = self.notes
        problem: str | None
        if self.rank == 0:
            mark, problem = self.told(self.store.begin, self.tag)
            begun = _Begun(problem, mark or "", socket.gethostname())
            notes.tell("begun", begun)
        else:
            begun = _Begun(*notes.hear("begun", 0))
            problem = begun.problem
        if problem is None:
            written, own_problem = self.told(self._write_own, begun)
            problem = self.finish(written or [], own_problem)
        return problem

    def _write_own(self, begun: _Begun) -> list[Written]:
        if self.rank != 0 and not self.store.sees(self.tag, begun.mark):
            raise FileNotFoundError(
                f"{socket.gethostname()} does not see the folder that rank 0 has made on {begun.host}; give "
                "all ranks one folder that their hosts share, or a URL"
            )
        return write_runs(self.store, self.store.partial_of(self.tag), self.all_runs, rank=self.rank)

    def finish(self, written: list[Written], problem: str | None) -> str | None:
        """Hand what this rank has written, or why it has not, to rank 0, which makes a checkpoint of it all;
        return the error of any rank, with its number.
        """
        notes = self.notes
        if self.rank != 0:
            notes.tell("written", (written, problem))
            result: str | None = notes.hear("result", 0)
            notes.wait_until_heard()
            return result
        try:
            answers = notes.hear_all("written", (written, problem))
            problem = next((theirs for _, theirs in answers if theirs is not None), None)
        except CheckpointError as error:  # a rank is gone, which the others have to hear
            answers, problem = [], f": {error}"
        if problem is None:
            boxes = [_read_written(one) for boxes, _ in answers for one in boxes]
            problem = self.told(self._publish, boxes)[1]
        if problem is not None:
            self.told(self.store.abandon, self.tag)
        notes.tell("result", problem)
        notes.wait_until_heard()
        return problem

    def _publish(self, written: Sequence[Written]) -> None:
        store, folder = self.store, self.store.partial_of(self.tag)
        files = spans_of(written)
        self._check_is_seen(files)
        for name, data in {METADATA: make_metadata(written), **self.small_files}.items():
            store.put(f"{folder}/{name}", data)
            files[name] = (FileSpan(0, len(data), digest(data)),)
        if store.is_for_people:
            put_scripts(store)
        store.put(f"{folder}/{MANIFEST}", self.manifest.with_files(files).to_json())
        store.publish(folder, self.tag, is_latest=self.save_latest)
        if self.keep_last is not None:
            try:
                prune(store, keep_last=self.keep_last)
            except (OSError, CheckpointError) as error:
                _log.warning(
                    "%s is there, but older checkpoints than keep_last allows could not be removed: %s; "
                    "remove them with `dslaunch checkpoint prune`",
                    self.where,
                    error,
                )

    def _check_is_seen(self, files: Iterable[str]) -> None:
        """Check that the files of other ranks are in the folder of rank 0.

        Errors: OSError
        """
        folder = self.store.partial_of(self.tag)
        missing = self.store.missing(folder, list(files))
        if missing:
            raise FileNotFoundError(
                f"another rank has written {missing[0]}, which is not in {self.store.where}/{folder} here: "
                "the ranks were given different folders, or this one is another on each host; give "
                "save_checkpoint() one that all ranks see"
            )

    def told(self, do: Callable[..., T], *args: Any) -> tuple[T | None, str | None]:
        """Return what it returns, and what went wrong: other ranks wait to hear of it."""
        try:
            return do(*args), None
        except Exception as error:
            where = "" if self.world_size == 1 else f" on rank {self.rank}"
            what = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            return None, f"{where}: {what}"


def _read_written(found: Sequence[Any]) -> Written:
    """Undo the conversion to JSON."""
    name, shape, dtype, offsets, sizes, file, span = found
    return Written(name, tuple(shape), dtype, tuple(offsets), tuple(sizes), file, FileSpan(*span))


def prune(store: Store, *, keep_last: int) -> list[str]:
    """Remove all checkpoints but the newest ones, and the one that `latest` names;
    return what was removed.
    """
    tags = doomed(store, keep_last=keep_last)
    for tag in tags:
        store.remove(tag)
    return tags


def doomed(store: Store, *, keep_last: int) -> list[str]:
    """Return the checkpoints that `prune` would remove, oldest first."""
    latest = store.latest()
    return [tag for tag in store.tags()[:-keep_last] if tag != latest]


def prepare(
    training: Training,
    store: Store,
    tag: str,
    given_state: Mapping[str, Any] | None,
    options: SaveOptions,
) -> PreparedSave:
    """Agree on the tag, and put together what rank 0 writes for all; `given_state`: this rank's client_state.

    Order:  a collective
    Errors: CheckpointError, on every rank, for what a checkpoint cannot hold
    """
    beside_tensors: dict[str, Tensor] = {}
    beside: ByName = {}
    job, mesh = training.job, training.domains.dense.comm.mesh
    own_state = client_state.agree(given_state, job)
    if training.optimizer is not None:
        beside_tensors, beside = split_beside(training.optimizer.rule.beside())
        if not mesh.is_counted or (mesh.replicate.index != 0 and not mesh.states_by_chunk):
            beside_tensors = {}  # rank 0's line of the mesh has all of them
    left_out = _frozen(training) if options.exclude_frozen_parameters else frozenset()
    sub_buffers = [sub_buffer for unit in training.model.units for sub_buffer in unit.sub_buffers]
    all_runs = [SubBufferRuns(sub_buffer).to_write(left_out=left_out) for sub_buffer in sub_buffers]
    problem: str | None = None
    cause: Exception | None = None  # set on the rank that has the problem
    outline: _Outline | None = None
    small_files: dict[str, bytes] = {}
    try:
        others = training.written_beside()
        tensors = {model_name(name): value for name, value in others.items() if is_strided(value)}
        all_runs.append(runs_of_tensors(tensors))
        if training.leads:
            outline = _outline(training, others, left_out)
    except Exception as error:  # the user's state_dict() may raise any; the other ranks wait below
        problem, cause = _problem(error, job.index), error
    gathered = job.gather_objects(
        (tag, rng_state(), beside, own_state, outline), what="tags and random number states"
    )
    try:
        if gathered is not None and problem is None:  # rank 0
            _check_tags(training, [theirs for theirs, *_ in gathered], is_latest=options.save_latest)
            outlines = [one for *_, one in gathered if one is not None]
            state = _describe(training, outlines) | {"rng": [rng for _, rng, *_ in gathered]}
            state |= client_state.merge([theirs for *_, theirs, _ in gathered])
            if state["optimizer"] is not None:
                state["optimizer"]["beside"] = _merged([own for _, _, own, *_ in gathered])
            small_files = {TRAINING_FILE: _saved(state)}
    except Exception as error:
        problem, cause = _problem(error, job.index), error
    all_runs.append(runs_of_tensors(beside_tensors))
    agreed = job.all_gather_objects((problem, next(_NUMBERS), tag), what="what a checkpoint holds")
    problem = next((theirs for theirs, _, _ in agreed if theirs is not None), None)
    if problem is not None:
        raise CheckpointError(problem) from cause
    _, number, tag = agreed[0]
    return PreparedSave(
        notes=RankNotes(number, rank=job.index, world_size=job.size),
        store=store,
        tag=tag,
        all_runs=tuple(all_runs),
        rank=job.index,
        world_size=job.size,
        manifest=_manifest(training, tag),
        small_files=small_files,
        save_latest=options.save_latest,
        keep_last=training.config.checkpoint.keep_last,
    )


def _problem(error: Exception, rank: int) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    return (
        f"the checkpoint cannot be put together on rank {rank}: {type(error).__name__}: {error}; look at "
        "what state_dict() of the scheduler and of the data loader returns"
    )


def _frozen(training: Training) -> frozenset[str]:
    return frozenset(
        name
        for unit in training.model.units
        for sub_buffer in unit.sub_buffers
        for index, member in enumerate(sub_buffer.members)
        if not member.param.requires_grad
        for name in sub_buffer.true_names(index)
    )


def _kept_dtypes(training: Training) -> frozenset[str]:
    """Return the names of the tensors that no export converts: bits, and what belongs to them."""
    members = {
        name
        for unit in training.model.units
        for sub_buffer in unit.sub_buffers
        for index, member in enumerate(sub_buffer.members)
        if member.keeps_dtype
        for name in sub_buffer.true_names(index)
    }
    return frozenset(members | training.model.packed_whole.keys())


def _check_tags(training: Training, tags: Sequence[str], *, is_latest: bool) -> None:
    """See on rank 0 that its tag can be one, and whether the others have the same.

    `is_latest`: the file that names the newest checkpoint is written, too.

    Errors: CheckpointError
    """
    if not is_tag(tags[0]):
        raise CheckpointError(
            f"tag {tags[0]!r} is no name of a folder; write one without '/' that does not begin with '.'"
        )
    if is_latest and tags[0] == LATEST:
        raise CheckpointError(
            f"tag {LATEST!r} is the name of the file that says which checkpoint is the newest; give another "
            "tag, or save_latest=False"
        )
    validation = training.config.checkpoint.tag_validation
    other = next((rank for rank, theirs in enumerate(tags) if theirs != tags[0]), None)
    if other is not None and validation != "Ignore":
        text = f"save_checkpoint() was given tag {tags[0]!r} on rank 0 and {tags[other]!r} on rank {other}"
        if validation == "Fail":
            raise CheckpointError(f"{text}; give all ranks the same (checkpoint.tag_validation is Fail)")
        _log.warning("%s; rank 0's is taken", text)


def _manifest(training: Training, tag: str) -> Manifest:
    from ... import __version__  # at need: the facade imports this module

    return Manifest(
        tag=tag,
        version=__version__,
        torch_version=str(torch.__version__),
        written_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        world_size=training.job.size,
        zero_stage=training.config.zero.stage,
        global_steps=training.progress.global_steps,
        files={},
    )


class _Begun(NamedTuple):
    """Rank 0's note that the folder is there."""

    problem: str | None
    mark: str
    host: str


class _Outline(NamedTuple):
    """Outline of the layers that several ranks hold, as one of them knows it."""

    buffers: list[str]
    left_out: list[str]
    frozen: list[str]
    aliases: dict[str, str]
    kept_dtypes: list[str]
    no_weights: list[str]
    extra_state: dict[str, Any]
    state_names: list[str]  # states of the optimizer


def _outline(training: Training, others: Mapping[str, Any], left_out: frozenset[str]) -> _Outline:
    extra_state = {name: value for name, value in others.items() if not is_strided(value)}
    check_is_plain(extra_state, "the module's extra state")
    shards = [] if training.optimizer is None else training.optimizer.sub_buffers
    return _Outline(
        buffers=sorted(training.beside_units()),
        left_out=sorted(left_out),
        frozen=sorted(_frozen(training)),
        aliases=training.aliases(),
        kept_dtypes=sorted(_kept_dtypes(training)),
        no_weights=sorted(training.model.packed_whole.keys() - training.module.state_dict(keep_vars=True)),
        extra_state=extra_state,
        state_names=sorted({name for one in shards for name in one.optimizer_shard.state_names}),
    )


def describe_training(training: Training) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return what a save by this rank alone would put into training.pt, without random numbers, and the
    tensors that its optimizer remembers beside the states, by their names in a checkpoint.
    """
    state = _describe(training, [_outline(training, training.written_beside(), frozenset())])
    tensors: dict[str, Tensor] = {}
    if training.optimizer is not None:
        tensors, state["optimizer"]["beside"] = split_beside(training.optimizer.rule.beside())
    return state | {"client_state": {}}, tensors


def _describe(training: Training, outlines: Sequence[_Outline]) -> dict[str, Any]:
    """Return what is in training.pt, but for client_state, random numbers and what the optimizer remembers
    beside its states.
    """
    has_state = hasattr(training.scheduler, "state_dict")
    scheduler = training.scheduler.state_dict() if has_state else None
    check_is_plain(scheduler, "the scheduler's state")
    return {
        "world_size": training.job.size,
        "buffers": _together(one.buffers for one in outlines),
        "left_out": _together(one.left_out for one in outlines),
        "frozen": _together(one.frozen for one in outlines),
        "aliases": {name: first for one in outlines for name, first in one.aliases.items()},
        "optimizer": _describe_optimizer(training, outlines),
        "kept_dtypes": _together(one.kept_dtypes for one in outlines),
        "no_weights": _together(one.no_weights for one in outlines),
        "extra_state": {name: value for one in outlines for name, value in one.extra_state.items()},
        "scheduler": scheduler,
        "progress": training.progress.to_dict(),
        "data": None if training.loader is None else training.loader.state_dict(),
        "loss_scale": training.scaler.state_dict() if training.scaler.is_dynamic else None,
        "config": training.config.describe(),
    }


def _together(names: Iterable[list[str]]) -> list[str]:
    return sorted({name for one in names for name in one})


def _describe_optimizer(training: Training, outlines: Sequence[_Outline]) -> dict[str, Any] | None:
    optimizer = training.optimizer
    if optimizer is None:
        return None
    return {
        "name": optimizer.rule.name,
        "num_steps": optimizer.num_steps,
        "groups": [hyper_parameters(group) for group in optimizer.param_groups],
        "state_names": _together(one.state_names for one in outlines),
    }


def _merged(ranks: Sequence[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Merge the values that ranks remember of their own parameters."""
    merged: dict[str, dict[str, Any]] = {}
    for own in ranks:
        merged |= {name: values for name, values in own.items() if values}
    return merged


def _saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
