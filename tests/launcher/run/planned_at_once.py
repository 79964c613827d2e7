"""Rehearsals that are answered at once: those of a small model on hosts without GPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dslaunch.launcher.fit.answer import Answer
from dslaunch.launcher.fit.model import ds_config_of, read_ds_config
from dslaunch.launcher.fit.rehearse import Variant
from dslaunch.launcher.job.plan import Plan
from dslaunch.launcher.run import plan_job, search_job
from tests.launcher.fit.answers import answer, peak


def answer_at_once(replace: Callable[[object, str, object], None]) -> None:
    """Put the answers in place of the rehearsals. `replace`: monkeypatch.setattr."""
    replace(plan_job, "rehearse", _rehearse)
    replace(search_job, "rehearse_variants", _rehearse_variants)


def _rehearse(plan: Plan, kinds: Sequence[object], *_: object, **__: object) -> tuple[Answer, ...]:
    config = read_ds_config(ds_config_of(plan.program.arguments), plan.cwd)
    return tuple(_answer(config) for _ in kinds)


def _rehearse_variants(variants: Sequence[Variant], *_: object, **__: object) -> list[tuple[Answer, ...]]:
    return [tuple(_answer(variant.config or {}) for _ in variant.kinds) for variant in variants]


def _answer(config: Mapping[str, Any]) -> Answer:
    size = config["train_micro_batch_size_per_gpu"]
    step = {"name": "step 2: backward", "clock": 9, "peaks": {"host": peak(parameters=1, activations=size)}}
    model = {
        "num_trained": 2**28,
        "num_frozen": 0,
        "stage": config["zero_optimization"]["stage"],
        "micro_batch_size": size,
        "num_micro_batches": config["gradient_accumulation_steps"],
    }
    return answer(phases=[step], curve=[], model=model)
