"""One step of an optimizer over flat arrays: one call of our kernel for all arrays, or torch's operations
where our kernel is not available.

Letters: n = elements of one array.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass
from functools import cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...kernels import Kernel, cuda
from .eight_bits import SCALES, has_eight_bits
from .flat_arrays import ElementRun, FlatArrays, Group
from .narrow import is_narrow, update_in_parts
from .on_device import as_float, scaled_grad, step_on_device


@dataclass(slots=True)
class Pieces:
    """Arrays that share one group and one step, as lists for torch's foreach functions. Each entry is a run
    of elements whose gradient is in one piece.
    """

    group: Group
    step: int
    params: list[Tensor]
    grads: list[Tensor]  # float32; may be the caller's own tensors
    states: dict[str, list[Tensor]]


class Formula(ABC):
    """A formula: a kernel in one of its modes. It has no state: all that changes lies in the arrays."""

    name: str  # a name of its row in registry.py
    kernel: ClassVar[Kernel[Any]]
    mode: int = 0
    initial: ClassVar[
        Mapping[str, str]
    ] = {}  # state that does not begin with zero -> the key of a group that has its first value
    # False: each run must be one whole parameter, with its gradient in one piece
    is_elementwise: ClassVar[bool] = True

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the states of each element."""
        return self.kernel.states

    @property
    def counts_steps(self) -> bool:
        """True if a step depends on its number."""
        return self.kernel.counts_steps

    def for_group(self, group: Group) -> Formula:
        """Return the formula that this group asks for: the same object for all groups that one call can
        update.
        """
        return self

    def names_for(self, groups: Iterable[Group]) -> tuple[str, ...]:
        """Return the names of the states that these groups need."""
        return self.state_names

    def update(self, arrays: Sequence[FlatArrays], *, grad_scale: float = 1.0) -> None:
        """Apply one step to all arrays, which are on one device; gradients are first multiplied by
        `grad_scale`.

        Errors: ValueError for a hyper-parameter out of range; nothing is written then
        """
        if not arrays:
            return
        if arrays[0].param.is_cpu:
            self.update_in_host_memory(arrays, grad_scale=grad_scale)
        elif not (
            arrays[0].param.is_cuda
            and all(run.seed is None for one in arrays for run in one.runs)  # our CUDA kernels have no bits
            and self.update_on_device(arrays, grad_scale=grad_scale)
        ):
            self.update_with_torch(arrays, grad_scale=grad_scale)

    def update_in_host_memory(self, arrays: Sequence[FlatArrays], *, grad_scale: float = 1.0) -> None:
        """Update with one call of our kernel."""
        self.call(self._shards(arrays), grad_scale)

    def update_on_device(self, arrays: Sequence[FlatArrays], *, grad_scale: float = 1.0) -> bool:
        """Queue one call of our CUDA kernel; return False, with nothing written, if that is not wanted or not
        possible here.
        """

        def queue(arrays: Sequence[FlatArrays], *, stream: int) -> None:
            self.call_on_device(self._shards(arrays), grad_scale, stream)

        return step_on_device(queue, arrays, device=arrays[0].param.device)

    def _shards(self, arrays: Sequence[FlatArrays]) -> list[Any]:
        # many parameters share a segment: a model has few sizes of them and few groups
        segments: dict[tuple[int | None, ...], Any] = {}
        numbers: dict[tuple[int | None, ...], dict[str, Any]] = {}
        shards = []
        for update in arrays:
            chosen = []
            for run in update.runs:
                key = (id(run.group), run.step, run.offset, run.numel, run.seed, run.first)
                if key not in segments:
                    if key[:2] not in numbers:
                        numbers[key[:2]] = {name: number(run) for name, number in _numbers(self.kernel)}
                    segments[key] = self.kernel.segment(
                        offset=run.offset,
                        numel=run.numel,
                        seed=run.seed,
                        first=run.first,
                        **numbers[key[:2]],
                    )
                chosen.append(segments[key])
            shards.append(self.shard(update, chosen))
        return shards

    def shard(self, one: FlatArrays, segments: list[Any]) -> Any:
        """Return the arrays in the form that our kernel takes."""
        arrays: dict[str, Any] = {name: one.states.get(name) for name in self.kernel.states}
        if has_eight_bits(one.states):
            arrays["scales"] = tuple(one.states[name + SCALES] for name in self.kernel.states)
        if self.kernel.has_update:
            arrays["update"] = torch.empty_like(one.param)
        return self.kernel.shard(
            param=one.param, grads=one.grads, param_out=one.param_out, segments=segments, **arrays
        )

    def call(self, shards: list[Any], grad_scale: float) -> None:
        """Call our kernel."""
        self.kernel.step(shards, grad_scale=grad_scale, mode=self.mode)

    def call_on_device(self, shards: list[Any], grad_scale: float, stream: int) -> None:
        """Queue our CUDA kernel on the stream, a `cudaStream_t`. After the call the arrays may be freed.

        Errors: CudaUnavailable, and then nothing is written
        """
        cuda.step(self.kernel, shards, grad_scale=grad_scale, mode=self.mode, stream=stream)

    def update_with_torch(self, arrays: Sequence[FlatArrays], *, grad_scale: float = 1.0) -> None:
        """Update with torch's operations, on any device.

        Float32 gradients may be overwritten if `grad_scale` is not 1.
        """
        names = self.names_for(run.group for one in arrays for run in one.runs)
        for one in filter(is_narrow, arrays):
            update_in_parts(one, partial(self.update_with_torch, grad_scale=grad_scale))
        for pieces in _collect([one for one in arrays if not is_narrow(one)], names, grad_scale):
            self.foreach(pieces)
        _copy_out(arrays)

    @abstractmethod
    def foreach(self, pieces: Pieces) -> None:
        """Apply one step with torch's operations over lists; `pieces.grads` may be read only."""


@cache
def _numbers(kernel: Kernel[Any]) -> tuple[tuple[str, Callable[[ElementRun], Any]], ...]:
    """Return the numbers of a segment, each with a function that gets it from a run."""
    return tuple((field.name, _number(field)) for field in kernel.numbers)


def _number(field: Field[Any]) -> Callable[[ElementRun], Any]:
    name, default = field.name, field.default
    if name == "step":
        return corrected_step
    if name in ("beta1", "beta2"):
        return lambda run: as_float(run.group["betas"][name == "beta2"])
    if field.type == "bool":
        return lambda run: bool(run.group[name])
    if default is MISSING:
        return lambda run: as_float(run.group[name])
    return lambda run: as_float(run.group.get(name, default))


def _copy_out(arrays: Sequence[FlatArrays]) -> None:
    """Round the results into `param_out`, run by run, so that padding between runs stays zero."""
    for update in arrays:
        if update.param_out is not None:
            for run in update.runs:
                span = slice(run.offset, run.offset + run.numel)
                update.param_out[span].copy_(update.param[span])


def _collect(arrays: Sequence[FlatArrays], names: Sequence[str], grad_scale: float) -> Iterator[Pieces]:
    groups: dict[tuple[int, int], Pieces] = {}
    for update in arrays:
        for offset, piece in update.grads:
            grad = scaled_grad(piece, grad_scale)
            for run in update.runs:
                start, stop = max(run.offset, offset), min(run.offset + run.numel, offset + grad.numel())
                if start >= stop:
                    continue
                key = (id(run.group), run.step)
                if key not in groups:
                    groups[key] = Pieces(run.group, run.step, [], [], {name: [] for name in names})
                pieces = groups[key]
                pieces.params.append(update.param[start:stop])
                pieces.grads.append(grad[start - offset : stop - offset])
                for name in names:
                    pieces.states[name].append(update.states[name][start:stop])
    return iter(groups.values())


# A number of steps for which Adam corrects nothing: both corrections are 1 - beta^step, and for such a step
# beta^step is 0 for every beta below 1, so they are exactly 1.
ALL_STEPS = 2**62


def corrected_step(run: ElementRun | Pieces) -> int:
    """Return the step for Adam's bias correction; ALL_STEPS, which corrects nothing, if the group switches it
    off.
    """
    return run.step if run.group.get("bias_correction", True) else ALL_STEPS
