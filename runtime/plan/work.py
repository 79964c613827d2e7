"""Amounts of work of a run: what is computed, what is read and written, and what ranks send each other."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.flop_counter import flop_registry

from ..comm.flight_recorder import Line
from ..comm.wire import Wire

_VIEWS = (
    "view", "reshape", "transpose", "permute", "expand", "slice", "select", "t", "detach", "alias",
    "unsqueeze", "squeeze", "as_strided", "split", "chunk", "unbind", "_unsafe_view", "diagonal", "set_",
)  # fmt: skip


class OperationGroup(NamedTuple):
    """Operations of one dtype that do about as much arithmetic for each byte that they move."""

    dtype: str
    intensity: int  # power of two: flops for each byte; -1 without flops


class Amounts(NamedTuple):
    """Sums over the operations of a group."""

    flops: int = 0
    moved_bytes: int = 0
    number: int = 0


class RankWork:
    """Amounts of work of a rank in one stretch of the run."""

    def __init__(self) -> None:
        self.on_device: dict[OperationGroup, Amounts] = defaultdict(Amounts)
        self.host_bytes = 0  # read and written in host memory by the host's own arithmetic
        self.copied_bytes: Counter[str] = Counter()  # "to device", "to host"
        self.sent: dict[tuple[str, tuple[int, ...]], Counter[str]] = defaultdict(Counter)


class WorkMeter:
    """Adds the operations up; `begin` starts a new stretch."""

    def __init__(self) -> None:
        self.now = RankWork()

    def begin(self) -> RankWork:
        """Begin anew; return what was added up."""
        before, self.now = self.now, RankWork()
        return before

    def add(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        tensors: Sequence[Tensor],
        results: Sequence[Tensor],
        out: Any,
    ) -> None:
        """Count one operation, which gives `results`; `out` is all that its kernel has returned."""
        name = func._schema.name.partition("::")[2]
        if name in _VIEWS or not results:
            return
        devices = {one.device.type for one in (*tensors, *results)}
        if devices == {"cpu", "cuda"} and name in ("copy_", "_to_copy"):
            way = "to device" if results[0].is_cuda else "to host"
            self.now.copied_bytes[way] += results[0].nbytes
            return
        num_bytes = sum(one.nbytes for one in tensors) + sum(one.nbytes for one in results)
        if "cuda" not in devices and self.is_on_gpu:
            self.now.host_bytes += num_bytes
            return
        flops = _flops(func, args, kwargs, out)
        intensity = (flops // max(num_bytes, 1)).bit_length() if flops else -1
        group = OperationGroup(str(results[0].dtype).removeprefix("torch."), intensity)
        before = self.now.on_device[group]
        self.now.on_device[group] = Amounts(
            before.flops + flops, before.moved_bytes + num_bytes, before.number + 1
        )

    is_on_gpu = True

    def watch_wires(self) -> None:
        """Count what every engine's wire sends from now on."""
        begin = Wire.begin
        meter = self

        def counted(wire: Wire, op: str, tensor: Tensor | None, what: str, **said: Any) -> Any:
            line: Line = said.get("line") or Line()
            if said.get("sent_bytes"):
                meter.now.sent[line.axis or "dp", line.ranks][said.get("counted_as") or op] += said[
                    "sent_bytes"
                ]
            return begin(wire, op, tensor, what, **said)

        Wire.begin = counted  # type: ignore[method-assign, assignment]


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Return the multiplications and additions of an operation that has a formula, else 0."""
    formula = flop_registry.get(func.overloadpacket)
    if formula is None:
        return 0
    return int(formula(*args, **kwargs, out_val=out))
