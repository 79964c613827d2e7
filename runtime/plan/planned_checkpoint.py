"""Checkpoints that a rehearsal loads: memory is taken as in a load, and no value is read.

Of a folder that holds a checkpoint the names, shapes and counters are read. Where there is none, as on a
machine that is not of the job, the program is told so, after a load of what the job itself would save.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import cycle
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

from ..checkpoint import load
from ..checkpoint.files.tensor_runs import (
    MASTER,
    MODEL,
    STATE,
    SubBufferRuns,
    TensorRuns,
    model_name,
    state_name,
)
from ..checkpoint.files.writer import AROUND_BOX, BOX_BYTES, box_bytes
from ..checkpoint.opened import OpenCheckpoint, open_checkpoint
from ..checkpoint.save import describe_training
from ..checkpoint.training_state import Training
from ..errors import CheckpointError
from ..zero.units.sub_buffer import SubBuffer
from .memory import RunMemory

LOAD = "loading a checkpoint"
_NUM_BUFFERS = 2  # a reader fills one while it takes from the other
ANY_TAG = "planned"


class PlannedCheckpoint:
    """A checkpoint as `load` reads it."""

    def __init__(self, training: Training, opened: OpenCheckpoint | None) -> None:
        """`opened`: the one that is there; None: one that this job would save now."""
        self.tag = self.place = self.where = ANY_TAG
        self._saved: dict[str, Any]
        if opened is None:
            self._saved, beside = describe_training(training)
            _remember_all(training, self._saved)
            found: Mapping[str, TensorStorageMetadata] = {
                **dict(_tensors_of(training)),
                **{name: _described(one.dtype, one.shape) for name, one in beside.items()},
            }
        else:
            self.tag, self.place, self.where = opened.tag, opened.place, opened.where
            with torch._C._DisableTorchDispatch():
                self._saved, found = opened.training(), opened.tensors()
            if len(training.domains.stage_leaders) > 1:
                found = _of_own_layers(training, self._saved, found)
        # data and random numbers begin anew, and buffers keep the values that are known of them
        self._saved |= {"data": None, "rng": []}
        left_out = set(map(model_name, self._saved["buffers"]))
        self._tensors = {name: one for name, one in found.items() if name not in left_out}
        own = [SubBufferRuns(one).to_write() for one in _sub_buffers(training)]
        self._longest_bytes = max(box_bytes(own), default=0) + AROUND_BOX
        self._buffers: list[Tensor] = []

    def training(self) -> dict[str, Any]:
        """Return all but the tensors of the model and the optimizer."""
        return self._saved

    def tensors(self) -> Mapping[str, TensorStorageMetadata]:
        """Return the name, shape and dtype of every tensor."""
        return self._tensors

    def check(self, all_runs: Iterable[TensorRuns], names: Iterable[str] = ()) -> None:
        """Take the memory that a check reads into."""
        self._take_buffers()

    def read(self, all_runs: Iterable[TensorRuns]) -> None:
        """Copy to the runs as if they were read."""
        self._take_buffers()
        buffers = cycle(self._buffers)
        for tensor_runs in all_runs:
            if not tensor_runs.runs:
                continue
            with tensor_runs.here(True), torch.no_grad():
                flats = tensor_runs.flats()
                for run in tensor_runs.runs:
                    dtype = self._tensors[run.name].properties.dtype
                    max_numel = min(BOX_BYTES, self._longest_bytes) // dtype.itemsize
                    for box in run.boxes(max_numel=max_numel):
                        values = next(buffers)[: box.numel * dtype.itemsize].view(dtype)
                        box.of(flats[run.flat]).copy_(values.view(box.sizes))

    def _take_buffers(self) -> None:
        if not self._buffers:
            self._buffers = [
                torch.empty(self._longest_bytes, dtype=torch.uint8, device="cpu") for _ in range(_NUM_BUFFERS)
            ]

    def tensor(self, name: str) -> Tensor:
        """Return one whole tensor, in host memory."""
        found = self._tensors[name]
        return torch.empty(found.size, dtype=found.properties.dtype, device="cpu")

    def state_dict(self) -> dict[str, Any]:
        """Return the module's state_dict, whole and in host memory."""
        state = {name[len(MODEL) :]: self.tensor(name) for name in self._tensors if name.startswith(MODEL)}
        return state | {name: state[first] for name, first in self._saved["aliases"].items()}


def plan_loads(memory: RunMemory) -> None:
    """Have the engines of this process load checkpoints without values."""
    plain: Callable[..., Any] = load.load_checkpoint
    replaced: Any = load

    @functools.wraps(plain)
    def planned(training: Training, store: Any, tag: str | None, plan: Any, **options: Any) -> Any:
        found = _find(store, tag, plan)
        made = PlannedCheckpoint(training, found)
        before = memory.phases[-1].name
        memory.begin(LOAD)
        replaced.open_checkpoint = lambda *_, **__: made
        try:
            loaded = plain(training, store, made.tag, plan, **options)
        finally:
            replaced.open_checkpoint = open_checkpoint
            memory.begin(before)
        return None if found is None else loaded

    replaced.load_checkpoint = planned
    replaced.names_of_all = load._own_names


def _find(store: Any, tag: str | None, plan: Any) -> OpenCheckpoint | None:
    """Return the checkpoint that a run would load; None if there is none on this machine."""
    try:
        candidates = load.look(store, plan) if tag is None else [tag]
        with torch._C._DisableTorchDispatch():
            return open_checkpoint(store, candidates[0]) if candidates else None
    except (CheckpointError, OSError):
        return None


def _sub_buffers(training: Training) -> Iterator[SubBuffer]:
    for unit in training.model.units:
        yield from unit.sub_buffers


def _of_own_layers(
    training: Training, saved: dict[str, Any], found: Mapping[str, TensorStorageMetadata]
) -> dict[str, TensorStorageMetadata]:
    """Return the tensors of this rank's stages of a pipeline; of `saved`, only their names are left. A load
    compares the names with those of all stages, which the rehearsal of one rank does not know.
    """
    names = load._own_names(training)
    own = names.parameters | names.buffers
    for key in ("buffers", "left_out", "frozen"):
        saved[key] = [name for name in saved[key] if name in own]
    if saved["optimizer"] is not None:
        beside = saved["optimizer"]["beside"]
        saved["optimizer"]["beside"] = {name: one for name, one in beside.items() if name in own}
    return {name: one for name, one in found.items() if _owner(name) in own}


def _owner(name: str) -> str:
    """Return the parameter or buffer that a tensor of a checkpoint is of."""
    return name[len(MODEL) :] if name.startswith(MODEL) else name[len(STATE) :].rpartition(".")[0]


def _remember_all(training: Training, saved: dict[str, Any]) -> None:
    """Name each trained parameter among those of which the optimizer remembers values: this rank's part of
    an optimizer remembers some, and a save brings together those of all ranks.
    """
    if saved["optimizer"] is not None:
        own = {name: values for name, values in saved["optimizer"]["beside"].items() if values}
        saved["optimizer"]["beside"] = {name: {} for name in load._own_names(training).trained} | own


def _tensors_of(training: Training) -> Iterator[tuple[str, TensorStorageMetadata]]:
    """Yield the tensors that a save would write of this rank's layers."""
    for sub_buffer in _sub_buffers(training):
        dtype, shard = sub_buffer.param_shard.values.flat.dtype, sub_buffer.optimizer_shard
        states: dict[str, torch.dtype] = {}
        if sub_buffer.is_trained:
            states = {name: shard.dtype_of(name) for name in shard.state_names}
            if shard.has_separate_master and dtype != sub_buffer.plan.master_dtype:
                states[MASTER] = sub_buffer.plan.master_dtype
        for index in range(len(sub_buffer.members)):
            shape = sub_buffer.whole_shape(index)
            for name in sub_buffer.true_names(index):
                yield model_name(name), _described(dtype, shape)
                for state, of_state in states.items():
                    yield state_name(name, state), _described(of_state, shape)


def _described(dtype: torch.dtype, shape: Sequence[int]) -> TensorStorageMetadata:
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), [])
