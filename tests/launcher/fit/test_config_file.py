"""The ds_config that a program's arguments name, in each form that an engine reads."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from dslaunch.launcher.errors import LaunchError
from dslaunch.launcher.fit.config_file import read_ds_config

CONFIG = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}}
JSON = '{"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}}'


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ds.json", JSON),
        ("bom.json", "\ufeff" + JSON),
        ("ds.hjson", "{\n# samples\ntrain_micro_batch_size_per_gpu: 4\nzero_optimization: {stage: 2},\n}"),
        ("ds.yaml", "train_micro_batch_size_per_gpu: 4\nzero_optimization: {stage: 2}\n"),
    ],
)
def test_a_file_is_read_as_the_engine_reads_it(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    assert read_ds_config(name, str(tmp_path)) == CONFIG


def test_base64_is_read(tmp_path: Path) -> None:
    assert read_ds_config(base64.urlsafe_b64encode(JSON.encode()).decode(), str(tmp_path)) == CONFIG


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "ds.json: a config must be one object: { ... }"),
        ("{,}", "ds.json:1: "),
        ("[" * 100_000, "ds.json: objects or lists stand too deep inside each other"),
    ],
)
def test_a_mistake_is_told_in_the_engine_s_words(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(text)
    with pytest.raises(LaunchError) as caught:
        read_ds_config("ds.json", str(tmp_path))
    assert str(caught.value).startswith(f"--deepspeed_config {message}")
