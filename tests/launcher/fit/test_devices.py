"""GPUs by the names that drivers give them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dslaunch.launcher.errors import LaunchError
from dslaunch.launcher.fit.devices import find_gpu, gpu_of_model
from dslaunch.launcher.node.observe.devices import gpu_models


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("NVIDIA A10", "A10"),
        ("NVIDIA A10G", None),
        ("NVIDIA A100-SXM4-80GB", "A100-80"),
        ("NVIDIA A100-PCIE-40GB", "A100-40"),
        ("Tesla V100-SXM2-32GB", "V100-32"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA RTX 6000 Ada Generation", "RTX6000Ada"),
        ("", None),
    ],
)
def test_a_driver_names_a_gpu_of_the_table(model: str, name: str | None) -> None:
    found = gpu_of_model(model)
    assert (None if found is None else found.name) == name


def test_models_are_read_from_the_driver_unless_gpus_are_divided(tmp_path: Path) -> None:
    assert gpu_models(str(tmp_path)) == []
    gpu = tmp_path / "driver" / "nvidia" / "gpus" / "0000:3b:00.0"
    gpu.mkdir(parents=True)
    (gpu / "information").write_text("Model: \t\t NVIDIA H200\nIRQ:   \t\t 0\n")
    assert gpu_models(str(tmp_path)) == ["NVIDIA H200"]
    (tmp_path / "driver" / "nvidia" / "capabilities" / "gpu0" / "mig" / "gi1").mkdir(parents=True)
    assert gpu_models(str(tmp_path)) == []


@pytest.mark.parametrize("name", ["A100-80", "a100 80", "A100-80GB", "a10080"])
def test_a_gpu_is_found_however_its_name_is_written(name: str) -> None:
    assert find_gpu(name).name == "A100-80"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("H1000", "did you mean H100? there are A10, "),
        ("A100", "did you mean A100-40 or A100-80? there are A10, "),
        ("x", "known; there are "),
    ],
)
def test_an_unknown_gpu_is_answered_with_the_nearest_and_all(name: str, hint: str) -> None:
    with pytest.raises(LaunchError, match=re.escape(hint)) as refused:
        find_gpu(name)
    assert "MI300X, and none for hosts without GPUs" in str(refused.value)
