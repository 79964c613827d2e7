"""Configurations that a job could have: stage, offload and micro batch, each with a bound of its memory.

The samples of a step stay the same: a smaller micro batch has more steps of accumulation. A bound is what the
parts need that a rank surely has; what a rehearsal finds is never less. Arithmetic only.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .answer import DEVICE, Answer
from .verdict import OUTSIDE_BYTES

_SUM_BYTES = 4  # shards of gradients are added up in float32
ACTIVATIONS = "activations"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placing:
    """The ZeRO stage, and what of it lies in host memory."""

    stage: int
    has_optimizer_on_host: bool = False
    has_parameters_on_host: bool = False

    @property
    def text(self) -> str:
        """Return it in words: "stage 3, optimizer and parameters on cpu"."""
        parts = [
            *(["optimizer"] if self.has_optimizer_on_host else []),
            *(["parameters"] if self.has_parameters_on_host else []),
        ]
        return f"stage {self.stage}" + (f", {' and '.join(parts)} on cpu" if parts else "")


# The fastest first, where more than one fits: each sends or copies more than the one before.
PLACINGS = (
    Placing(stage=1),
    Placing(stage=2),
    Placing(stage=3),
    Placing(stage=2, has_optimizer_on_host=True),
    Placing(stage=3, has_optimizer_on_host=True),
    Placing(stage=3, has_optimizer_on_host=True, has_parameters_on_host=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A configuration. `num_micro_batches` are those of a rank in one step."""

    placing: Placing
    micro_batch_size: int
    num_micro_batches: int

    @property
    def text(self) -> str:
        """Return it in words: "stage 2, micro batch 8 x 4"."""
        return f"{self.placing.text}, micro batch {self.micro_batch_size} x {self.num_micro_batches}"

    def config(self, base: Mapping[str, Any]) -> dict[str, Any]:
        """Return the ds_config with this configuration."""
        made = copy.deepcopy(dict(base))
        made["train_micro_batch_size_per_gpu"] = self.micro_batch_size
        made["gradient_accumulation_steps"] = self.num_micro_batches
        zero = dict(made.get("zero_optimization") or {})
        zero["stage"] = self.placing.stage
        for key, is_on_host in (
            ("offload_optimizer", self.placing.has_optimizer_on_host),
            ("offload_param", self.placing.has_parameters_on_host),
        ):
            if not is_on_host:
                zero.pop(key, None)
            elif not isinstance(zero.get(key), dict) or zero[key].get("device") == "none":
                zero[key] = {"device": "cpu", "pin_memory": True}
        made["zero_optimization"] = zero
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelBytes:
    """Sizes of a model, as its rehearsal told them, for bounds."""

    num_trained: int
    num_frozen: int
    number_bytes: int  # a parameter's
    activation_bytes: int  # what one sample in a micro batch adds
    micro_batch_size: int
    num_micro_batches: int

    @property
    def num_samples(self) -> int:
        """Return the samples of a rank in one step."""
        return self.micro_batch_size * self.num_micro_batches

    def bound(self, placing: Placing, micro_batch_size: int, *, num_ranks: int) -> int:
        """Return the bytes of a GPU that are needed at least, with what is outside of torch."""
        trained, whole = self.num_trained, self.num_trained + self.num_frozen
        params = 0 if placing.has_parameters_on_host else whole * self.number_bytes
        params //= num_ranks if placing.stage == 3 else 1
        grads = trained * self.number_bytes if placing.stage < 2 else trained * _SUM_BYTES // num_ranks
        states = trained * (12 if self.number_bytes < 4 else 8) // (num_ranks if placing.stage else 1)
        if placing.has_optimizer_on_host:
            states, grads = 0, grads if placing.stage < 2 else 0
        return params + grads + states + micro_batch_size * self.activation_bytes + OUTSIDE_BYTES

    def candidates(
        self, *, num_ranks: int, limit_bytes: int, has_stages: bool
    ) -> Iterator[tuple[Placing, tuple[Candidate, ...]]]:
        """Yield each placing with the micro batches whose bound is below the limit, the largest first.

        `has_stages`: the model is a pipeline, whose ZeRO stage is 1 at most.
        """
        for placing in PLACINGS:
            if has_stages and placing.stage > 1:
                continue
            yield (
                placing,
                tuple(
                    self.of_size(placing, size)
                    for size in _divisors(self.num_samples)
                    if self.bound(placing, size, num_ranks=num_ranks) <= limit_bytes
                ),
            )

    def of_size(self, placing: Placing, size: int) -> Candidate:
        """Return the candidate of this micro batch."""
        return Candidate(placing=placing, micro_batch_size=size, num_micro_batches=self.num_samples // size)

    def hosts_needed(self, *, ranks_per_host: int, limit_bytes: int, most: int = 4096) -> int | None:
        """Return the number of hosts from which the bound of stage 3 with the smallest micro batch is below
        the limit; None if it never is.
        """
        for num_hosts in range(1, most + 1):
            if self.bound(Placing(stage=3), 1, num_ranks=num_hosts * ranks_per_host) <= limit_bytes:
                return num_hosts
        return None


def model_bytes(answer: Answer, config: Mapping[str, Any], *, place: str = DEVICE) -> ModelBytes:
    """Return the sizes of the model that was rehearsed with this ds_config; its ranks compute in `place`."""
    sizes = dict(answer.model)
    is_half = any((config.get(name) or {}).get("enabled") for name in ("bf16", "bfloat16", "fp16"))
    worst = answer.worst(place)
    activations = dict(worst.peak(place).kinds).get(ACTIVATIONS, 0) if worst is not None else 0
    micro_batch_size = max(1, sizes.get("micro_batch_size", 1))
    return ModelBytes(
        num_trained=sizes.get("num_trained", 0),
        num_frozen=sizes.get("num_frozen", 0),
        number_bytes=2 if is_half else 4,
        activation_bytes=activations // micro_batch_size,
        micro_batch_size=micro_batch_size,
        num_micro_batches=max(1, sizes.get("num_micro_batches", 1)),
    )


def smaller(
    candidates: tuple[Candidate, ...],
    tried: Candidate,
    answer: Answer,
    limit_bytes: int,
    *,
    place: str = DEVICE,
) -> Candidate | None:
    """Return the largest candidate that should fit, after one was tried and did not; None if none should."""
    worst = answer.worst(place)
    if worst is None:
        return None
    peak = worst.peak(place)
    activations = dict(peak.kinds).get(ACTIVATIONS, 0)
    room = limit_bytes - OUTSIDE_BYTES - (peak.num_bytes - activations)
    fitting = [
        one
        for one in candidates
        if one.micro_batch_size < tried.micro_batch_size
        and activations * one.micro_batch_size <= room * tried.micro_batch_size
    ]
    return fitting[0] if fitting else None


def _divisors(number: int) -> list[int]:
    """Return the divisors of a number, the largest first."""
    return [one for one in range(number, 0, -1) if number % one == 0]
