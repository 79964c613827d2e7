"""Amounts of work of a run: what is computed, what is read and written, and what ranks send each other."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from ..comm.flight_recorder import Line
from ..comm.wire import Wire

_VIEWS = (
    "view", "reshape", "transpose", "permute", "expand", "slice", "select", "t", "detach", "alias",
    "unsqueeze", "squeeze", "as_strided", "split", "chunk", "unbind", "_unsafe_view", "diagonal", "set_",
)  # fmt: skip

# torch has formulas of attention on GPUs alone. A formula takes the shapes of the first so many arguments.
_ATTENTION_ON_CPU: dict[str, tuple[Callable[..., Any], int]] = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": (sdpa_flop_count, 3),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": (sdpa_backward_flop_count, 4),
}
# Products with packed weights, for which bitsandbytes has no formulas: the first argument's last dimension
# is summed over.
_PACKED_PRODUCTS = frozenset(
    f"bitsandbytes::{name}"
    for name in ("gemm_4bit", "gemv_4bit", "int8_linear_matmul", "int8_scaled_mm", "int8_mixed_scaled_mm")
)


class OperationGroup(NamedTuple):
    """Operations of one dtype that do about as much arithmetic for each byte that they move."""

    dtype: str
    intensity: int  # power of two: flops for each byte; -1 without flops
    is_update: bool = False  # in the optimizer step, and not in forward and backward


class Amounts(NamedTuple):
    """Sums over the operations of a group."""

    flops: int = 0
    moved_bytes: int = 0
    number: int = 0


class SentAlong:
    """Messages of a rank along one axis, by kind of collective."""

    def __init__(self) -> None:
        self.bytes: Counter[str] = Counter()
        self.number: Counter[str] = Counter()
        self.update_bytes: Counter[str] = Counter()  # the part of those bytes that the optimizer step moves


class RankWork:
    """Amounts of work of a rank in one stretch of the run."""

    def __init__(self) -> None:
        self.on_device: dict[OperationGroup, Amounts] = defaultdict(Amounts)
        self.host_bytes = 0  # read and written in host memory by the host's own arithmetic
        self.copied_bytes: Counter[str] = Counter()  # "to device", "to host", "to disk", "from disk"
        self.update_copied_bytes: Counter[str] = Counter()  # the part of those that the optimizer step copies
        self.sent: dict[tuple[str, tuple[int, ...]], SentAlong] = defaultdict(SentAlong)


class WorkMeter:
    """Adds the operations up; `begin` starts a new stretch."""

    is_on_gpu = True

    def __init__(self) -> None:
        self.now = RankWork()
        self.is_update = False  # the optimizer steps now

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
            self.add_copy("to device" if results[0].is_cuda else "to host", results[0].nbytes)
            return
        num_bytes = sum(one.nbytes for one in tensors) + sum(one.nbytes for one in results)
        if "cuda" not in devices and self.is_on_gpu:
            self.now.host_bytes += num_bytes
            return
        flops = _flops(func, args, kwargs, out)
        intensity = (flops // max(num_bytes, 1)).bit_length() if flops else -1
        group = OperationGroup(str(results[0].dtype).removeprefix("torch."), intensity, self.is_update)
        before = self.now.on_device[group]
        self.now.on_device[group] = Amounts(
            before.flops + flops, before.moved_bytes + num_bytes, before.number + 1
        )

    def add_copy(self, way: str, num_bytes: int) -> None:
        """Count bytes on their way to or from the device or the disk."""
        self.now.copied_bytes[way] += num_bytes
        if self.is_update:
            self.now.update_copied_bytes[way] += num_bytes

    def watch_wires(self) -> None:
        """Count what every engine's wire sends from now on."""
        begin = Wire.begin
        meter = self

        def counted(wire: Wire, op: str, tensor: Tensor | None, what: str, **said: Any) -> Any:
            line: Line = said.get("line") or Line()
            if num_bytes := said.get("sent_bytes"):
                kind = said.get("counted_as") or op
                axis = line.axis or ("pp" if op == "send" else "dp")
                sent = meter.now.sent[axis, line.ranks]
                sent.bytes[kind] += num_bytes
                sent.number[kind] += 1
                sent.update_bytes[kind] += num_bytes if meter.is_update else 0
            return begin(wire, op, tensor, what, **said)

        Wire.begin = counted  # type: ignore[method-assign, assignment]


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Return the multiplications and additions of an operation that has a formula, else 0."""
    if of_attention := _ATTENTION_ON_CPU.get(func._schema.name):
        count, num_shapes = of_attention
        return int(count(*(one.shape for one in args[:num_shapes])))
    if func._schema.name in _PACKED_PRODUCTS:
        product: Tensor = out[0] if isinstance(out, (tuple, list)) else out
        return 2 * product.numel() * int(args[0].shape[-1])
    formula = flop_registry.get(func.overloadpacket)
    if formula is None:
        return 0
    shaped = (one for one in args if not isinstance(one, torch.dtype))  # no formula knows a dtype
    return int(formula(*shaped, **kwargs, out_val=out))
