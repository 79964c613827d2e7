"""Count of floating-point operations: matrix products, convolutions and attention,
by torch's formulas.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

_aten = torch.ops.aten
# Operations that torch's formulas leave out; each counts a multiplication and an addition as two.
_FORMULAS: Mapping[Any, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: lambda query, key, value, *args, **kwargs: (
        sdpa_flop_count(query.shape, key.shape, value.shape)  # type: ignore[no-untyped-call]
    ),
    _aten.mv: lambda matrix, vector, **kwargs: 2 * matrix.numel(),
    _aten.addmv: lambda bias, matrix, vector, **kwargs: 2 * matrix.numel(),
    _aten.dot: lambda left, right, **kwargs: 2 * left.numel(),
}
_HEAVY = re.compile(r"attention|convolution|conv[_\d]|rnn$|rnn_layer|(matmul|linear|mm)$")


class FlopCount(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts inside its block. Element by element operations, norms and look-ups are not counted.

    torch.utils.flop_counter.FlopCounterMode has the same formulas, but not those of attention on CPUs, and
    its count by module costs about 100 microseconds for each call of one, which would be in the latencies.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0
        self.uncounted: Counter[str] = (
            Counter()
        )  # name -> calls of operations that surely cost much and have no formula
        self._is_whole: set[Any] = {torch.ops.prim.device.default}  # operations that consist of no others

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation; count it, or the operations that it consists of."""
        kwargs = kwargs or {}
        packet = func._overloadpacket if isinstance(func, OpOverload) else func
        formula = _FORMULAS.get(packet)
        if formula is not None:
            self.total += formula(*args, **kwargs)
            return func(*args, **kwargs)
        if packet in flop_registry:
            result = func(*args, **kwargs)
            self.total += flop_registry[packet](*args, **kwargs, out_val=result)
            return result
        if isinstance(func, OpOverload) and func not in self._is_whole:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
            self._is_whole.add(func)
        name = str(packet)
        if _HEAVY.search(name):
            self.uncounted[name] += 1
        return func(*args, **kwargs)


@contextmanager
def counted() -> Iterator[FlopCount]:
    """Count in the block. The fast path of torch's transformer layers is closed meanwhile: it is one
    operation without a formula.
    """
    with FlopCount():
        # torch loads its compiler at the first operation: 0.6 s that belong to no module
        torch.empty(0, device="cpu").detach()
    was_open = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with FlopCount() as count:
            yield count
    finally:
        torch.backends.mha.set_fastpath_enabled(was_open)
