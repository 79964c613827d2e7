"""A second look at a step whose gradients are far out: is it the data, or did a host compute something wrong?

Each rank runs the forward of its last micro batch again, twice, with the same weights, buffers, random
numbers and inputs, and compares bits. A rank that is alone in getting another result than the first time, and
the same one both times, has computed something wrong a moment ago. Where most ranks get other bits, the
program's forward cannot be repeated here, as with kernels that add in any order, and nothing follows from it;
nor does anything from bits that differ by rounding, which make no step far out.
"""

from __future__ import annotations

import logging
import math
import socket
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..comm.process_group import group_device
from ..comm.rank_group import Job
from ..errors import WrongNumbersError
from .run_state import BufferStates, Inputs, RandomState

_log = logging.getLogger("dslaunch")

MIN_STEPS = 20  # before that the norms of a training change too much to be a measure
NUM_STEPS = 200
MOST_IN_A_ROW = 3  # a training that has diverged is not looked at again in every step
SAME, WRONG, VARYING, ROUNDED = 0.0, 1.0, 2.0, 3.0  # what two more runs gave, beside the first one
ROUNDING = 0.01  # a greater part of the largest number is more than another order of sums makes in bfloat16
WHY_NOT = (  # why a rank cannot look again, by its number
    "",
    "ran no forward through the engine",
    "wrote to the inputs, or for the first time to a buffer, since that forward began",
    "got no tensors from the forward",
)


class _Run(NamedTuple):
    """The first run of a micro batch."""

    inputs: Inputs
    buffers: BufferStates  # as they were before it
    random: RandomState
    output: list[Tensor]

    @property
    def why_not(self) -> int:
        """Return the number of a reason why it cannot be repeated."""
        if not (self.inputs.are_the_same() and self.buffers.are_known()):
            return 2
        return 0 if self.output else 3


class Rerun:
    """Second looks of one engine."""

    def __init__(
        self,
        module: nn.Module,
        job: Job,
        device: torch.device,
        *,
        sigmas: float,
        forward: Callable[..., Any],
    ) -> None:
        """`forward` runs the module on such arguments as in a step. A norm is far out if it is more than
        `sigmas` standard deviations above the mean of the last steps.
        """
        self._module, self._job, self._device = module, job, device
        self._sigmas, self._forward = sigmas, forward
        self._norms: deque[float] = deque(maxlen=NUM_STEPS)
        self._last: _Run | None = None
        self._written: set[int] = set()  # buffers that forwards write to, by id()
        self._num_in_a_row = 0

    @contextmanager
    def keeping(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Callable[[Any], object]]:
        """Around the forward of a micro batch; the yielded function takes its output."""
        inputs, random = Inputs(args, kwargs), RandomState.now(self._device)
        buffers = BufferStates(self._module, self._written)

        def take(output: Any) -> None:
            self._written |= buffers.written()
            self._last = _Run(inputs, buffers, random, _tensors(output))

        self._last = None
        yield take

    def look(self, norm: float, step: int) -> None:
        """Look at the norm of the gradients of step `step`, which is the same on all ranks, before any
        parameter changes; run the last micro batch again if it is far out.

        Order:  a collective, if it is
        Errors: WrongNumbersError, on all ranks, if a rank has computed something wrong
        """
        far_out, last = self._how_far_out(norm), self._last
        self._last = None
        if math.isfinite(norm):
            self._norms.append(norm)
        self._num_in_a_row = self._num_in_a_row + 1 if far_out else 0
        if not far_out or self._num_in_a_row > MOST_IN_A_ROW:
            return
        what = "who can look again"
        why_not = float(1 if last is None else last.why_not)
        whys = self._job.all_gather_numbers([why_not], device=group_device(), what=what)
        unable = [rank for rank, (one,) in enumerate(whys) if one]
        if last is None or unable:  # a forward gathers, so all run it or none does
            why = WHY_NOT[int(whys[unable[0]][0])]
            who = self._job.names.of(*(rank for rank in unable if whys[rank] == whys[unable[0]]))
            self._say(f"step {step}: {far_out}; not looked at again: {who} {why}")
            return
        found = self._again(last)
        everywhere = self._job.all_gather_numbers([found], device=group_device(), what="a second look")
        hosts = self._job.all_gather_objects(socket.gethostname(), what="names of hosts")
        self._judge([one for (one,) in everywhere], hosts, f"step {step}: {far_out}")

    def _how_far_out(self, norm: float) -> str:
        if not math.isfinite(norm):
            return f"the gradients' norm is {norm}"
        if len(self._norms) < MIN_STEPS:
            return ""
        mean = math.fsum(self._norms) / len(self._norms)
        deviation = math.sqrt(math.fsum((one - mean) ** 2 for one in self._norms) / len(self._norms))
        if norm <= mean + self._sigmas * deviation:
            return ""
        of = f"the last {len(self._norms)} steps' {mean:.4g} on average, {deviation:.3g} standard deviation"
        return f"the gradients' norm is {norm:.4g}, far above {of}"

    def _judge(self, found: list[float], hosts: list[str], what: str) -> None:
        differ = [rank for rank, one in enumerate(found) if one != SAME]
        wrong = [rank for rank in differ if found[rank] == WRONG]
        if not differ:
            self._say(
                f"{what}; each rank has computed its last micro batch again, with the same bits: it is "
                "the data or the training, and no host"
            )
        elif 2 * len(differ) > len(found) or len(found) == 1:
            self._say(
                f"{what}; the forward cannot be repeated on {self._job.names.of(*differ)}: run again, it "
                "gave other bits, so nothing is known about the hosts"
            )
        elif not wrong and VARYING not in found:
            self._say(
                f"{what}; {self._named(differ, hosts)} got other bits when the last micro batch was run "
                "again, which differ by rounding only: that is not what made the step far out"
            )
        elif not wrong:
            self._say(
                f"{what}; {self._named(differ, hosts)} got three different results from the same micro "
                "batch, where others got one: look at that host's GPU and memory"
            )
        else:
            raise WrongNumbersError(
                f"{what}; {self._named(wrong, hosts)} computed something wrong: run again, twice, the same "
                "micro batch gave other bits than the first time, where other ranks got the same ones; the "
                "step was not taken: take that host out, and look at its GPU and memory"
            )

    def _named(self, ranks: list[int], hosts: list[str]) -> str:
        return f"{self._job.names.of(*ranks)} on {', '.join(dict.fromkeys(hosts[rank] for rank in ranks))}"

    def _say(self, text: str) -> None:
        if self._job.is_first:
            _log.warning(text)

    def _again(self, first: _Run) -> float:
        """Run it twice more, and leave no trace: neither in buffers nor in random numbers."""
        buffers, random = BufferStates(self._module), RandomState.now(self._device)
        try:
            second, third = (self._run(first) for _ in range(2))
        finally:
            buffers.restore()
            random.restore(self._device)
        if _are_same(first.output, second):
            return SAME
        if _are_near(first.output, second) and _are_near(second, third):
            return ROUNDED
        return WRONG if _are_same(second, third) else VARYING

    def _run(self, first: _Run) -> list[Tensor]:
        first.buffers.restore()
        first.random.restore(self._device)
        with torch.enable_grad():  # as the first time: without, torch may choose other kernels
            return _tensors(self._forward(*first.inputs.args, **first.inputs.kwargs))


def _tensors(output: Any) -> list[Tensor]:
    return [one.detach() for one in tree_leaves(output) if isinstance(one, Tensor)]


def _are_same(one: list[Tensor], other: list[Tensor]) -> bool:
    """Tell whether all bits are the same, those of NaN too."""
    return len(one) == len(other) and all(
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))
        for a, b in zip(one, other, strict=True)
    )


def _are_near(one: list[Tensor], other: list[Tensor]) -> bool:
    """Tell whether the results differ by rounding at most."""
    return len(one) == len(other) and all(
        _is_near(a, b) if a.shape == b.shape and a.dtype == b.dtype and a.numel() else a.shape == b.shape
        for a, b in zip(one, other, strict=True)
    )


def _is_near(one: Tensor, other: Tensor) -> bool:
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    wide = torch.complex128 if one.is_complex() else torch.float64
    apart, largest = (one.to(wide) - other.to(wide)).abs().max(), other.to(wide).abs().max()
    return bool(apart <= ROUNDING * largest)  # False for NaN


def _bits(values: Tensor) -> Tensor:
    return values.contiguous().view(-1).view(torch.uint8) if values.numel() else values.new_empty(0)
