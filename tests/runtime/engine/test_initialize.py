"""The way in: arguments, the process group, and how a user's mistake ends a program."""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stdout
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

import dslaunch
from dslaunch import ConfigError
from dslaunch.runtime.config import load_config
from tests.exhaustive import few
from tests.runtime.models import (
    batch,
    make_config,
    make_model,
    snapshot,
    train_engine,
    train_plain,
    worst_difference,
)
from tests.runtime.ranks import Ranks
from tests.runtime.training.test_stages import FP32_DRIFT

ROOT = Path(__file__).parents[3]


def _run_script(text: str, *, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    env = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", text],
        env={**env, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", **(environ or {})},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


SCRIPT = """
import torch, dslaunch
model = torch.nn.Linear(3, 1)
engine, optimizer, loader, scheduler = dslaunch.initialize(model=model, config={config})
engine.backward(engine(torch.ones(2, 3)).mean())
engine.step()
print(engine.world_size, engine.global_rank, engine.device, engine.comm_bytes(), loader, scheduler)
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_a_script_started_without_a_launcher_is_a_job_of_one() -> None:
    done = _run_script(SCRIPT.format(config=make_config(stage=1)))
    assert (done.returncode, done.stdout, done.stderr) == (0, "1 0 cpu {} None None\n", "")


@pytest.mark.slow
def test_a_mistake_in_the_config_ends_the_program_with_one_line_and_code_2() -> None:
    done = _run_script(SCRIPT.format(config={"train_batch_size": 2, "zero_optimization": {"stage": 9}}))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("dslaunch: ")
    assert done.stderr.count("\n") == 1
    assert "stage" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ending", "is_left"),
    few(
        [("", False), ("raise dslaunch.ConfigError", False), ("1 / 0", True)],
        lambda ending, is_left: not ending or is_left,
    ),
)
def test_a_group_that_we_made_ends_before_the_interpreter_does(ending: str, is_left: bool) -> None:
    """Else gloo's threads may end the process with SIGABRT; an unexpected error does not
    wait for other ranks.
    """
    done = _run_script(
        "import atexit, torch.distributed as dist, dslaunch\n"
        "atexit.register(lambda: print(dist.is_initialized()))\n"
        f"dslaunch.init_distributed()\n{ending}"
    )
    assert done.stdout == f"{is_left}\n"


@pytest.mark.slow
def test_any_other_error_keeps_its_traceback() -> None:
    done = _run_script(SCRIPT.format(config=make_config()) + "raise RuntimeError('mine')")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "RuntimeError: mine" in done.stderr


def _sources(rank: int, folder: str) -> list[str]:
    path = Path(folder) / f"ds_config{rank}.json"
    path.write_text(json.dumps(make_config()))
    args = argparse.Namespace(deepspeed_config=str(path))
    for arguments in (
        {"args": args},
        {"args": argparse.Namespace(deepspeed_config=None, deepscale_config=str(path))},
        {"config": str(path)},
        {"config": path},
        {"config_params": make_config()},
    ):
        engine, *_ = dslaunch.initialize(model=make_model(), **arguments)  # type: ignore[arg-type]
        assert engine.train_batch_size() == 12
    refused: list[dict[str, Any]] = [
        {"args": args, "config": str(path)},
        {},
        {"config": make_config(), "mpu": object()},
        {"config": make_config(), "mesh_param": (1, 2)},
        {"config": make_config(), "model": 3},
    ]
    messages = []
    for arguments in refused:
        with pytest.raises(ConfigError) as caught:
            dslaunch.initialize(**{"model": make_model(), **arguments})
        messages.append(str(caught.value))
    return messages


def test_the_ds_config_is_given_once_and_what_we_lack_is_refused_by_name(
    ranks: Ranks, tmp_path: Path
) -> None:
    expected = (
        "config and args.deepspeed_config are both given",
        "no ds_config; give initialize(config=...), or start the script with --deepspeed_config FILE",
        "initialize(mpu=<object object at ",
        "initialize(mesh_param=(1, 2)): 1 x 2 is not what the 1 ranks",
        "initialize(model=int): must be a torch.nn.Module",
    )
    for message, beginning in zip(ranks(_sources, str(tmp_path), world_size=1)[0], expected, strict=True):
        assert message.startswith(beginning)


def test_config_arguments_are_deepspeeds() -> None:
    parser = dslaunch.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", "ds.json"])
    assert (args.deepspeed, args.deepspeed_config) == (True, "ds.json")
    assert vars(parser.parse_args([])) == {"deepspeed": False, "deepspeed_config": None}


def _data(rank: int) -> list[list[float]]:
    data = TensorDataset(torch.arange(24.0).view(24, 1))
    engine, _, loader, _ = dslaunch.initialize(
        model=nn.Linear(1, 1), training_data=data, config=make_config(gradient_accumulation_steps=3)
    )
    assert loader is engine.training_dataloader
    assert loader is not None
    return [sorted(x.view(-1).tolist()) for (x,) in loader]


def test_training_data_becomes_micro_batches_of_this_rank(ranks: Ranks) -> None:
    first, second = ranks(_data, world_size=2)
    assert [len(micro) for micro in first] == [2] * 6  # 12 = 2 samples * 3 micro batches * 2 ranks
    assert sorted(x for micros in (first, second) for micro in micros for x in micro) == list(range(24))


def _rotated(rank: int) -> tuple[int, int, list[float]]:
    """LOCAL_RANK is a rotation of RANK on hosts with unequal slots: nothing but the device may follow it."""
    world_size = dist.get_world_size()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str((rank + 1) % world_size))
    try:
        engine, *_ = dslaunch.initialize(model=make_model(), config=make_config(stage=1))
    finally:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            del os.environ[name]
    train_engine(engine, steps=2)
    return (
        engine.global_rank,
        engine.local_rank,
        [float(param.detach().sum()) for param in engine.parameters()],
    )


def test_local_rank_is_not_an_order_of_ranks(ranks: Ranks) -> None:
    results = ranks(_rotated, world_size=3)
    assert [(rank, local_rank) for rank, local_rank, _ in results] == [(0, 1), (1, 2), (2, 0)]
    assert results[0][2] == results[1][2] == results[2][2]


def _idempotent(rank: int) -> bool:
    group = dist.group.WORLD
    dslaunch.init_distributed()
    dslaunch.init_distributed(dist_backend="gloo", verbose=False, auto_mpi_discovery=False)
    return dist.group.WORLD is group


def test_init_distributed_keeps_a_group_that_is_there(ranks: Ranks) -> None:
    assert ranks(_idempotent, world_size=2) == [True, True]


def test_dist_init_required_false_needs_a_group() -> None:
    with pytest.raises(
        ConfigError, match=r"dist_init_required=False but torch\.distributed has no process group"
    ):
        dslaunch.init_distributed(dist_init_required=False)


@pytest.mark.parametrize("timeout", [30, timedelta(0), timedelta(seconds=-1)])
def test_a_timeout_is_a_timedelta_above_0(timeout: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"init_distributed\(timeout=.*must be a datetime\.timedelta above 0"
    ):
        dslaunch.init_distributed(timeout=timeout)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argument", "seconds"),
    few([("", 120), ("timeout=timedelta(seconds=7)", 7)], lambda argument, seconds: bool(argument)),
)
def test_a_timeout_that_is_given_goes_before_the_environments(argument: str, seconds: int) -> None:
    done = _run_script(
        "import dslaunch\n"
        "from datetime import timedelta\n"
        "from dslaunch.runtime.comm.process_group import group_timeout\n"
        f"dslaunch.init_distributed({argument})\n"
        "print(group_timeout().total_seconds())",
        environ={"DEEPSPEED_TIMEOUT": "2"},
    )
    assert (done.stdout, done.stderr) == (f"{seconds}.0\n", "")


def _bf16_input(rank: int) -> str:
    engine, *_ = dslaunch.initialize(model=make_model(), config=make_config(bf16={"enabled": True}))
    assert {param.dtype for param in engine.parameters()} == {torch.bfloat16}
    with pytest.raises(RuntimeError) as caught:
        engine(batch(0))  # as in DeepSpeed: bf16 does not convert what the user gives
    return str(caught.value)


def test_inputs_are_not_converted(ranks: Ranks) -> None:
    assert "dtype" in ranks(_bf16_input, world_size=1)[0]


def _dumped(rank: int, stage: int) -> tuple[str, dict[str, Any]]:
    config = make_config(stage=stage, dump_state=True, bf16={"enabled": True}, gradient_accumulation_steps=3)
    del config["optimizer"]
    model = make_model()
    model.norm.requires_grad_(False)
    printed = io.StringIO()
    with redirect_stdout(printed):
        engine, *_ = dslaunch.initialize(
            model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config
        )
    return printed.getvalue(), engine.settings.describe()


@pytest.mark.parametrize("stage", [1, 3])
def test_dump_state_prints_what_is_trained_and_the_configuration_in_effect_once(
    ranks: Ranks, stage: int
) -> None:
    (first, config), (second, _) = ranks(_dumped, stage, world_size=2)
    assert second == ""
    at_stage_3 = "sharded" if stage == 3 else "replicated"
    assert json.loads(first) == {
        "config_from": "ds_config",
        "num_ranks": 2,
        "device": "cpu",
        "num_params": 1792,
        "num_trained_params": 1762,
        "dtypes": ["bfloat16"],
        "batch": "12 samples for one optimizer step = 2 in a micro batch * 3 micro batches * 2 ranks",
        "zero": {
            "stage": stage,
            "parameters": at_stage_3,
            "gradients": at_stage_3,
            "optimizer_states": "sharded",
        },
        "memory": [
            {
                "ranks": "0-1",
                "place": "",
                "parameters_bytes": 5632 // (2 if stage == 3 else 1),  # with padding
                "gradients_bytes": 5120,
                "masters_bytes": 5120,
                "states_bytes": 0,
                "whole_in_a_batch_bytes": 0,
            }
        ],
        "optimizer": "SGD",
        "lr_scheduler": None,
        "ds_config": config,
    }
    assert config["train_micro_batch_size_per_gpu"] == 2
    assert first.startswith('{\n  "config_from": ')
    assert load_config(json.loads(first)["ds_config"], world_size=2).describe() == config


def _in_inference_mode(rank: int, stage: int) -> dict[str, Tensor]:
    model = make_model()
    with torch.inference_mode():
        engine = dslaunch.initialize(model=model, config=make_config(stage=stage))[0]
    train_engine(engine, steps=2)
    return snapshot(engine.state_dict())


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_an_engine_that_is_made_in_inference_mode_trains(ranks: Ranks, stage: int) -> None:
    plain = make_model()
    train_plain(plain, torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.1), steps=2)
    expected = snapshot(plain.state_dict())
    for result in ranks(_in_inference_mode, stage, world_size=2):
        assert worst_difference(result, expected) <= FP32_DRIFT


def _divided(rank: int, stage: int) -> str:
    model = make_model()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(ConfigError) as caught:
        dslaunch.initialize(model=model, config=make_config(stage=stage))
    return str(caught.value)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_that_is_divided_already_is_refused_by_name(ranks: Ranks, stage: int) -> None:
    for said in ranks(_divided, stage, world_size=2):
        assert said.startswith("fully_shard() has divided the model over ranks; give initialize() the plain")
