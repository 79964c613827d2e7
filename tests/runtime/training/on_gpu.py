"""A program of test_gpu.py: one rank on one CUDA device. python -m tests.runtime.training.on_gpu train CASE

CASE is JSON: the fields of `test_fake_cuda.Case`. `early` compares updates on the host beside the backward
with those after it.
"""

from __future__ import annotations

import json
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dslaunch
from dslaunch.runtime.offload import device_copies
from dslaunch.runtime.step.delayed_steps import DelayedSteps
from dslaunch.runtime.step.early_steps import EarlySteps
from tests.runtime.models import assert_same_bits, batch, loss_of, make_config, make_model, snapshot
from tests.runtime.training.test_fake_cuda import DRIFT, Case, config_of, plain, train_steps, values_of

CYCLES = 3_000_000  # a millisecond or two, in which a copy that is not waited for is late
NORM_DRIFT = {"fp32": 1e-5, "bf16": 2.0**-5, "fp16": 2.0**-7}
UNIT = {"fp32": 0.0, "bf16": 2.0**-7, "fp16": 2.0**-10}  # of a value, by which one rounding changes it


def slow_copies() -> None:
    """Let each copy begin late in its own stream, so that who does not wait for it is seen."""
    begin = device_copies._copier

    def late(device: torch.device, *, is_to_host: bool) -> device_copies.Copier:
        copier = begin(device, is_to_host=is_to_host)
        with torch.cuda.stream(copier.stream):
            torch.cuda._sleep(CYCLES)
        return copier

    device_copies._copier = late


def slow_compute(model: nn.Module) -> None:
    """Let each layer begin late, so that what the host tells the device lies far behind what that does."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda *_: torch.cuda._sleep(CYCLES))


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor], precision: str) -> None:
    """Each value within the drift of rounding, and one rounding of its own."""
    for name, value in expected.items():
        allowed = DRIFT[precision] + UNIT[precision] * value.abs()
        worst = float(((found[name] - value).abs() / allowed).max())
        assert worst <= 1.0, f"{name} is {worst:.2f} times as far off as rounding explains"


def train(case: Case) -> None:
    """Train as plain torch does on the same device, save, and load what was saved."""
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(case, folder)
        model = make_model()
        engine, *_ = dslaunch.initialize(model=model, config=config)
        assert engine.device.type == "cuda"
        if case.zero:
            slow_copies()
            slow_compute(model)
        norms = train_steps(engine)
        found = values_of(engine)
        expected = plain(case.precision, case.num_micro_batches, on="cuda")
        assert_near(found, expected.params, case.precision)
        for ours, theirs in zip(norms, expected.norms, strict=True):
            assert abs(ours / theirs - 1) <= NORM_DRIFT[case.precision], (norms, expected.norms)
        assert engine.comm_bytes() == {}
        engine.save_checkpoint(folder)
        fresh, *_ = dslaunch.initialize(model=make_model(seed=1), config=config)
        fresh.load_checkpoint(folder)
        assert_same_bits(values_of(fresh), found)
        fresh.destroy()
        engine.destroy()


STEPS = 8


def _make(stage: int, clipping: float, **when: Any) -> dslaunch.Engine:
    config = make_config(
        stage=stage, bf16={"enabled": True}, gradient_clipping=clipping, reduce_bucket_size=100
    )
    config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": True, **when}
    return dslaunch.initialize(model=make_model(), config=config)[0]


def _step(engine: dslaunch.Engine, number: int) -> None:
    engine.backward(loss_of(engine, batch(number).cuda().bfloat16()))
    engine.step()


def _everything(engine: dslaunch.Engine) -> dict[str, Tensor]:
    found = dict(snapshot(engine.state_dict()))
    for name, param in engine.module.named_parameters():
        found[name + " master"] = dslaunch.zero.safe_get_full_fp32_param(param)
        found[name + " exp_avg"] = dslaunch.zero.safe_get_full_optimizer_state(param, "exp_avg")
    engine.destroy()
    return found


def _trained(engine: dslaunch.Engine) -> dict[str, Tensor]:
    for number in range(STEPS):
        _step(engine, number)
    return _everything(engine)


def early(stage: int) -> None:
    """Updates on the host beside the backward, and a step late, have the bits that they should have."""
    slow_copies()
    for clipping in (0.0, 1e-3):
        after, beside = _make(stage, clipping), _make(stage, clipping, super_offload=True)
        schedule = beside._schedule
        assert isinstance(schedule, EarlySteps)
        assert_same_bits(_trained(beside), _trained(after))
        counts = schedule.num_right, schedule.num_wrong
        assert (counts[0] > 0, counts[1] > 0) == (clipping == 0.0, clipping > 0.0), counts

    delayed = _make(stage, 1.0, delayed_update={"enabled": True, "warmup_steps": 100})
    assert_same_bits(_trained(delayed), _trained(_make(stage, 1.0)))
    if stage == 2:  # a run without it, which is shown the parameters of the step before
        shown, delayed = (
            _make(stage, 1.0),
            _make(stage, 1.0, delayed_update={"enabled": True, "warmup_steps": 0}),
        )
        assert isinstance(delayed._schedule, DelayedSteps)
        shown._model._copied = ()  # what it is shown is not to be taken over
        params = list(shown.module.parameters())
        latest = visible = [param.detach().clone() for param in params]
        for number in range(STEPS):
            with torch.no_grad():
                for param, value in zip(params, visible, strict=True):
                    param.copy_(value)
            _step(shown, number)
            visible, latest = latest, [param.detach().clone() for param in params]
        assert_same_bits(_trained(delayed), _everything(shown))


if __name__ == "__main__":
    what, given = sys.argv[1:]
    if what == "train":
        train(Case(**json.loads(given)))
    else:
        early(int(given))
    dist.destroy_process_group()
