"""From what the ranks measured to the GPU that is slow or wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dslaunch.launcher.fleet.gpu_speed import (
    MeasuredGpu,
    faults_of_speed,
    gpus_as_dict,
    gpus_as_text,
    read_gpus,
)

SLOTS = {rank: (f"node{rank // 2 + 1}", str(rank % 2)) for rank in range(4)}


def told(rank: int, **changed: Any) -> str:
    good = {"problem": "", "name": "H100", "num_wrong": 0, "flops_per_s": 6e14}
    speeds = {"copied_bytes_per_s": 2.5e12, "loaded_bytes_per_s": 5e10}
    return json.dumps({"rank": rank, **good, **speeds, **changed})


def read(*changed: dict[str, Any]) -> tuple[MeasuredGpu, ...]:
    return read_gpus([told(rank, **one) for rank, one in enumerate(changed)], SLOTS)


def test_gpus_that_are_alike_have_no_fault() -> None:
    gpus = read({}, {"flops_per_s": 5.5e14}, {}, {"loaded_bytes_per_s": 4.5e10})
    assert faults_of_speed(gpus) == ()
    assert "Problems" not in gpus_as_text(gpus)
    assert "node2:1  H100  600 TFLOP/s  2.5e+03 GB/s    45 GB/s" in gpus_as_text(gpus)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"flops_per_s": 3e14}, "GPU 1 multiplies matrices at 300 TFLOP/s, where most H100 reach 600"),
        (
            {"copied_bytes_per_s": 1e12},
            "GPU 1 copies its memory at 1e+03 GB/s, where most H100 reach 2.5e+03",
        ),
        ({"loaded_bytes_per_s": 6e9}, "GPU 1 is loaded from the host's memory at 6 GB/s"),
        ({"num_wrong": 1}, "GPU 1 computes wrong: 1 row of a product"),
        ({"num_wrong": 7}, "GPU 1 computes wrong: 7 rows or columns of a product"),
        ({"problem": "RuntimeError: no kernel"}, "GPU 1 cannot be used: RuntimeError: no kernel"),
        ({"name": ""}, "PyTorch finds no GPU for slot 1"),
    ],
)
def test_the_one_at_fault_is_named(changed: dict[str, Any], words: str) -> None:
    gpus = read({}, changed, {}, {})
    (fault,) = faults_of_speed(gpus)
    assert fault.hosts == ("node1",)
    assert fault.text.startswith(words)
    assert f"node1: {words}" in gpus_as_text(gpus)
    assert gpus_as_dict(gpus)["problems"] == [{"hosts": ["node1"], "text": fault.text}]


def test_only_gpus_of_one_name_are_compared() -> None:
    slow = {"name": "A100", "flops_per_s": 2.5e14, "copied_bytes_per_s": 1.2e12, "loaded_bytes_per_s": 2e10}
    assert faults_of_speed(read({}, {}, slow, slow)) == ()


def test_where_no_host_has_a_gpu_nothing_is_at_fault() -> None:
    gpus = read({"name": ""}, {"name": ""})
    assert faults_of_speed(gpus) == ()
    assert "none that PyTorch can use" in gpus_as_text(gpus)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rank": 9, "problem": "", "name": ""}', "nonsense"])
def test_an_answer_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - several words
        read_gpus([text], SLOTS)
