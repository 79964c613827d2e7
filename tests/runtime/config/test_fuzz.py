"""Whatever a config holds, loading it gives a Config or a ConfigError, never anything else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings, strategies as st

from dslaunch.runtime.config import Config, load_config
from dslaunch.runtime.config.key_table import KEYS
from dslaunch.runtime.errors import ConfigError

NAMES = sorted({part for key in KEYS for part in key.path.split(".")})
TYPES = [
    "Adam",
    "AdamW",
    "SGD",
    "Muon",
    "Lamb",
    "WarmupLR",
    "WarmupDecayLR",
    "OneCycle",
    "LRRangeTest",
    "StepLR",
    "LambdaLR",
]

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from([*TYPES, "auto", "none", "cpu", "log", 0, 1, -1, 1e400, 10**400, 5e8])
)
names = st.sampled_from(NAMES) | st.sampled_from([key.path for key in KEYS]) | st.text(max_size=5)
trees = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=5),
    max_leaves=20,
)


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """Known keys at their places with any values, so that the deep rules are reached too."""
    values: dict[str, Any] = draw(st.dictionaries(names, trees, max_size=3))
    for key in draw(st.lists(st.sampled_from(KEYS), max_size=8)):
        *sections, last = key.path.split(".")
        inner = values
        for section in sections:
            inner = inner.setdefault(section, {})
            if not isinstance(inner, dict):
                break
        else:
            inner[last] = draw(scalars | trees)
    return values


def read(source: Any, *, is_lenient: bool) -> Config | None:
    try:
        config = load_config(source, world_size=2, is_lenient=is_lenient)
    except ConfigError as error:
        lines = str(error).splitlines()
        assert lines
        assert all(line.strip() for line in lines)
        assert len(lines) == len(set(lines))
        return None
    assert isinstance(config, Config)
    assert load_config(config.describe(), world_size=2).describe() == config.describe()
    return config


def outcome(source: Any) -> None:
    strict, lenient = read(source, is_lenient=False), read(source, is_lenient=True)
    assert strict is None or strict == lenient


@pytest.mark.slow
@given(configs())
@example({"bf16.enabled": True, "train_batch_size": 2})
@example({"zero_optimization.leaf_module": {"names": []}, "train_batch_size": 2})
@example({"optimizer": {"type": "Adam", "params": {"lr": 10**5000}}, "train_batch_size": 2})
@example({"bf16.enabled": True, "bf16": {"enabled": 1}, "train_batch_size": 2})
@example(
    {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}, "train_batch_size": 2}
)
@settings(max_examples=300)
def test_any_dict_gives_a_config_or_a_config_error(values: dict[str, Any]) -> None:
    outcome(values)


@pytest.mark.slow
@given(
    st.one_of(st.text(), configs().map(lambda values: json.dumps(values, indent=1)), st.binary(max_size=30))
)
@settings(max_examples=60)
def test_any_file_gives_a_config_or_a_config_error(tmp_path: Path, text: str | bytes) -> None:
    for name in ("ds.json", "ds.yaml"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
        outcome(path)


@given(st.text())
@settings(max_examples=60)
def test_any_text_gives_a_config_or_a_config_error(text: str) -> None:
    outcome(text)


@pytest.mark.parametrize("value", [object(), {1, 2}, b"x", lambda: None, Config])
def test_values_that_no_file_can_hold_are_refused(value: object) -> None:
    for given_values in (
        {"gradient_clipping": value},
        {"optimizer": {"type": "Adam", "params": {"betas": value}}},
    ):
        with pytest.raises(ConfigError):
            load_config({"train_batch_size": 2, **given_values}, world_size=2)
