"""Elements of a model and its optimizer that this rank writes to a checkpoint, and places for those it reads.

Every tensor has its name, its true shape and its own dtype in a checkpoint, however it is sharded here:

    model.<name>                    parameters and buffers, as in the module's state_dict
    optimizer.state.<name>.master   the float32 master of a parameter of 16 bits
    optimizer.state.<name>.<state>  e.g. exp_avg
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...mesh.cut import Cut
from ...optimizers.eight_bits import CODES
from ...strided import is_strided
from ...zero.parameters.layout import Slot
from ...zero.units.sub_buffer import SubBuffer
from .boxes import boxes_of

MODEL, STATE = "model.", "optimizer.state."
MASTER = "master"
PARAMETERS = "parameters"  # differs from the name of every state


def model_name(name: str) -> str:
    """Return the name in a checkpoint of a parameter or buffer."""
    return MODEL + name


def state_name(name: str, state: str) -> str:
    """Return the name in a checkpoint of an optimizer's state of a parameter."""
    return f"{STATE}{name}.{state}"


class PlacedBox(NamedTuple):
    """A box of a tensor, and where it lies in a flat one: in a box of this rank's part, or a part of that."""

    offsets: tuple[int, ...]  # offsets in the tensor
    sizes: tuple[int, ...]
    first: int  # index of the first element of this rank's box, in the flat tensor
    part_sizes: tuple[int, ...]  # sizes of that box
    narrowed: tuple[int, int, int] | None  # the part that counts: dimension, first index and size; None: all

    @property
    def numel(self) -> int:
        """Number of its elements."""
        return prod(self.sizes)

    def of(self, flat: Tensor) -> Tensor:
        """Return the run's elements, a view of `flat`."""
        values = flat[self.first : self.first + prod(self.part_sizes)].view(self.part_sizes)
        return values if self.narrowed is None else values.narrow(*self.narrowed)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRun:
    """Elements of one tensor that follow each other in C order, and where they lie here."""

    name: str  # name in the checkpoint
    shape: tuple[int, ...]  # shape of the tensor
    start: int  # index of the first of them in the tensor, or in this rank's part of it
    numel: int
    flat: str  # name of the flat tensor that holds them
    offset: int  # index of the first one there
    cut: Cut | None = None  # this rank's part of the tensor; None: the whole

    def boxes(self, *, max_numel: int) -> Iterator[PlacedBox]:
        """Return the boxes of the whole tensor that the run is, and where each lies in `flat`."""
        part_shape = self.shape if self.cut is None else self.cut.part_shape
        for box in boxes_of(part_shape, self.start, self.start + self.numel, max_numel=max_numel):
            first = self.offset + box.start - self.start
            if self.cut is None:
                yield PlacedBox(box.offsets, box.sizes, first, box.sizes, None)
                continue
            dim = self.cut.dim
            for offsets, low, size in self.cut.boxes(box.offsets, box.sizes):
                sizes = (*box.sizes[:dim], size, *box.sizes[dim + 1 :])
                yield PlacedBox(offsets, sizes, first, box.sizes, (dim, low, size))


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRuns:
    """Runs that lie in a few flat tensors, which may be on a disk between their uses."""

    runs: tuple[TensorRun, ...]
    dtypes: Mapping[str, torch.dtype]  # flat tensor's name -> dtype
    flats: Callable[[], Mapping[str, Tensor]]  # the flat tensors, while they are here
    here: Callable[[bool], AbstractContextManager[object]]  # have them here; whether they are to be changed
    exposed: frozenset[str] = frozenset()  # flat tensors that the program may change by itself, at any time


def runs_of_tensors(tensors: Mapping[str, Tensor]) -> TensorRuns:
    """Return the runs of whole tensors, by their names in a checkpoint."""
    contiguous = {name: value.detach().contiguous().reshape(-1) for name, value in tensors.items()}
    return TensorRuns(
        runs=tuple(
            TensorRun(name=name, shape=tuple(value.shape), start=0, numel=value.numel(), flat=name, offset=0)
            for name, value in tensors.items()
        ),
        dtypes={name: value.dtype for name, value in tensors.items()},
        flats=lambda: contiguous,
        here=lambda is_written: nullcontext(),
        exposed=frozenset(tensors),
    )


class _Flats(dict[str, Tensor]):
    """Flat tensors by name; what lies here as codes is decoded when it is asked for."""

    def __init__(self, here: Mapping[str, Tensor], value_of: Callable[[str], Tensor]) -> None:
        super().__init__(here)
        self._value_of = value_of

    def __missing__(self, kind: str) -> Tensor:
        """Decode the state of this name."""
        return self._value_of(kind)


# Return the name under which to read a value, from the parameter's name, the kind of value and its dtype
# here; None if it is not read.
SourceOf = Callable[[str, str, torch.dtype], str | None]


class SubBufferRuns:
    """Runs of one sub-buffer: the elements that this rank has, for each kind of value."""

    def __init__(self, sub_buffer: SubBuffer) -> None:
        self.sub_buffer = sub_buffer
        layout, mesh = sub_buffer.layout, sub_buffer.mesh
        self._state_range = layout.shard_range(
            sub_buffer.plan.shard_index, num_shards=sub_buffer.plan.num_shards
        )
        self._param_start = 0
        if sub_buffer.is_sharded:
            self._param_start, _ = layout.shard_range(mesh.shard.index, num_shards=mesh.shard.size)
        self._chunk = layout.shard_range(mesh.chunk_index, num_shards=mesh.sharers.size)
        self._param_range = layout.shard_range(mesh.shard.index, num_shards=mesh.shard.size)
        self._is_first = mesh.chunk_index == 0
        self._is_counted = mesh.is_counted
        self._decoded: dict[str, Tensor] = {}  # values of states, by name, while they are here

    def to_write(self, *, left_out: Container[str] = ()) -> TensorRuns:
        """Return this rank's chunk of it, without these parameters; all ranks' make the whole.

        Of equal copies the first is written.
        """
        sub_buffer = self.sub_buffer
        if not self._is_counted:
            return self._tensor_runs((), ())

        def kept_name(name: str) -> str | None:
            return None if name in left_out else model_name(name)

        runs = list(self._runs(PARAMETERS, kept_name, self._chunk, self._param_start))
        kinds: list[str] = []
        if sub_buffer.is_trained:
            has_master = (
                sub_buffer.optimizer_shard.has_separate_master
                and sub_buffer.plan.dtype != sub_buffer.plan.master_dtype
            )
            kinds = [*([MASTER] if has_master else []), *sub_buffer.optimizer_shard.state_names]
        for kind in kinds:
            runs += self._runs(kind, partial(_swapped, kind), self._chunk, self._state_range[0])
        return self._tensor_runs(runs, kinds)

    def to_read(self, source_of: SourceOf, kinds: Sequence[str]) -> TensorRuns:
        """Return all that this rank holds; where parameters are whole, what it holds of a shard of them."""
        sub_buffer, dtype = self.sub_buffer, self.sub_buffer.param_shard.values.flat.dtype

        def source(kind: str, dtype: torch.dtype) -> Callable[[str], str | None]:
            return lambda name: source_of(name, kind, dtype)

        runs = list(self._runs(PARAMETERS, source(PARAMETERS, dtype), self._param_range, self._param_start))
        names = [
            *([MASTER] if sub_buffer.is_trained and sub_buffer.optimizer_shard.has_separate_master else []),
            *kinds,
        ]
        for kind in names:
            of_kind = self._dtype_of(kind)
            runs += self._runs(kind, source(kind, of_kind), self._state_range, self._state_range[0])
        return self._tensor_runs(runs, names)

    def _tensor_runs(self, runs: Sequence[TensorRun], kinds: Sequence[str]) -> TensorRuns:
        sub_buffer = self.sub_buffer
        dtypes = {kind: self._dtype_of(kind) for kind in kinds}
        return TensorRuns(
            runs=tuple(runs),
            dtypes={PARAMETERS: sub_buffer.param_shard.values.flat.dtype, **dtypes},
            flats=lambda: self._flats(kinds),
            here=self._here,
            exposed=self._exposed(kinds),
        )

    def _exposed(self, kinds: Iterable[str]) -> frozenset[str]:
        """Name what is copied at once: whole parameters, and values that are decoded in the training's
        stream, of which another stream knows nothing.
        """
        names = () if self.sub_buffer.is_sharded else (PARAMETERS,)
        return frozenset((*names, *(kind for kind in kinds if kind != MASTER and self._has_codes)))

    def _dtype_of(self, kind: str) -> torch.dtype:
        plan = self.sub_buffer.plan
        if kind == MASTER:
            return plan.master_dtype
        return torch.float32 if self._has_codes else plan.precision.states

    def _flats(self, kinds: Sequence[str]) -> dict[str, Tensor]:
        sub_buffer = self.sub_buffer
        flats = {
            PARAMETERS: sub_buffer.param_shard.kept
            if sub_buffer.is_sharded
            else sub_buffer.param_shard.values.flat
        }
        shard = sub_buffer.optimizer_shard
        flats |= {MASTER: shard.master} if MASTER in kinds else {}
        flats |= {kind: shard.states[kind] for kind in kinds if kind != MASTER and not self._has_codes}
        return _Flats(flats, self._value_of)

    @property
    def _has_codes(self) -> bool:
        return self.sub_buffer.plan.precision.states == CODES

    def _value_of(self, kind: str) -> Tensor:
        if kind not in self._decoded:
            self._decoded[kind] = self.sub_buffer.optimizer_shard.value_of(kind)
        return self._decoded[kind]

    @contextmanager
    def _here(self, is_written: bool) -> Iterator[None]:
        """Have all that is kept in memory; states that are codes as values, which become codes again."""
        with self.sub_buffer.here(is_written=is_written):
            self._decoded.clear()
            try:
                yield
                for kind, values in self._decoded.items() if is_written else ():
                    self.sub_buffer.optimizer_shard.set_value(kind, values)
            finally:
                self._decoded.clear()

    def _runs(
        self, flat: str, name_of: Callable[[str], str | None], wanted: tuple[int, int], flat_start: int
    ) -> Iterator[TensorRun]:
        for member, slot in zip(self.sub_buffer.members, self.sub_buffer.layout.slots, strict=True):
            name = name_of(self.sub_buffer.domain.true_name(member.name))
            if name is None:
                continue
            low, high = _overlap(slot, wanted)
            cut = self.sub_buffer.domain.cut_of(member.param)
            shape = slot.shape if cut is None else cut.shape
            if low < high:
                yield TensorRun(
                    name=name,
                    shape=shape,
                    cut=cut,
                    start=low - slot.offset,
                    numel=high - low,
                    flat=flat,
                    offset=low - flat_start,
                )
            elif slot.numel == 0 and self._is_first and prod(shape) == 0:
                yield TensorRun(name=name, shape=shape, start=0, numel=0, flat=flat, offset=0)


def _swapped(state: str, name: str) -> str:
    return state_name(name, state)


def _overlap(slot: Slot, wanted: tuple[int, int]) -> tuple[int, int]:
    return max(slot.offset, wanted[0]), min(slot.offset + slot.numel, wanted[1])


def split_beside(
    beside: Mapping[str, Mapping[str, Any]],
) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """Part what an optimizer remembers beside the states into tensors,
    by name in a checkpoint, and the rest.
    """
    tensors: dict[str, Tensor] = {}
    rest: dict[str, dict[str, Any]] = {}
    for name, values in beside.items():
        for state, value in values.items():
            if is_strided(value) and value.numel() > 1:
                tensors[state_name(name, state)] = value
            else:
                rest.setdefault(name, {})[state] = value
    return tensors, rest
