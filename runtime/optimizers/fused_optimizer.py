"""Common part of the fused optimizers: torch's interface in front of one kernel call for each device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from .flat_arrays import Group
from .flatten import ParameterUpdate, step_flat
from .formula import Formula
from .on_device import as_float

Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Keys in the groups of torch's optimizers that are not supported here.
_REFUSED = {
    "amsgrad": "leave it off, or take torch.optim.AdamW",
    "maximize": "negate the loss",
    "differentiable": "leave it off",
}


class FusedOptimizer(torch.optim.Optimizer):
    """An optimizer that updates all parameters of a device in one call.

    Parameters are float32, bfloat16 or float16. A parameter of 16 bits is updated in float32 and rounded to
    nearest even; its states are float32, or have its dtype if `fp32_optimizer_states` is false.
    """

    formula: ClassVar[Formula]
    is_elementwise: ClassVar[bool] = True
    host_only: ClassVar[bool] = False

    def __init__(
        self,
        params: Params,
        defaults: dict[str, Any],
        *,
        fp32_optimizer_states: bool = True,
        set_grad_none: bool = True,
    ) -> None:
        self.fp32_optimizer_states = fp32_optimizer_states
        self.set_grad_none = set_grad_none
        super().__init__(params, defaults)

    def formula_of(self, group: Group) -> Formula:
        """Return the formula of this group: the same object for all groups that one call can update."""
        return self.formula.for_group(group)

    def make_states(self, param: Tensor, group: Group) -> dict[str, Tensor]:
        """Return a parameter's states before its first step."""
        return {
            name: torch.full_like(
                param, group.get(self.formula.initial.get(name, ""), 0.0), dtype=self._state_dtype(param)
            )
            for name in self.formula.state_names
        }

    # ---- the interface of torch

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run `closure`, update the parameters that have a gradient, and return what `closure` has returned.

        Errors: RuntimeError with the name of a gradient or parameter that cannot be updated, ValueError for a
        hyper-parameter out of range; then nothing is changed on that device
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        updates: dict[tuple[torch.device, Formula], list[ParameterUpdate]] = {}
        for number, group in enumerate(self.param_groups):
            formula = self.formula_of(group)
            for index, param in enumerate(group["params"]):
                if param.grad is not None:
                    update = self._update(param, group, f"{number}, parameter {index}")
                    updates.setdefault((param.device, formula), []).append(update)
        for (_, formula), chosen in updates.items():
            step_flat(formula, chosen)
            params = [update.param for update in chosen]
            torch.autograd.graph.increment_version(params)  # the kernel's writes are invisible to autograd
            if self.formula.counts_steps:
                torch._foreach_add_([self.state[param]["step"] for param in params], 1.0)
        return loss

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop gradients (None), or set them to zero; the default is the optimizer's `set_grad_none`."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with hyper-parameters of their own; those left out have the constructor's values.

        Errors: ValueError for a hyper-parameter out of range, or an option that is not supported
        """
        super().add_param_group(param_group)
        try:
            self._check(self.param_groups[-1], f"group {len(self.param_groups) - 1}")
        except ValueError:
            self.param_groups.pop()
            raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state_dict of this class or of its counterpart in torch.optim.

        Hyper-parameters that the saved groups lack get the constructor's values.
        Errors: ValueError for an option that is not supported
        """
        seen: dict[str, Any] = state_dict

        def see(_: torch.optim.Optimizer, final: dict[str, Any]) -> None:
            nonlocal seen
            seen = final
            for number, group in enumerate(final["param_groups"]):
                self._check({**self.defaults, **group}, f"group {number} of the state_dict")
            for number, state in final["state"].items():
                missing = [name for name in self.formula.state_names if state and name not in state]
                if missing:
                    raise ValueError(
                        f"{type(self).__name__}: the state_dict has {', '.join(map(str, state))} of "
                        f"parameter {number}, without {' and '.join(missing)}; it is another optimizer's"
                    )

        # registered last, to see the state_dict as the other hooks have left it
        hook = self.register_load_state_dict_pre_hook(see)
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()
        self._restore_dtypes(seen)

    def __getstate__(self) -> dict[str, Any]:
        own = {"fp32_optimizer_states": self.fp32_optimizer_states, "set_grad_none": self.set_grad_none}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            if self.formula.counts_steps:
                for param in group["params"]:
                    if self.state.get(param):
                        count = self.state[param].get("step", group.get("step", 0))
                        self.state[param]["step"] = torch.tensor(
                            as_float(count), dtype=torch.float32, device="cpu"
                        )

    # ---- details

    def _state_dtype(self, param: Tensor) -> torch.dtype:
        return torch.float32 if self.fp32_optimizer_states else param.dtype

    def _update(self, param: Tensor, group: dict[str, Any], where: str) -> ParameterUpdate:
        grad = self._dense(param, group, where)
        self._check_param(param, grad, where)
        state = self.state[param]
        if not state:
            if self.formula.counts_steps:
                state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            state.update(self.make_states(param, group))
        step = int(state["step"]) + 1 if self.formula.counts_steps else 1
        return ParameterUpdate(
            param, grad, {name: state[name] for name in self.formula.state_names}, group, step
        )

    def _dense(self, param: Tensor, group: Mapping[str, Any], where: str) -> Tensor:
        grad = param.grad
        if grad is None:
            raise AssertionError(f"group {where} has no gradient")
        if grad.layout is not torch.strided:
            raise RuntimeError(
                f"{type(self).__name__}: group {where} has a gradient of layout {grad.layout}; it takes "
                "dense ones: leave Embedding(sparse=True) off, or take torch.optim.SparseAdam"
            )
        return grad

    def _check_param(self, param: Tensor, grad: Tensor, where: str) -> None:
        name = type(self).__name__
        for what, tensor in (("is", param), ("has a gradient of", grad)):
            if tensor.dtype not in _DTYPES:
                raise RuntimeError(
                    f"{name}: group {where} {what} {tensor.dtype}; it takes float32, bfloat16 and float16: "
                    "convert the parameter, or take an optimizer of torch.optim"
                )
        if self.host_only and not param.is_cpu:
            raise RuntimeError(
                f"{name}: group {where} is on {param.device}; it updates parameters in host memory: take "
                f"{name.replace('DeepSpeedCPU', 'Fused')}"
            )
        if not param.is_contiguous() and 0 in param.stride():
            raise RuntimeError(
                f"{name}: group {where} is expanded, so several of its elements are one in memory; pass a "
                "clone of it"
            )

    def _check(self, group: Mapping[str, Any], where: str) -> None:
        """Refuse hyper-parameters out of range, and options that are not supported."""
        name = type(self).__name__
        for option, advice in _REFUSED.items():
            if group.get(option):
                raise ValueError(
                    f"{name}: {where} has {option}={group[option]!r}, which {name} does not support; {advice}"
                )
        for option in ("lr", "eps", "weight_decay"):
            if option in self.defaults:
                value = as_float(group[option])
                if not 0.0 <= value < math.inf:
                    raise ValueError(
                        f"{name}: {where} has {option}={value}; it must be finite and at least 0"
                    )
        for value in map(as_float, group.get("betas", ())):
            if not 0.0 <= value < 1.0:
                raise ValueError(
                    f"{name}: {where} has betas={group['betas']}; each must be at least 0 and below 1"
                )

    def _restore_dtypes(self, state_dict: Mapping[str, Any]) -> None:
        """Take the saved values once more in our dtypes: torch has given every state the
        parameter's dtype.
        """
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for number, param in zip(saved, params, strict=True):
            values, state = state_dict["state"].get(number, {}), self.state.get(param, {})
            for name in self.formula.state_names:
                if name in values and isinstance(values[name], Tensor):
                    state[name] = values[name].to(device=param.device, dtype=self._state_dtype(param))
