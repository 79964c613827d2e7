"""Which kernels update parameters on a GPU: ours on torch's current stream,
torch's where ours cannot be had.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dslaunch.kernels.cuda import CudaUnavailable
from dslaunch.runtime.optimizers import on_device
from dslaunch.runtime.optimizers.on_device import step_on_device

DEVICE = torch.device("cuda", 3)


@pytest.fixture(autouse=True)
def _no_gpu_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = {DEVICE: SimpleNamespace(cuda_stream=1234)}
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", streams.__getitem__)
    on_device._warn_once.cache_clear()
    monkeypatch.setenv(on_device.SWITCH, "1")


def test_without_the_switch_torchs_kernels_do_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(on_device.SWITCH)
    assert not step_on_device(lambda shards, **_: pytest.fail("launched"), [], device=DEVICE)
    assert not caplog.messages


def test_a_step_runs_on_the_current_stream_of_the_arrays_device() -> None:
    calls: list[Any] = []

    def step(shards: Any, **options: Any) -> None:
        calls.append((shards, options))

    assert step_on_device(step, ["shard"], device=DEVICE, grad_scale=0.5)
    assert calls == [(["shard"], {"stream": 1234, "grad_scale": 0.5})]


def test_what_is_missing_is_said_once_and_torch_takes_over(caplog: pytest.LogCaptureFixture) -> None:
    def step(shards: Any, **_: Any) -> None:
        raise CudaUnavailable("no compiler; python -m pip install it")

    with caplog.at_level(logging.WARNING, logger="dslaunch"):
        for _ in range(3):
            assert not step_on_device(step, [], device=DEVICE)
    assert caplog.messages == [
        "torch's own kernels update the parameters: no compiler; python -m pip install it"
    ]


def test_a_mistake_of_ours_is_not_taken_for_a_missing_compiler() -> None:
    def step(shards: Any, **_: Any) -> None:
        raise ValueError("shards[0].param: stride 2; must be 1: pass a contiguous array")

    with pytest.raises(ValueError, match="stride 2"):
        step_on_device(step, [], device=DEVICE)


def test_rocm_keeps_torchs_kernels(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not step_on_device(lambda shards, **_: pytest.fail("launched"), [], device=DEVICE)
    assert caplog.messages == [
        (
            "torch's own kernels update the parameters: the kernels of dslaunch are for CUDA, and this torch "
            "is for ROCm"
        )
    ]
