"""From shards, as the caller gives them, to runs: every check of the CPU's binding, in the same words.

Nothing here touches a device: a mistake is refused before the first launch.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .arrays import CUDA, DeviceArray, check_no_shared_memory, check_one_device, read_array, type_name
from .table import Run, Variant

GRAD_DTYPES = ("float32", "bfloat16", "float16")
STATE_DTYPES = ("float32", "bfloat16")
PARAM_OUT_DTYPES = ("float32", "bfloat16", "float16")
_INT64 = range(-(2**63), 2**63)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """The fields of one segment object, each read with its check."""

    segment: Any
    name: str
    kind: str

    def field(self, field: str) -> Any:
        """Return an attribute that must be there."""
        return attribute(self.segment, field, self.name, self.kind)

    def int64(self, field: str) -> int:
        """Return a whole number."""
        value = self.field(field)
        try:
            number = operator.index(value)
        except TypeError:
            number = None
        if number is None or number not in _INT64:
            raise TypeError(f"{self.name}.{field}: {value!r}; must be an int that fits in 64 bits")
        return number

    def double(self, field: str) -> float:
        """Return a number."""
        value = self.field(field)
        try:
            if not isinstance(value, (str, bytes)):
                return float(value)
        except (TypeError, ValueError, OverflowError):
            pass
        raise TypeError(f"{self.name}.{field}: {value!r}; must be a float")

    def finite(self, field: str) -> float:
        """Return a number that is neither infinite nor NaN."""
        value = self.double(field)
        if not math.isfinite(value):
            raise ValueError(f"{self.name}.{field}: {value:.15g}; must be finite")
        return value

    def non_negative(self, field: str) -> float:
        """Return a number that is finite and not negative."""
        value = self.double(field)
        if not 0.0 <= value < math.inf:
            raise ValueError(f"{self.name}.{field}: {value:.15g}; must be finite and >= 0")
        return value

    def beta(self, field: str) -> float:
        """Return the decay rate of a moment."""
        value = self.double(field)
        if not 0.0 <= value < 1.0:
            raise ValueError(f"{self.name}.{field}: {value:.15g}; must be in [0, 1)")
        return value

    def boolean(self, field: str) -> bool:
        """Return a truth value."""
        value = self.field(field)
        if not isinstance(value, bool):
            raise TypeError(f"{self.name}.{field}: {value!r}; must be True or False")
        return value

    def step(self) -> int:
        """Return the number of this step; the first is 1."""
        step = self.int64("step")
        if step < 1:
            raise ValueError(f"{self.name}.step: {step}; must be >= 1: the first step is step 1")
        return step


@dataclass(frozen=True, slots=True, kw_only=True)
class Hyper:
    """What a segment's numbers come to."""

    coefficients: tuple[float, ...]  # as the kernel's Coefficients, before they are rounded to float
    mode: int = 0  # DSLAUNCH_MODE
    uses_states: bool = True
    scales: tuple[float, ...] = ()  # LAMB: what lamb_step_size in kernels/lamb.h needs, in double


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What sets one optimizer apart: the program to run, and how its arguments are read."""

    source: str  # the file of its kernels, without `.cu`
    shard_kind: str  # the class that callers pass
    segment_kind: str
    states: tuple[str, ...]  # the fields of a shard that hold its states; two at most
    read_hyper: Callable[[Fields], Hyper]
    num_coefficients: int
    may_lack_states: bool = False  # None says that there are none
    has_update: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSegment:
    """A segment, checked."""

    name: str
    offset: int
    numel: int
    hyper: Hyper
    packed: bytes  # the coefficients, as float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The arguments of one call, checked."""

    runs: tuple[Run, ...]
    segments: tuple[ReadSegment, ...]  # of every shard, one shard after another
    arrays: tuple[DeviceArray, ...]  # keep the memory alive
    factor: int = 0  # the address of `device_scale`; 0: there is none

    @property
    def device(self) -> int | None:
        """The ordinal of the device that all arrays are on; None without arrays."""
        return self.arrays[0].device if self.arrays else None


def read_shards(
    shards: Iterable[Any], rule: Rule, *, device_scale: Any = None, device_types: Sequence[int] = (CUDA,)
) -> Reading:
    """Return the runs of all shards.

    Errors:  as [Note: a step] in kernels/shard.py, with a CUDA device in place of host memory
    """
    arrays: list[DeviceArray] = []
    segments: list[ReadSegment] = []
    runs: list[Run] = []
    for place, shard in enumerate(shards):
        reader = _ShardReader(f"shards[{place}]", shard, rule, arrays, device_types)
        runs += reader.runs(segments)
    factor = 0
    if device_scale is not None:
        one = read_array(
            "device_scale", device_scale, dtypes=("float32",), is_written=False, device_types=device_types
        )
        if one.numel != 1:
            raise ValueError(f"device_scale: {one.numel} elements; must be 1")
        arrays.append(one)
        factor = one.address
    check_one_device(arrays)
    check_no_shared_memory(arrays)
    return Reading(runs=tuple(runs), segments=tuple(segments), arrays=tuple(arrays), factor=factor)


class _ShardReader:
    """Reads one shard; every array that it sees goes to `arrays`, too."""

    def __init__(
        self, name: str, shard: Any, rule: Rule, arrays: list[DeviceArray], device_types: Sequence[int]
    ) -> None:
        self._name = name
        self._shard = shard
        self._rule = rule
        self._arrays = arrays
        self._device_types = device_types

    def runs(self, segments: list[ReadSegment]) -> list[Run]:
        """Cut the shard where segments and pieces of the gradient meet; its segments go to `segments`, too."""
        param = self._array("param", ("float32",))
        states = self._states(param)
        out = self._array_or_none("param_out", PARAM_OUT_DTYPES, param)
        update = self._array("update", ("float32",), param) if self._rule.has_update else None
        grads = self._grads(param.numel)
        runs = []
        for segment in self._segments(param.numel):
            segments.append(segment)
            used = states if segment.hyper.uses_states else []
            for offset, grad in grads:
                start = max(segment.offset, offset)
                stop = min(segment.offset + segment.numel, offset + grad.numel)
                if start >= stop:
                    continue
                addresses = [state.at(start) for state in used] + [0, 0]
                run = Run(
                    variant=Variant(
                        grad=grad.dtype,
                        state=used[0].dtype if used else None,
                        param_out=None if out is None else out.dtype,
                        mode=segment.hyper.mode,
                    ),
                    numel=stop - start,
                    grad=grad.at(start - offset),
                    param=param.at(start),
                    states=(addresses[0], addresses[1]),
                    param_out=0 if out is None else out.at(start),
                    coefficients=segment.packed,
                    update=0 if update is None else update.at(start),
                    segment=len(segments) - 1,
                )
                runs.append(run)
        return runs

    def _states(self, param: DeviceArray) -> list[DeviceArray]:
        states: list[DeviceArray] = []
        for field in self._rule.states:
            if self._rule.may_lack_states and self._field(field) is None:
                continue
            state = self._array(field, STATE_DTYPES, like=param)
            if states and state.dtype != states[0].dtype:
                raise TypeError(
                    f"{state.name}: dtype {state.dtype}, but {states[0].name} has {states[0].dtype}; all states of one "
                    "shard must have the same dtype"
                )
            states.append(state)
        return states

    def _field(self, field: str) -> Any:
        return attribute(self._shard, field, self._name, self._rule.shard_kind)

    def _array(self, field: str, dtypes: Sequence[str], like: DeviceArray | None = None) -> DeviceArray:
        array = self._add(f"{self._name}.{field}", self._field(field), dtypes, is_written=True)
        if like is not None and array.numel != like.numel:
            raise ValueError(
                f"{array.name}: {array.numel} elements, but {like.name} has {like.numel}; all arrays of one shard "
                "must have the same length"
            )
        return array

    def _array_or_none(self, field: str, dtypes: Sequence[str], like: DeviceArray) -> DeviceArray | None:
        return None if self._field(field) is None else self._array(field, dtypes, like)

    def _add(self, name: str, source: Any, dtypes: Sequence[str], *, is_written: bool) -> DeviceArray:
        array = read_array(
            name, source, dtypes=dtypes, is_written=is_written, device_types=self._device_types
        )
        self._arrays.append(array)
        return array

    def _grads(self, shard_numel: int) -> list[tuple[int, DeviceArray]]:
        read: list[tuple[int, DeviceArray]] = []
        end = 0
        for place, piece in enumerate(self._field("grads")):
            name = f"{self._name}.grads[{place}]"
            try:
                first, source = piece
                offset = operator.index(first)
            except (TypeError, ValueError) as error:
                raise TypeError(
                    f"{name}: a {type_name(piece)}; must be a pair of an offset and an array"
                ) from error
            array = self._add(name, source, GRAD_DTYPES, is_written=False)
            if offset < end or array.numel > shard_numel - offset:
                raise ValueError(
                    f"{name}: {array.numel} elements from {offset} on; must lie in [{end}, {shard_numel}), behind the "
                    "piece before and inside the shard"
                )
            end = offset + array.numel
            read.append((offset, array))
        return read

    def _segments(self, shard_numel: int) -> list[ReadSegment]:
        name = f"{self._name}.segments"
        segments = []
        for place, one in enumerate(self._field("segments")):
            fields = Fields(segment=one, name=f"{name}[{place}]", kind=self._rule.segment_kind)
            segments.append(self._segment(fields, shard_numel))
        _check_overlap(segments, name)
        return segments

    def _segment(self, fields: Fields, shard_numel: int) -> ReadSegment:
        offset, numel = fields.int64("offset"), fields.int64("numel")
        if offset < 0 or numel < 0 or offset + numel > shard_numel:
            raise ValueError(
                f"{fields.name}: offset {offset} and numel {numel} do not fit in the shard of {shard_numel} elements"
            )
        hyper = self._rule.read_hyper(fields)
        if hyper.uses_states and any(self._field(field) is None for field in self._rule.states):
            raise ValueError(
                f"{self._name}.{self._rule.states[0]}: None, but {fields.name} has momentum "
                f"{fields.double('momentum'):.15g}; pass an array, of zeros before step 1"
            )
        return ReadSegment(
            name=fields.name, offset=offset, numel=numel, hyper=hyper, packed=as_floats(hyper.coefficients)
        )


def as_floats(values: Sequence[float]) -> bytes:
    """Return the numbers as float32, each rounded once; what is too large becomes infinite, as in C."""
    return bytes((ctypes.c_float * len(values))(*values))


def attribute(owner: Any, field: str, name: str, kind: str) -> Any:
    """Return an attribute that must be there."""
    try:
        return getattr(owner, field)
    except AttributeError:
        article = "an" if kind[0] in "AEIOU" else "a"
        raise TypeError(
            f"{name}: a {type_name(owner).rpartition('.')[2]} without '{field}'; must be {article} {kind}"
        ) from None


def _check_overlap(segments: Sequence[ReadSegment], name: str) -> None:
    order = sorted((segment.offset, place) for place, segment in enumerate(segments) if segment.numel > 0)
    for (_, low), (_, high) in itertools.pairwise(order):
        a, b = segments[low], segments[high]
        if b.offset < a.offset + a.numel:
            raise ValueError(
                f"{name}[{high}]: elements [{b.offset}, {b.offset + b.numel}) overlap {name}[{low}], elements "
                f"[{a.offset}, {a.offset + a.numel})"
            )
