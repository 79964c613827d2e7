"""Every key of a ds_config with values that no user means: each gives a config that trains, or a
ConfigError that names the key.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dslaunch
from dslaunch.runtime.config import load_config
from dslaunch.runtime.config.key_table import KEYS
from dslaunch.runtime.errors import ConfigError
from tests.runtime.ranks import process_group

BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
    "zero_optimization": {"stage": 2},
}
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 3, 2000, 10**400, -(10**400), 0.5, 1e-320, 1e308, math.nan, math.inf,
    -math.inf,
    "", "auto", "none", "cpu", "true", "1", "1e400", "\x00", "a\x1b[31m\n", "\ud800", "x" * 5000,
    [], {}, [[]], [1, "a", None], [1] * 1000, {"enabled": True}, {"": {}}, {"a\nb": {"c": [{}]}},
)  # fmt: skip
NAMES = ("", "\x01", "a.b", "ENABLED", "stagee", "x" * 300, "__class__", "\u202e")
QUICK = 400  # of the mutations, in `make test`
QUICK_STARTS = 40
AMOUNTS = [pytest.param(True, id="some"), pytest.param(False, id="all", marks=pytest.mark.exhaustive)]
STARTS = [
    pytest.param(8 * QUICK_STARTS, id="some"),
    pytest.param(60 * QUICK_STARTS, id="many", marks=pytest.mark.exhaustive),
]

Mutation = tuple[str, Any]  # a path, and what stands there
FOUND: tuple[Mutation, ...] = (  # those that once ended in another error
    ("scheduler.type", [[]]),
    ("fp16.initial_scale_power", 2000),
    ("gradient_accumulation_steps", 10**63),
)


def _mutations() -> Iterator[Mutation]:
    paths = sorted({key.path for key in KEYS})
    sections = sorted({path.rpartition(".")[0] for path in paths})
    for path in (*paths, *filter(None, sections)):
        yield from ((path, value) for value in VALUES)
    for section in sections:
        yield from ((f"{section}.{name}" if section else name, 1) for name in NAMES)


def _some(amount: int, is_quick: bool) -> list[Mutation]:
    found = list(_mutations())
    return [*FOUND, *random.Random(0).sample(found, amount)] if is_quick else found


def _mutated(path: str, value: Any) -> dict[str, Any]:
    config = copy.deepcopy(BASE)
    *sections, last = path.split(".")
    inner = config
    for section in sections:
        inner = inner.setdefault(section, {})
    inner[last] = value
    return config


def _check_words(error: ConfigError, path: str) -> None:
    text = str(error)
    assert all(one.isprintable() or one == "\n" for one in text), text
    assert len(text) < 20_000
    section = path.split(".")[0]
    assert (section.isprintable() and section in text) or not section.isprintable(), text  # fmt: skip
    assert text.strip().count(" ") >= 3, text  # a sentence


@pytest.mark.slow
@pytest.mark.parametrize("is_quick", AMOUNTS)
def test_a_mutated_config_is_read_or_refused_by_name(is_quick: bool) -> None:
    num_refused = 0
    for path, value in (all_of := _some(QUICK, is_quick)):
        for is_lenient in (False, True):
            try:
                load_config(_mutated(path, value), world_size=2, is_lenient=is_lenient)
            except ConfigError as error:
                num_refused += 1
                _check_words(error, path)
            except Exception as error:
                raise AssertionError(f"{path}: {value!r:.100}: {type(error).__name__}: {error}") from error
    assert len(all_of) / 4 < num_refused < 2 * len(all_of)


@pytest.mark.slow
@pytest.mark.parametrize("amount", STARTS)
def test_a_mutated_config_that_is_read_makes_an_engine_that_steps_or_is_refused(
    amount: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")  # it asks for a key of the account otherwise
    num_steps = 0
    with process_group(0, 1, str(tmp_path / "store")):
        for path, value in _some(amount, is_quick=True):
            config = _mutated(path, value)
            try:
                load_config(config, world_size=1)
            except ConfigError:
                continue
            try:
                num_steps += _step(config)
            except ConfigError as error:
                _check_words(error, path)
            except Exception as error:
                raise AssertionError(f"{path}: {value!r:.100}: {type(error).__name__}: {error}") from error
    assert num_steps >= QUICK_STARTS / 2


def _step(config: dict[str, Any]) -> int:
    model = nn.Linear(3, 2)
    engine = dslaunch.initialize(model=model, config=config)[0]
    try:
        engine.backward(engine(torch.ones(1, 3, dtype=model.weight.dtype)).float().sum())
        engine.step()
    finally:
        engine.destroy()
    return 1
