"""Gradients of a model that every rank has whole: autograd's own, added up in float64."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class PlainGradients:
    """The sums over a step's micro batches of each parameter's gradients, on this rank, and their averages.

    A gradient is taken from `p.grad` as soon as autograd has added to it, so that no sum is rounded to 16
    bits.
    """

    def __init__(self, params: Mapping[str, nn.Parameter], *, factor: Callable[[], float]) -> None:
        """`factor` is that of the gradients of the backward that is under way."""
        self._params = dict(params)
        self._sums: dict[str, Tensor] = {}  # float64, the parameter's shape
        self._index = {name: index for index, name in enumerate(self._params)}
        # [parameters, 2] float64: sums of the largest elements, and of the norms, of all that was added
        self._terms = torch.zeros(len(self._params), 2, dtype=torch.float64, device="cpu")
        self._factor = factor
        self._hooks = [self._watch(name, param) for name, param in self._params.items()]

    def _watch(self, name: str, param: nn.Parameter) -> Any:
        reference = weakref.ref(self)

        def take(param: Tensor) -> None:
            owner = reference()
            if owner is not None:
                owner._take(name, param)

        return param.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _take(self, name: str, param: Tensor) -> None:
        if param.grad is None:
            return
        grad = (param.grad.to_dense() if param.grad.is_sparse else param.grad).double() * self._factor()
        param.grad = None
        if grad.numel():
            self._terms[self._index[name]] += torch.stack([grad.abs().max(), grad.norm()]).cpu()
        self._sums[name] = grad if name not in self._sums else self._sums[name].add_(grad)

    @torch.no_grad()
    def averages(self, *, is_counted: bool, divisor: float) -> dict[str, Tensor]:
        """Return the sums over all ranks whose gradients are counted, divided by `divisor`; float64.
        Parameters that no rank has used have zeros.

        Order: a collective
        """
        averages = {name: self.average(name, is_counted=is_counted, divisor=divisor) for name in self._params}
        self.forget()
        return averages

    def terms(self, *, is_counted: bool, divisor: float, device: torch.device) -> dict[str, list[float]]:
        """Return for each parameter the largest element and the norm that its average would have if nothing
        of what is averaged cancelled out.

        Order: a collective
        """
        total = (self._terms if is_counted else torch.zeros_like(self._terms)).to(device)
        dist.all_reduce(total)
        return dict(zip(self._params, (total / divisor).tolist(), strict=True))

    def average(self, name: str, *, is_counted: bool, divisor: float) -> Tensor:
        """Return the average of one parameter's gradients so far; float64.

        Order: a collective
        """
        own, param = self._sums.get(name), self._params[name]
        if own is None or not is_counted:
            own = torch.zeros(param.shape, dtype=torch.float64, device=param.device)
        total = own.clone()
        dist.all_reduce(total)
        return total / divisor

    def set(self, name: str, average: Tensor, *, is_counted: bool, divisor: float) -> None:
        """Let the sums be such that this is their average.

        Order: a collective
        """
        num_counted = torch.tensor(float(is_counted), device=average.device)
        dist.all_reduce(num_counted)
        self._sums[name] = average.double() * (divisor / float(num_counted))

    def forget(self) -> None:
        """Drop the sums."""
        self._sums.clear()
        self._terms.zero_()

    def release(self) -> None:
        """Leave the parameters alone from now on."""
        for hook in self._hooks:
            hook.remove()
        self.forget()
