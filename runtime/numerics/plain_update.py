"""The update of a model that every rank has whole: torch.optim on float32 parameters, with a loss scale and a
clipping of its own.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from ..config.precision import Fp16Config
from ..optimizers.registry import OPTIMIZERS
from ..step.flat_optimizer import FlatOptimizer
from ..step.fused_rule import FusedRule
from .record import STATE, StepRecord

_TORCHS: Mapping[str, type[torch.optim.Optimizer]] = {
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "Adagrad": torch.optim.Adagrad,
    "SGD": torch.optim.SGD,
}


class PlainScale:
    """The factor of losses in float16.

    Source: DeepSpeed 0.19.8 runtime/fp16/loss_scaler.py, written anew from its documentation
    """

    def __init__(self, config: Fp16Config, *, hysteresis: int) -> None:
        self._is_dynamic = config.enabled and config.loss_scale == 0.0
        self._config, self._hysteresis = config, hysteresis
        fixed = config.loss_scale if config.enabled else 1.0
        self.value = 2.0**config.initial_scale_power if self._is_dynamic else fixed
        self._left, self._good_steps = hysteresis, 0

    def update(self, *, is_applied: bool) -> None:
        """Halve it after an overflow, and double it after so many good steps."""
        if not self._is_dynamic:
            return
        if is_applied:
            self._good_steps += 1
            if self._good_steps > 1 and (self._good_steps - 1) % self._config.loss_scale_window == 0:
                self.value, self._left = self.value * 2, self._hysteresis
            return
        self._good_steps = 0
        if self._left > 1:
            self._left -= 1
        else:
            self.value = max(self.value / 2, self._config.min_loss_scale)


class PlainUpdate:
    """Float32 values of the trained parameters, and the optimizer that steps them.

    Learning rates and all other hyper-parameters are those that the program's optimizer has at the time.
    """

    def __init__(self, shown: FlatOptimizer, names: Mapping[int, str]) -> None:
        """`shown` is the optimizer that the program has, and `names` are the parameters' by identity."""
        self._shown = shown
        self.masters: dict[str, Tensor] = {}  # float32
        self.params: dict[str, nn.Parameter] = {}
        groups = []
        for group in shown.param_groups:
            own = [one for one in group["params"] if one.requires_grad]
            for param in own:
                name = names[id(param)]
                self.params[name] = param
                self.masters[name] = param.detach().clone().float().requires_grad_()
            groups.append({**_without_params(group), "params": [self.masters[names[id(one)]] for one in own]})
        self._steppers = _steppers(shown, groups)

    @property
    def is_torchs(self) -> bool:
        """Tell whether the update is a formula of torch's, and not one of dslaunch's."""
        return all(type(one).__module__.startswith("torch.") for one, _ in self._steppers)

    @torch.no_grad()
    def set(self, name: str, value: Tensor) -> None:
        """Let a parameter have this float32 value."""
        self.masters[name].copy_(value)
        self._show(name)

    @torch.no_grad()
    def take_writes(self) -> None:
        """Take over what the program has written to parameters since the last step."""
        for name, param in self.params.items():
            shown = self.masters[name].to(param.dtype)
            if not torch.equal(param, shown):
                self.masters[name].copy_(torch.where(param == shown, self.masters[name], param.float()))

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor], *, clipping: float) -> None:
        """Update all from these gradients, which are clipped first."""
        for name, master in self.masters.items():
            master.grad = gradients[name].to(torch.float32)
        if clipping > 0.0:
            torch.nn.utils.clip_grad_norm_(list(self.masters.values()), clipping)
        for name, param in self.params.items():
            if not param.requires_grad:  # the program has frozen it since
                self.masters[name].grad = None
        for stepper, indices in self._steppers:
            for group, index in zip(stepper.param_groups, indices, strict=True):
                group.update(_without_params(self._shown.param_groups[index]))
            stepper.step()
        for name, master in self.masters.items():
            master.grad = None
            self._show(name)

    def state_of(self, name: str) -> dict[str, Any]:
        """Return the optimizer's states of a parameter."""
        master = self.masters[name]
        return next((one.state[master] for one, _ in self._steppers if master in one.state), {})

    @torch.no_grad()
    def take_states(self, record: StepRecord, num_steps: int) -> None:
        """Go on with states that were recorded, after so many steps."""
        for stepper, _ in self._steppers:
            for group in stepper.param_groups:
                for master in group["params"]:
                    stepper.state[master] = (
                        {"step": torch.tensor(float(num_steps), device="cpu")} if num_steps else {}
                    )
        for key in record.names(STATE):
            state, _, name = key.partition("/")
            if name in self.masters:
                value = record.read(STATE, key).to(self.masters[name])
                self.state_of(name)[state] = value

    def states(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the states that have a number for each element, as STATE/NAME."""
        for stepper, _ in self._steppers:
            for name, master in self.masters.items():
                for state, value in stepper.state.get(master, {}).items():
                    if isinstance(value, Tensor) and value.shape == master.shape and value.dim():
                        yield f"{state}/{name}", value

    def _show(self, name: str) -> None:
        self.params[name].data.copy_(self.masters[name])


def norm_of(gradients: Mapping[str, Tensor]) -> float:
    """Return the norm of all elements together."""
    squares = sum(float(one.double().square().sum()) for one in gradients.values())
    return float(squares) ** 0.5 if isfinite(squares) else squares


def _without_params(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def _steppers(
    shown: FlatOptimizer, groups: list[dict[str, Any]]
) -> list[tuple[torch.optim.Optimizer, list[int]]]:
    """Return the optimizers that step the groups, each with the indices of its groups."""
    filled = [index for index, group in enumerate(groups) if group["params"]]
    if isinstance(shown.rule, FusedRule):
        return [(_fused(shown, [groups[index] for index in filled]), filled)]
    client = shown._client
    if client is not None:
        stepper = copy.copy(client)
        vars(stepper).pop("step", None)  # a scheduler's, which is bound to the client
        stepper.state = defaultdict(dict)
        stepper.param_groups = [groups[index] for index in filled]
        return [(stepper, filled)]
    steppers: list[tuple[torch.optim.Optimizer, list[int]]] = []
    for is_muon, kind in ((True, torch.optim.Muon), (False, torch.optim.AdamW)):
        indices = [index for index in filled if groups[index].get("use_muon") is is_muon]
        if indices:
            steppers.append((_made(kind, [groups[index] for index in indices]), indices))
    return steppers


def _fused(shown: FlatOptimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return torch's optimizer of the formula; dslaunch's own class where torch has none."""
    name = shown.rule.name
    corrects = all(group.get("bias_correction", True) for group in groups)
    if name in _TORCHS and corrects:
        return _made(_TORCHS[name], groups)
    row = next(row for row in OPTIMIZERS if name in row.names)
    made: type[torch.optim.Optimizer] = row.load(row.config_class or row.classes[0])
    return _made(made, groups)


def _made(kind: type[torch.optim.Optimizer], groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return kind([dict(group) for group in groups])  # type: ignore[call-arg]
