"""One CUDA device: the engine trains there as plain torch does. Skipped where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]

# A process of its own: the device and NCCL stay with a process for good.
SCRIPT = """
import torch, dslaunch
from tests.runtime.models import batch, loss_of, make_config, make_model, snapshot, worst_difference

stage, bf16, folder = {stage}, {bf16}, {folder!r}
dtype = torch.bfloat16 if bf16 else torch.float32
config = make_config(stage=stage, bf16={{"enabled": bf16}}, gradient_clipping=0.05)
model = make_model()
engine, *_ = dslaunch.initialize(model=model, config=config)
assert engine.device.type == "cuda" and all(param.is_cuda for param in model.parameters())

masters, plain = make_model().cuda(), make_model().cuda().to(dtype)
optimizer = torch.optim.AdamW(masters.parameters(), lr=0.01, weight_decay=0.1)
for step in range(10):
    x = batch(step).cuda().to(dtype)
    engine.backward(loss_of(engine, x))
    engine.step()
    plain.zero_grad()
    loss_of(plain, x).backward()
    for master, param in zip(masters.parameters(), plain.parameters()):
        master.grad = param.grad.float()
    norm = torch.nn.utils.clip_grad_norm_(masters.parameters(), 0.05)
    assert abs(engine.get_global_grad_norm() / float(norm) - 1) < 1e-5
    optimizer.step()
    with torch.no_grad():
        for master, param in zip(masters.parameters(), plain.parameters()):
            param.copy_(master)
drift = worst_difference(snapshot(model.named_parameters()), snapshot(plain.named_parameters()))
assert drift <= {tolerance}, drift
assert engine.comm_bytes() == {{}}

engine.save_checkpoint(folder)
fresh, *_ = dslaunch.initialize(model=make_model(seed=1), config=config)
fresh.load_checkpoint(folder)
for left, right in zip(engine._model.trained, fresh._model.trained):
    assert torch.equal(left.master, right.master) and left.master.is_cuda
torch.distributed.destroy_process_group()
"""
# As FP32_DRIFT and BF16_DRIFT of test_stages: the same gradients here, two kernels of AdamW.
TOLERANCES = {False: 1e-5, True: 2.0**-8}


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_gpu_trains_as_plain_torch_does(tmp_path: Path, stage: int, bf16: bool) -> None:
    text = SCRIPT.format(stage=stage, bf16=bf16, folder=str(tmp_path), tolerance=TOLERANCES[bf16])
    done = subprocess.run(
        [sys.executable, "-c", text],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr


OFFLOAD_SCRIPT = """
import torch, dslaunch
from dslaunch.runtime.step.delayed_steps import DelayedSteps
from dslaunch.runtime.step.early_steps import EarlySteps
from tests.runtime.models import assert_same_bits, batch, loss_of, make_config, make_model, snapshot

STAGE, STEPS = {stage}, 8

def make(clipping, **when):
    given = dict(bf16={{"enabled": True}}, gradient_clipping=clipping, reduce_bucket_size=100)
    config = make_config(stage=STAGE, **given)
    config["zero_optimization"]["offload_optimizer"] = {{"device": "cpu", "pin_memory": True, **when}}
    return dslaunch.initialize(model=make_model(), config=config)[0]

def step(engine, number):
    engine.backward(loss_of(engine, batch(number).cuda().bfloat16()))
    engine.step()

def everything(engine):
    found = dict(snapshot(engine.state_dict()))
    for name, param in engine.module.named_parameters():
        found[name + " master"] = dslaunch.zero.safe_get_full_fp32_param(param)
        found[name + " exp_avg"] = dslaunch.zero.safe_get_full_optimizer_state(param, "exp_avg")
    engine.destroy()
    return found

def trained(engine):
    for number in range(STEPS):
        step(engine, number)
    return everything(engine)

for clipping in (0.0, 1e-3):
    plain, early = make(clipping), make(clipping, super_offload=True)
    assert isinstance(early._schedule, EarlySteps)
    assert_same_bits(trained(early), trained(plain))
    right, wrong = early._schedule.num_right, early._schedule.num_wrong
    assert (right > 0, wrong > 0) == (clipping == 0.0, clipping > 0.0), (right, wrong)

delayed = make(1.0, delayed_update={{"enabled": True, "warmup_steps": 100}})
assert_same_bits(trained(delayed), trained(make(1.0)))
if STAGE == 2:  # a run without it, which is shown the parameters of the step before
    shown, delayed = make(1.0), make(1.0, delayed_update={{"enabled": True, "warmup_steps": 0}})
    assert isinstance(delayed._schedule, DelayedSteps)
    params = list(shown.module.parameters())
    latest = visible = [param.detach().clone() for param in params]
    for number in range(STEPS):
        with torch.no_grad():
            for param, value in zip(params, visible):
                param.copy_(value)
        step(shown, number)
        visible, latest = latest, [param.detach().clone() for param in params]
    assert_same_bits(trained(delayed), everything(shown))
torch.distributed.destroy_process_group()
"""


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("stage", [2, 3])
def test_the_host_updates_beside_one_gpu_with_the_bits_it_should_have(stage: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", OFFLOAD_SCRIPT.format(stage=stage)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
