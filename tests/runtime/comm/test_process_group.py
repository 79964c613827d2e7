"""Which GPU a worker takes."""

from __future__ import annotations

import re

import pytest
import torch

from dslaunch import ConfigError
from dslaunch.runtime.comm.process_group import choose_device
from dslaunch.runtime.environment import read_environment


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Four GPUs that are not there; what becomes the current one."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    return chosen


@pytest.mark.parametrize(("index", "expected"), [(None, 2), (0, 0), (3, 3)])
def test_a_gpu_that_is_named_goes_before_local_rank(
    chosen: list[int], index: int | None, expected: int
) -> None:
    worker = read_environment({"RANK": "6", "WORLD_SIZE": "8", "LOCAL_RANK": "2"})
    assert choose_device(worker, backend="nccl", index=index) == torch.device("cuda", expected)
    assert chosen == [expected]


@pytest.mark.parametrize("index", [-1, 4])
def test_a_gpu_that_is_not_there_is_refused_with_those_that_are(chosen: list[int], index: int) -> None:
    expected = f"args.device_rank={index}: this host shows 4 GPUs; give one from 0 to 3"
    with pytest.raises(ConfigError, match=re.escape(expected)):
        choose_device(read_environment({}), backend="nccl", index=index)
    assert chosen == []


def test_without_a_gpu_all_is_the_cpu() -> None:
    assert choose_device(read_environment({}), backend="gloo", index=3) == torch.device("cpu")
