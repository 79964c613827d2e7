"""Check that the hyper-parameters of a step can be used, and are the same on all ranks: at every step,
before anything changes.

Schedulers and programs set hyper-parameters on each rank separately. If they differ, as with a scheduler that
follows each rank's own loss, replicas would drift apart, or shards get different learning rates.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Sequence
from math import isfinite
from numbers import Real
from typing import Any
from zlib import crc32

from torch import Tensor

from ..comm.rank_group import Job
from ..errors import ConfigError
from ..step.flat_optimizer import FlatOptimizer
from ..step.fused_rule import FusedRule

_SEGMENT = re.compile(r".*segments\[(\d+)\]\.(.*)", re.DOTALL)  # the kernels' name of a segment


class HyperParameters:
    """Numbers among the hyper-parameters of one optimizer's groups, and the largest norm of the gradients."""

    def __init__(self, optimizer: FlatOptimizer, job: Job) -> None:
        self._optimizer, self._job = optimizer, job
        self._rates: list[Any] = []  # the groups' lr
        self._others: list[float] = []
        self._complaint = ""
        self.note = 0.0

    def look(self) -> None:
        """Read the values when a step begins; `note` is then a number that is equal on ranks with equal
        values.
        """
        rates, others = self._read()
        is_new = others != self._others
        if not is_new and rates == self._rates and not self._complaint:
            return
        self._rates, self._others = rates, others
        self._complaint = self._about_rates() or (self._about_others() if is_new or self._complaint else "")
        numbers = array("d", [*(_digestible(rate) for rate in rates), *others])
        self.note = float(crc32(self._complaint.encode(), crc32(numbers.tobytes())))

    def settle(self, notes: Sequence[float]) -> None:
        """Let the step go on if all ranks have the same, usable values; `notes` are the notes of all ranks.

        Order:  a collective, if they differ
        Errors: ConfigError, on all ranks
        """
        if len(set(notes)) == 1:
            if self._complaint:
                raise ConfigError(self._complaint)
            return
        own = (self._complaint, dict(self._by_name()))
        everywhere = self._job.all_gather_objects(own, what="the hyper-parameters of the step")
        for complaint, _ in everywhere:
            if complaint:
                raise ConfigError(complaint)
        first = everywhere[0][1]
        for rank, (_, values) in enumerate(everywhere):
            differing = [name for name in {**first, **values} if first.get(name) != values.get(name)]
            if differing:
                name = differing[0]
                if None in (first.get(name), values.get(name)):
                    raise ConfigError(
                        f"rank {rank} and rank 0 have other groups in their optimizers: {name} is there on "
                        f"rank {0 if name in first else rank} alone; make the same groups on all ranks, also "
                        'those of which a stage has no parameter: {"params": [], ...}'
                    )
                raise ConfigError(
                    f"rank {rank} and rank 0 would take this step with different hyper-parameters: {name} is "
                    f"{values.get(name)} on rank {rank} and {first.get(name)} on rank 0; set the same on all "
                    "ranks, and give a scheduler that follows a metric the mean over all ranks"
                )

    def _read(self) -> tuple[list[Any], list[float]]:
        """Return the learning rates, and all other numbers; it runs in each step, however many groups there
        are.
        """
        rates: list[Any] = []
        others: list[float] = [self._optimizer.clip_grad or 0.0]
        for group in self._optimizer.param_groups:
            for key, value in group.items():
                if key == "lr":
                    rates.append(value if isinstance(value, float) else _rate(value))
                elif isinstance(value, int | float):
                    others.append(value)
                elif key != "params":
                    others += _numbers(value)
        return rates, others

    def _by_name(self) -> Iterator[tuple[str, Any]]:
        yield "gradient_clipping", self._optimizer.clip_grad or 0.0
        for index, group in enumerate(self._optimizer.param_groups):
            for key, value in group.items():
                numbers = [] if key == "params" else _numbers(value)
                if numbers:
                    yield f"param_groups[{index}][{key!r}]", numbers if len(numbers) > 1 else numbers[0]

    def _about_rates(self) -> str:
        """Describe what is wrong with the rates, and what to do."""
        lowest = 0.0 if isinstance(self._optimizer.rule, FusedRule) else float("-inf")
        for index, rate in enumerate(self._rates):
            if not isinstance(rate, float) or not isfinite(rate) or rate < lowest:
                must = "a finite number" + (", and >= 0" if lowest == 0.0 else "")
                return _wrong(index, f"lr: {rate!r}; must be {must}")
        return ""

    def _about_others(self) -> str:
        groups, rule = self._optimizer.param_groups, self._optimizer.rule
        for index, group in enumerate(groups):
            for key, value in group.items():
                if key not in ("lr", "params") and any(number != number for number in _numbers(value)):
                    return _wrong(index, f"{key}: {value}; must be a number")
        if isinstance(rule, FusedRule):
            try:
                rule.check(groups)
            except ValueError as error:
                match = _SEGMENT.match(str(error))
                return _wrong(int(match[1]), match[2]) if match else str(error)
        return ""


def _wrong(index: int, what: str) -> str:
    return f"param_groups[{index}] of the optimizer: {what}; set it before engine.step()"


def _rate(value: Any) -> Any:
    """Return a learning rate as a float, because torch allows tensors and schedulers compute with NumPy. A
    value that is no number is returned as it is.
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value.item())
    return float(value) if isinstance(value, Real) else value


def _numbers(value: Any) -> list[float]:
    """Return the numbers in a hyper-parameter."""
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, Real):
        return [float(value)]
    if isinstance(value, tuple | list):
        return [number for one in value for number in _numbers(one)]
    return []


def _digestible(rate: Any) -> float:
    return rate if isinstance(rate, float) else 0.0
