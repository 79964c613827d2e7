"""`with OnDevice(dtype=torch.bfloat16, device="meta"):` a model that is made inside has
its parameters there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_MAKERS: frozenset[Callable[..., Any]] = frozenset({torch.empty, torch.full, torch.ones, torch.zeros})


class OnDevice(TorchFunctionMode):
    """Inside it torch.empty, zeros, ones and full make their tensors on `device`,
    and those with fractions in `dtype`.

    torch's modules make their parameters by these. What others make (arange, tensor, randn) stays where it is
    without the context, so tables that a model computes have their values on "meta", too; a device that is
    given in a call is kept. torch.Tensor(sizes) is not seen: write torch.empty(sizes).
    Source: DeepSpeed 0.19.8 utils/init_on_device.py, `OnDevice`
    """

    def __init__(
        self, dtype: torch.dtype | None, device: str | torch.device = "meta", enabled: bool = True
    ) -> None:
        """`dtype` None keeps each tensor's own."""
        super().__init__()
        self.dtype, self.device, self.enabled = dtype, device, enabled

    def __enter__(self) -> OnDevice:
        if self.enabled:
            super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.enabled:
            super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if func not in _MAKERS:
            return func(*args, **given)
        if given.get("device") is None:
            given["device"] = self.device
        result = func(*args, **given)
        is_other = self.dtype is not None and result.is_floating_point()
        return result.to(self.dtype) if is_other else result
