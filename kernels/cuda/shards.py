"""From shards, as the caller gives them, to runs: every check of the CPU's binding, in the same words.

Nothing here touches a device: a mistake is refused before the first launch.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..compiled import _C
from ..shard import Kernel
from .arrays import CUDA, DeviceArray, check_no_shared_memory, check_one_device, read_array, type_name
from .table import Run, Variant

GRAD_DTYPES = ("float32", "bfloat16", "float16")
STATE_DTYPES = ("float32", "bfloat16")
PARAM_OUT_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A step to do: which optimizer's, in which mode, and what its gradients are multiplied with."""

    kernel: Kernel[Any]
    grad_scale: float = 1.0
    mode: int = 0

    @property
    def source(self) -> str:
        """The file of its kernels, without `.cu`."""
        return self.kernel.name.lower()


class SegmentOfHeader(NamedTuple):
    """A segment in the form of the optimizer's header."""

    offset: int
    numel: int
    coefficients: bytes  # in the kernel's layout
    mode: int  # DSLAUNCH_MODE
    num_states: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSegment:
    """A segment, checked."""

    name: str
    source: Any  # the caller's
    of_header: SegmentOfHeader


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The arguments of one call, checked."""

    runs: tuple[Run, ...]
    segments: tuple[ReadSegment, ...]  # segments of every shard, one shard after another
    arrays: tuple[DeviceArray, ...]  # keep the memory alive
    factor: int = 0  # the address of `device_scale`; 0: there is none

    @property
    def coefficient_bytes(self) -> int:
        """Number of bytes of a segment's coefficients; 0 without segments."""
        return len(self.segments[0].of_header.coefficients) if self.segments else 0

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
        scale = read_array(
            "device_scale", device_scale, dtypes=("float32",), is_written=False, device_types=device_types
        )
        if scale.numel != 1:
            raise ValueError(f"device_scale: {scale.numel} elements; must be 1")
        arrays.append(scale)
        factor = scale.address
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
        """Cut the shard where segments and pieces of the gradient meet;
        its segments go to `segments`, too.
        """
        param = self._array("param", ("float32",))
        states, lacking = self._states(param)
        out = self._array_or_none("param_out", PARAM_OUT_DTYPES, param)
        update = self._array("update", ("float32",), param) if self._rule.kernel.has_update else None
        grads = self._grads(param.numel)
        runs = []
        for read in self._segments(param.numel, lacking):
            segments.append(read)
            segment = read.of_header
            used = states[: segment.num_states]
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
                        mode=segment.mode,
                    ),
                    numel=stop - start,
                    grad=grad.at(start - offset),
                    param=param.at(start),
                    states=(addresses[0], addresses[1]),
                    param_out=0 if out is None else out.at(start),
                    coefficients=segment.coefficients,
                    update=0 if update is None else update.at(start),
                    segment=len(segments) - 1,
                )
                runs.append(run)
        return runs

    def _states(self, param: DeviceArray) -> tuple[list[DeviceArray], str]:
        """The states, and the name of one that is None."""
        states: list[DeviceArray] = []
        lacking = ""
        for field in self._rule.kernel.states:
            if self._rule.kernel.may_lack_states and self._field(field) is None:
                lacking = f"{self._name}.{field}"
                continue
            state = self._array(field, STATE_DTYPES, like=param)
            if states and state.dtype != states[0].dtype:
                raise TypeError(
                    f"{state.name}: dtype {state.dtype}, but {states[0].name} has {states[0].dtype}; all "
                    "states of one shard must have the same dtype"
                )
            states.append(state)
        return states, lacking

    def _field(self, field: str) -> Any:
        return attribute(self._shard, field, self._name, self._rule.kernel.shard.__name__)

    def _array(self, field: str, dtypes: Sequence[str], like: DeviceArray | None = None) -> DeviceArray:
        array = self._add(f"{self._name}.{field}", self._field(field), dtypes, is_written=True)
        if like is not None and array.numel != like.numel:
            raise ValueError(
                f"{array.name}: {array.numel} elements, but {like.name} has {like.numel}; all arrays of one "
                "shard must have the same length"
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
                    f"{name}: {array.numel} elements from {offset} on; must lie in [{end}, {shard_numel}), "
                    "behind the piece before and inside the shard"
                )
            end = offset + array.numel
            read.append((offset, array))
        return read

    def _segments(self, shard_numel: int, lacking: str) -> list[ReadSegment]:
        """Read in the compiled module, where the header's own code checks the numbers and works
        the coefficients out.
        """
        name, objects = f"{self._name}.segments", tuple(self._field("segments"))
        for place, one in enumerate(objects):
            seed = getattr(one, "seed", None)
            if seed is not None:
                raise ValueError(
                    f"{name}[{place}].seed: {seed}; must be None: kernels on a device round to nearest"
                )
        packed = _C.pack_segments(
            self._rule.kernel.name,
            objects,
            name=name,
            shard_numel=shard_numel,
            lacking=lacking,
            grad_scale=self._rule.grad_scale,
            mode=self._rule.mode,
        )
        return [
            ReadSegment(name=f"{name}[{place}]", source=source, of_header=SegmentOfHeader(*numbers))
            for place, (source, numbers) in enumerate(zip(objects, packed, strict=True))
        ]


def attribute(owner: Any, field: str, name: str, kind: str) -> Any:
    """Return an attribute that must be there."""
    try:
        return getattr(owner, field)
    except AttributeError:
        article = "an" if kind[0] in "AEIOU" else "a"
        raise TypeError(
            f"{name}: a {type_name(owner).rpartition('.')[2]} without '{field}'; must be {article} {kind}"
        ) from None
