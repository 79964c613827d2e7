"""Learning rate schedules, equal to DeepSpeed's step by step.

[Note: two steps at the first rate]
t is `last_batch_iteration`, -1 at first; each step() adds 1. The constructor already sets the rates
for t = -1, and the first step() those for t = 0. A trainer calls step() after the optimizer's step, so
the first optimizer step uses the rates of t = -1 and the second those of t = 0. For the warm-ups both
are the lowest rate.

Source: DeepSpeed 0.19.6 runtime/lr_schedules.py; traces of it are the tests.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from inspect import Parameter, Signature
from typing import Any, ClassVar, Protocol, cast

import torch

from ..config.keys.value import show
from ..config.scheduler import (
    WARMUP_TYPES,
    LRRangeTestParams,
    OneCycleParams,
    SchedulerConfig,
    TorchSchedulerParams,
    WarmupCosineParams,
    WarmupDecayParams,
    WarmupParams,
)
from ..config.section import Section, read_section
from ..config.torch_scheduler import torch_scheduler
from ..errors import ConfigError

_log = logging.getLogger("dslaunch")


class Scheduler(Protocol):
    """Methods that the engine calls on a scheduler; those of torch fit too."""

    def step(self, last_batch_iteration: int | None = None, /) -> None: ...
    def get_lr(self) -> list[float]: ...
    def get_last_lr(self) -> list[float]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> None: ...


def check_metric(scheduler: object, lr_kwargs: Mapping[str, Any]) -> None:
    """Check, before a step changes anything, that a scheduler that follows a metric gets one.

    Errors: ConfigError if it gets none
    """
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) and "metrics" not in lr_kwargs:
        raise ConfigError(
            "lr_scheduler ReduceLROnPlateau follows a metric, and engine.step() was given none; write "
            'engine.step(lr_kwargs={"metrics": loss}), or give initialize() no lr_scheduler and call '
            "scheduler.step(loss) when the metric is known"
        )


@cache
def _signature_of(kind: type[Section]) -> Signature:
    """Return the arguments of a schedule with these parameters, which are DeepSpeed's in their order."""
    ways = Parameter.POSITIONAL_OR_KEYWORD
    fields = {
        name: Parameter.empty if field.is_required() else field.default
        for name, field in kind.model_fields.items()
    }
    return Signature(
        [Parameter("optimizer", ways), *(Parameter(name, ways, default=fields[name]) for name in fields)]
    )


class _Schedule:
    """A schedule that is a function of t alone. See [Note: two steps at the first rate].

    Its arguments are an optimizer and the values of the fields of `_kind`, in their order or by name.
    """

    _kind: ClassVar[type[Section]]

    def __init_subclass__(cls) -> None:
        if "_kind" in vars(cls):
            cls.__signature__ = _signature_of(cls._kind)  # type: ignore[attr-defined]
        elif "__init__" in vars(cls):
            cls.__signature__ = None  # type: ignore[attr-defined]  # its own arguments are read from __init__

    def __init__(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        """Errors: TypeError for other arguments; ConfigError with a line for each that is wrong"""
        given = _signature_of(self._kind).bind(optimizer, *args, **kwargs).arguments
        self.optimizer = given.pop("optimizer")
        params = _checked(self._kind, type(self).__name__, given)
        self._take(params)
        self.last_batch_iteration: int = params.last_batch_iteration
        if self.last_batch_iteration == -1:
            self._set()

    def _take(self, params: Any) -> None:
        """Compute the constants from the parameters of `_kind`."""
        raise NotImplementedError

    def get_lr(self) -> list[float]:
        """The rate of each parameter group at t."""
        raise NotImplementedError

    def get_last_lr(self) -> list[float]:
        """Return the rates that the optimizer has now."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go to t + 1, or to the t that is given, and set the rates of that t."""
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )
        self._set()

    def state_dict(self) -> dict[str, Any]:
        """Return t, from which everything else follows."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to the t of `state_dict` and set its rates."""
        self.step(state_dict["last_batch_iteration"])

    def _set(self) -> None:
        for group, lr in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            if isinstance(group["lr"], torch.Tensor):
                # in place: a compiled or captured step keeps a reference to this tensor
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def _per_group(self, name: str, value: float | tuple[float, ...]) -> list[float]:
        """Return one rate for each group, from one for all or from a list."""
        num_groups = len(self.optimizer.param_groups)
        if not isinstance(value, tuple):
            return [value] * num_groups
        if len(value) != num_groups:
            raise ConfigError(
                f"scheduler.params.{name} {show(value)} has {len(value)} numbers, the optimizer has "
                f"{num_groups} parameter groups; write one number, or one for each group"
            )
        return list(value)


def _checked(kind: type[Section], name: str, given: Mapping[str, Any]) -> Any:
    """Return a scheduler's parameters, which a program may have given it without a ds_config.

    Errors: ConfigError with one line for each that is wrong
    """
    values = dict(given)
    if "warmup_type" in values:
        values["warmup_type"] = _known_warmup_type(values["warmup_type"], name)
    problems: dict[str, str] = {}
    params = read_section(kind, values, path=name, problems=problems)
    if params is None:
        raise ConfigError("\n".join(problems.values()))
    return params


def _known_warmup_type(given: object, name: str) -> str:
    """Return the form of a warm-up that a program has given as an argument; an unknown form is reported and
    counts as "log".

    Source: DeepSpeed 0.19.8 runtime/lr_schedules.py, where upper and lower case matter, too
    """
    if given in WARMUP_TYPES:
        return str(given)
    _log.warning(
        '%s.warmup_type %s is unknown and counts as "log", as in DeepSpeed; write "log" or "linear"',
        name,
        show(given),
    )
    return "log"


def _warmup_progress(t: int, *, num_steps: int, warmup_type: str) -> float:
    """Return the progress of the warm-up at t, from 0 to 1; 0 <= t < num_steps."""
    return math.log(t + 1) / math.log(num_steps) if warmup_type == "log" else t / num_steps


class WarmupLR(_Schedule):
    """From warmup_min_lr up to warmup_max_lr, then level.

    A warmup_max_lr that is left out is each group's own rate. (DeepSpeed gives every group the first one's.)
    """

    _kind: ClassVar[type[Section]] = WarmupParams

    def _take(self, params: WarmupParams | WarmupDecayParams) -> None:
        self.min_lrs = self._per_group("warmup_min_lr", params.warmup_min_lr)
        self.max_lrs = (
            self.get_last_lr()
            if params.warmup_max_lr is None
            else self._per_group("warmup_max_lr", params.warmup_max_lr)
        )
        self.warmup_num_steps = max(2, params.warmup_num_steps)  # log(1) would divide by 0
        self.warmup_type = params.warmup_type

    def get_lr(self) -> list[float]:
        """The rate of each parameter group at t."""
        t = self.last_batch_iteration
        if t < 0:
            return list(self.min_lrs)
        progress = (
            _warmup_progress(t, num_steps=self.warmup_num_steps, warmup_type=self.warmup_type)
            if t < self.warmup_num_steps
            else self._after_warmup(t)
        )
        return [low + (high - low) * progress for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def _after_warmup(self, t: int) -> float:
        return 1.0


class WarmupDecayLR(WarmupLR):
    """Warm-up as WarmupLR, then down in a straight line: warmup_min_lr is reached at total_num_steps."""

    _kind = WarmupDecayParams

    def _take(self, params: Any) -> None:
        super()._take(params)
        self.total_num_steps: int = params.total_num_steps
        _warn_if_shorter(self.total_num_steps, self.warmup_num_steps)

    def _after_warmup(self, t: int) -> float:
        return max(0.0, (self.total_num_steps - t) / max(1, self.total_num_steps - self.warmup_num_steps))


class WarmupCosineLR(_Schedule):
    """Warm-up to each group's own rate, then half a cosine down to cos_min_ratio of it.

    The first rate after the warm-up is already one step down, and the rate at t = -1 is 0 even where
    warmup_min_ratio is above 0; both as in DeepSpeed.
    """

    _kind = WarmupCosineParams

    def _take(self, params: WarmupCosineParams) -> None:
        self.base_lrs = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.total_num_steps = params.total_num_steps
        self.warmup_num_steps = max(2, params.warmup_num_steps)
        self.warmup_type = params.warmup_type
        self.warmup_min_ratio = params.warmup_min_ratio
        self.cos_min_ratio = params.cos_min_ratio
        _warn_if_shorter(self.total_num_steps, self.warmup_num_steps)

    def get_lr(self) -> list[float]:
        """The rate of each parameter group at t."""
        ratio = self.get_lr_ratio()
        return [lr * ratio for lr in self.base_lrs]

    def get_lr_ratio(self) -> float:
        """Return the fraction of its own rate that each parameter group has at t."""
        t = self.last_batch_iteration
        if t < 0:
            return 0.0
        if t < self.warmup_num_steps:
            progress = _warmup_progress(t, num_steps=self.warmup_num_steps, warmup_type=self.warmup_type)
            return self.warmup_min_ratio + (1 - self.warmup_min_ratio) * progress
        num_decay_steps = max(1, self.total_num_steps - self.warmup_num_steps)
        progress = min(1.0, (t - self.warmup_num_steps + 1) / num_decay_steps)
        return self.cos_min_ratio + (1 - self.cos_min_ratio) * (1 + math.cos(math.pi * progress)) / 2


class OneCycle(_Schedule):
    """Up from cycle_min_lr to cycle_max_lr and back, then decay; the first beta moves the other way.

    The second beta becomes 0.99 and the first starts at cycle_min_mom, as in DeepSpeed.
    Source: Smith 2018, "A disciplined approach to neural network hyper-parameters", arXiv 1803.09820.
    """

    _SECOND_BETA = 0.99

    _kind = OneCycleParams

    def _take(self, params: OneCycleParams) -> None:
        self.params = params
        self.min_lrs = self._per_group("cycle_min_lr", params.cycle_min_lr)
        self.max_lrs = self._per_group("cycle_max_lr", params.cycle_max_lr)
        self.min_moms = self._per_group("cycle_min_mom", params.cycle_min_mom)
        self.max_moms = self._per_group("cycle_max_mom", params.cycle_max_mom)
        self.first_size = params.cycle_first_step_size
        self.second_size = (
            self.first_size if params.cycle_second_step_size is None else params.cycle_second_step_size
        )
        self.first_stairs = params.cycle_first_stair_count
        self.second_stairs = (
            self.first_stairs if params.cycle_second_stair_count is None else params.cycle_second_stair_count
        )
        self.has_momentum = params.cycle_momentum and "betas" in self.optimizer.defaults
        if params.cycle_momentum and not self.has_momentum:
            _log.warning(
                "scheduler.params.cycle_momentum true has no effect: %s has no betas; write false",
                type(self.optimizer).__name__,
            )

    @property
    def step_ratio(self) -> float:
        """Return the fraction of a cycle in which the rate rises."""
        return self.first_size / (self.first_size + self.second_size)

    def _height(self, b: int) -> float:
        """Return the place of step b in the cycle: 0 at its ends, 1 at its top.

        With stairs several steps have the same height.
        """
        within = b % (self.first_size + self.second_size)
        if within <= self.first_size:
            steps, size, stairs = within, self.first_size, self.first_stairs
        else:
            steps, size, stairs = (
                self.first_size + self.second_size - within,
                self.second_size,
                self.second_stairs,
            )
        return (
            steps * stairs // size / stairs if stairs else steps / size
        )  # whole numbers: no stair is missed

    def _decay_steps(self) -> int:
        """Return the number of steps since the cycle ended; 0 or below inside the cycle."""
        return self.last_batch_iteration + 1 - self.first_size - self.second_size

    def _decay(self, rate: float) -> float:
        """Return the factor of decay for this decay `rate`; 1 if decay is off."""
        size = self.params.decay_step_size
        return 1 + rate * self._decay_steps() / size if size else 1.0

    def get_lr(self) -> list[float]:
        """The rate of each parameter group at t."""
        if self._decay_steps() > 0:
            return [low / self._decay(self.params.decay_lr_rate) for low in self.min_lrs]
        height = self._height(self.last_batch_iteration + 1)
        return [low + (high - low) * height for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Return the betas of each parameter group at t; None if the momentum is not changed."""
        if not self.has_momentum:
            return None
        if self._decay_steps() > 0:
            moms = [high * self._decay(self.params.decay_mom_rate) for high in self.max_moms]
        else:
            height = self._height(self.last_batch_iteration + 1)
            moms = [
                high - (high - low) * height for low, high in zip(self.min_moms, self.max_moms, strict=True)
            ]
        return [(momentum, self._SECOND_BETA) for momentum in moms]

    def _set(self) -> None:
        super()._set()
        betas = self.get_mom()
        if betas is None:
            return
        if (
            self.last_batch_iteration < 0
        ):  # get_mom() says what the cycle has there, which is not what it begins with
            betas = [(momentum, self._SECOND_BETA) for momentum in self.min_moms]
        for group, pair in zip(self.optimizer.param_groups, betas, strict=True):
            group["betas"] = pair


class LRRangeTest(_Schedule):
    """A rate that grows from lr_range_test_min_lr without end, to see where training breaks."""

    _kind = LRRangeTestParams

    def _take(self, params: LRRangeTestParams) -> None:
        self.params = params
        self.min_lrs = self._per_group("lr_range_test_min_lr", params.lr_range_test_min_lr)

    def get_lr(self) -> list[float]:
        """The rate of each parameter group at t."""
        steps, size = self.last_batch_iteration + 1, self.params.lr_range_test_step_size
        interval = steps // size if self.params.lr_range_test_staircase else steps / size
        return [lr * (1 + self.params.lr_range_test_step_rate * interval) for lr in self.min_lrs]


def _warn_if_shorter(total_num_steps: int, warmup_num_steps: int) -> None:
    if total_num_steps < warmup_num_steps:
        _log.warning(
            "scheduler.params.total_num_steps %d is below warmup_num_steps %d: the warm-up lasts "
            "longer than training",
            total_num_steps,
            warmup_num_steps,
        )


def _make_torch_scheduler(
    name: str, params: Iterable[tuple[str, Any]], optimizer: torch.optim.Optimizer
) -> Scheduler:
    kind = torch_scheduler(name)
    if kind is None:
        raise AssertionError(f"{name} is no scheduler of torch, which the config should have refused")
    try:
        return cast(Scheduler, kind(optimizer, **dict(params)))
    except (TypeError, ValueError, KeyError, ZeroDivisionError) as error:
        given = (
            ", ".join(f"scheduler.params.{key} {show(value)}" for key, value in params) or "scheduler.params"
        )
        raise ConfigError(f"{given}: torch.optim.lr_scheduler.{name} does not take this: {error}") from error


def make_scheduler(config: SchedulerConfig, optimizer: torch.optim.Optimizer) -> Scheduler:
    """Return the scheduler that `config` names, with the optimizer's rates set for the first step.

    Errors: ConfigError if its parameters do not fit this optimizer, or torch refuses them.
    """
    params = config.params
    if isinstance(params, TorchSchedulerParams):
        return _make_torch_scheduler(config.type, list((params.model_extra or {}).items()), optimizer)
    return _OURS[config.type](optimizer, **params.model_dump())


_OURS: dict[str, Callable[..., Scheduler]] = {
    kind.__name__: kind for kind in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
}
