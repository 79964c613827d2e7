"""`dslaunch plan` of jobs that do not fit: what would, by the real command, and that it does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launcher.local_job import Job

pytestmark = pytest.mark.slow

PLANNED_S = 400.0  # a dozen processes that import torch, on a machine that may be busy
NUM_PARAMS = 8 * 2048 * 2048

TRAIN = """
import argparse
import torch
import dslaunch
from torch import nn
parser = argparse.ArgumentParser()
parser.add_argument('--local_rank', type=int)
dslaunch.add_config_arguments(parser)
args = parser.parse_args()
model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(8)))
data = [torch.ones(2048) for _ in range(256)]
engine, _, loader, _ = dslaunch.initialize(args=args, model=model, training_data=data)
for x in loader:
    engine.backward(engine(x).mean())
    engine.step()
"""
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
    "zero_optimization": {"stage": 0},
}
# 1 GiB is outside of torch. Of 134 MB of parameters in float32 stage 0 holds four times as much.
GPUS = ("-H", "node[1-2]:2", "--gpu_memory=1.45GiB")
PROGRAM = ("train.py", "--deepspeed", "--deepspeed_config")


def planned(folder: Path, *words: str) -> tuple[int, str, str]:
    job = Job(folder, ["plan", *words])
    code = job.wait(PLANNED_S)
    return code, job.out, job.err


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_the_first_line_says_the_way_out(folder: Path) -> None:
    code, out, err = planned(folder, *GPUS, "--json", *PROGRAM, "ds.json")
    assert code == 1, err
    found: dict[str, Any] = json.loads(out)
    assert found["verdict"].startswith("does not fit: 1.")
    change, *hosts = found["ways_out"]
    assert change["rehearsed"]
    assert change["stage"] >= 1
    assert change["device_bytes"] <= 1.45 * 2**30
    assert f"; fits with stage {change['stage']}" in found["verdict"]
    assert all(one["hosts"] > 2 for one in hosts)
    assert not any("--suggest" in one for one in found["notes"])


def test_without_a_way_out_the_last_note_says_what_looks_further(folder: Path) -> None:
    """One layer alone is larger than what is left of a GPU."""
    code, out, err = planned(folder, *GPUS[:2], "--gpu_memory=1.001GiB", "--json", *PROGRAM, "ds.json")
    assert code == 1, err
    found: dict[str, Any] = json.loads(out)
    assert found["ways_out"] == []
    assert found["notes"][-1].startswith("--suggest rehearses more: ")


def test_without_a_ds_config_to_replace_only_hosts_are_searched(folder: Path) -> None:
    text = TRAIN.replace("args=args, ", f"config={CONFIG | {'zero_optimization': {'stage': 1}}}, ")
    (folder / "train.py").write_text(text)
    code, out, err = planned(folder, "-H", "node1:2", "--gpu_memory=1.38GiB", "train.py")
    assert code == 1, err
    assert "; fits on " in out.splitlines()[0], out
    assert "not searched: other configurations, because the arguments of the script name no ds_config" in out


def test_a_suggested_ds_config_is_written_and_fits(folder: Path) -> None:
    code, out, err = planned(folder, *GPUS, "--suggest", "--out", "best.json", *PROGRAM, "ds.json")
    assert code == 0, err
    lines = out.splitlines()
    at = next(place for place, line in enumerate(lines) if line.startswith("suggested: "))
    assert "; fits with stage " in lines[0]
    assert lines[at + 2].endswith("the fastest that fits")
    made = json.loads((folder / "best.json").read_text())
    assert made["train_micro_batch_size_per_gpu"] * made["gradient_accumulation_steps"] == 8
    code, out, err = planned(folder, *GPUS, *PROGRAM, "best.json")
    assert code == 0, err
    assert out.startswith("fits: ")


@pytest.mark.exhaustive
def test_hosts_without_gpus_are_compared_by_their_memory(folder: Path) -> None:
    words = ("-H", "node[1-2]:2", "--gpu=none", "--host_memory=8GiB", "--suggest", "--json")
    code, out, err = planned(folder, *words, *PROGRAM, "ds.json")
    assert code == 0, err
    rows = json.loads(out)["suggestions"]
    assert [row["stage"] for row in rows if row["micro_batch_size"] == 4] == [0]  # the job as it is
    assert rows[0]["stage"] == 1  # by what they should take, not in the order of their rehearsals
    assert {row["stage"] for row in rows if row["fits"]} == {0, 1, 2, 3}
    assert not any(row["offload_optimizer"] or row["offload_param"] for row in rows)
    code, out, err = planned(folder, *words[:3], "--suggest", *PROGRAM, "ds.json")
    assert code == 2
    assert "--suggest: the memory of node1, which has no GPUs, is not known; give --host_memory" in err


LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 1024,
    "vocab_size": 256,
    "max_position_embeddings": 4096,
}


@pytest.mark.exhaustive
def test_a_model_is_planned_for_the_lengths_of_its_samples(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(LLAMA))
    (folder / "lengths.txt").write_text("128 90\n256 9\n2048 1\n")
    model = ("--model=config.json", "--batch=4", "--lengths=lengths.txt")
    code, out, err = planned(folder, "-H", "node1:2", "--gpu=A10", *model, "--json", *PROGRAM, "ds.json")
    assert code == 0, err
    found = json.loads(out)
    lengths = found["lengths"]
    assert (lengths["samples"], lengths["longest"]) == (100, 2048)
    assert lengths["share_of_longest"] == pytest.approx(0.01)
    assert lengths["steps_with_longest"] == pytest.approx(1 - 0.99**16)
    assert 128 < lengths["usual"] < 256
    model = ("--model=config.json", f"--batch=4x{lengths['usual']}")
    code, out, err = planned(folder, "-H", "node1:2", "--gpu=A10", *model, "--json", *PROGRAM, "ds.json")
    assert json.loads(out)["step_seconds"] == found["step_seconds"]


@pytest.mark.exhaustive
def test_a_model_is_tried_with_checkpointing_and_divided(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(LLAMA))
    code, out, err = planned(
        folder, "-H", "node1:2", "--gpu_memory=1.9GiB", "--model=config.json", "--batch=1x4096", "--suggest",
        "--json", "--out=best.json", *PROGRAM, "ds.json",
    )  # fmt: skip
    assert code == 0, err
    rows = json.loads(out)["suggestions"]
    assert rows[0]["gradient_checkpointing"]  # without, a sample alone is too large
    assert any(row["mesh"] == {"tp": 2} for row in rows)
    assert not [row["why"] for row in rows if "cannot be rehearsed" in row["why"]]
