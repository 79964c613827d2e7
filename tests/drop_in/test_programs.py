"""Programs as those of DeepSpeedExamples are, with their imports and calls in their order, run with
`dslaunch --drop_in always`.

Small models on data made here. Each trains the same at every ZeRO stage,
which says that a stage does what it should.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runtime.answering_models import make_model

HERE = Path(__file__).parent / "programs"
DSLAUNCH = Path(sys.executable).parent / "dslaunch"
LIMIT_S = 400  # on a machine that does many other things; alone a program is done in 15
SAME = 1e-4
SAME_BF16 = 3e-2  # of losses near 4, after some updates of weights that are rounded: sums in another order
WEIGHTS_BF16 = 5e-2

pytestmark = [pytest.mark.slow, pytest.mark.timeout(4 * LIMIT_S)]
needs_transformers = pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")


def run(program: str, *words: str | Path, num_ranks: int) -> tuple[int, str]:
    """Run a program; return the exit code and all that was printed."""
    # Imported once for all ranks; the tests of `--preload` and the other programs show that
    # nothing else differs.
    preload = "torch,transformers.trainer" if program.startswith(("chat", "autotp", "inference")) else "torch"
    job = subprocess.Popen(
        [
            DSLAUNCH,
            f"--num_gpus={num_ranks}",
            f"--preload={preload}",
            "--drop_in=always",
            HERE / program,
            *words,
        ],
        env={
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_VERBOSITY": "error",
            "CUDA_VISIBLE_DEVICES": "",
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = job.communicate(timeout=LIMIT_S)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
    return job.returncode, said


def results(program: str, *words: str | Path, num_ranks: int = 2) -> dict[int, list[float]]:
    """Return rank -> the losses that it prints at its end."""
    code, said = run(program, *words, num_ranks=num_ranks)
    lines = [line.partition("RESULT ")[2].split() for line in said.splitlines() if "RESULT " in line]
    found = {int(rank): [float(number) for number in numbers] for rank, *numbers in lines}
    assert code == 0, said[-4000:]
    assert sorted(found) == list(range(num_ranks)), said[-4000:]
    assert all(math.isfinite(number) for numbers in found.values() for number in numbers)
    return found


@cache
def of_cifar(*words: str) -> dict[int, list[float]]:
    """`results` of the CIFAR tutorial, whose program is run once with the same words."""
    return results("cifar.py", *words)


def assert_same(one: dict[int, list[float]], other: dict[int, list[float]], tolerance: float) -> None:
    for rank, numbers in one.items():
        assert numbers == pytest.approx(other[rank], abs=tolerance), rank


def assert_same_weights(one: Path, other: Path) -> None:
    first: dict[str, Any] = torch.load(one)
    second: dict[str, Any] = torch.load(other)
    assert first.keys() >= second.keys()
    for name, value in second.items():
        torch.testing.assert_close(first[name], value, rtol=0, atol=WEIGHTS_BF16)


def test_the_cifar_tutorial_trains_the_same_at_stage_3_as_at_stage_0() -> None:
    at_0, at_3 = of_cifar("--stage=0"), of_cifar("--stage=3")
    assert_same(at_3, at_0, SAME)
    assert at_0[0][-1] < at_0[0][0]


@pytest.mark.exhaustive
@pytest.mark.parametrize("words", [("--stage=2",), ("--stage=3", "--dtype=bf16")])
def test_the_cifar_tutorial_trains_the_same_at_other_stages_and_in_bfloat16(words: tuple[str, ...]) -> None:
    assert_same(of_cifar(*words), of_cifar("--stage=0"), SAME_BF16)


MOE = ("--moe", "--ep-world-size=2", "--num-experts", "4", "2", "--top-k=1", "--mlp-type=residual")


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", [2, 3])
def test_the_cifar_tutorial_trains_experts_over_ranks_as_at_stage_0(stage: int) -> None:
    at_0 = of_cifar(*MOE, "--stage=0")
    assert_same(of_cifar(*MOE, f"--stage={stage}"), at_0, SAME)
    assert at_0[0][-1] < at_0[0][0]


@pytest.mark.exhaustive
@needs_transformers
def test_reinforcement_learning_of_deepspeed_chat_runs_at_stage_3(tmp_path: Path) -> None:
    found = results("chat_ppo.py", tmp_path, "--zero_stage=3", "--enable_ema")
    assert len(found[0]) == 6
    saved: dict[str, Any] = torch.load(tmp_path / "actor.bin")
    assert saved["model.decoder.embed_tokens.weight"].shape == (56, 16)  # resized, and whole
    assert all(value.numel() > 0 for value in saved.values())


@needs_transformers
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("program", "saved", "stage"),
    [("chat_sft.py", "sft.bin", 3), ("chat_reward.py", "reward.bin", 2), ("chat_dpo.py", "dpo.bin", 3)],
)
def test_fine_tuning_of_deepspeed_chat_is_the_same_with_and_without_zero(
    program: str, saved: str, stage: int, tmp_path: Path
) -> None:
    found = {}
    for one in (0, stage):
        folder = tmp_path / str(one)
        folder.mkdir()
        found[one] = results(program, folder, f"--zero_stage={one}")
    assert_same(found[stage], found[0], 3 * SAME_BF16)
    assert_same_weights(tmp_path / "0" / saved, tmp_path / str(stage) / saved)
    assert found[0][0][-2] < found[0][0][0] - 0.01


@needs_transformers
@pytest.mark.exhaustive
@pytest.mark.parametrize("words", [("--lora_dim=2",), ("--offload",)])
def test_fine_tuning_of_deepspeed_chat_with_lora_or_offload_learns_at_stage_3(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    losses = results("chat_sft.py", tmp_path, "--zero_stage=3", *words)[0]
    assert losses[-1] < losses[0] - 0.1


@needs_transformers
@pytest.mark.exhaustive
def test_reinforcement_learning_of_deepspeed_chat_runs_at_stage_2(tmp_path: Path) -> None:
    assert len(results("chat_ppo.py", tmp_path, "--zero_stage=2", "--enable_ema")[0]) == 6


@needs_transformers
@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", [2, 3])
def test_hellodeepspeed_goes_on_from_its_checkpoint_as_if_it_had_not_ended(
    stage: int, tmp_path: Path
) -> None:
    whole = results("hello.py", tmp_path, f"--stage={stage}")
    rest = results("hello.py", tmp_path, f"--stage={stage}", "--resume")
    assert rest == {rank: losses[4:] for rank, losses in whole.items()}
    assert whole[0][-1] < whole[0][0]


# ---- layers divided over ranks


@needs_transformers
@pytest.mark.exhaustive
@pytest.mark.parametrize(("words", "stages"), [((), (0, 2)), (("--rules",), (1,))])
def test_layers_divided_beside_an_mpu_of_the_program_train_and_are_saved_as_undivided_ones(
    words: tuple[str, ...], stages: tuple[int, ...], tmp_path: Path
) -> None:
    whole = results("autotp.py", tmp_path, *words)
    weights: dict[str, Any] = torch.load(tmp_path / "pytorch_model.bin")
    for stage in stages:
        folder = tmp_path / str(stage)
        folder.mkdir()
        divided = results("autotp.py", folder, *words, "--tp_size=2", f"--zero_stage={stage}", num_ranks=4)
        for rank, losses in divided.items():
            assert losses == pytest.approx(whole[rank // 2], abs=SAME), (stage, rank)
        saved: dict[str, Any] = torch.load(folder / "pytorch_model.bin")
        assert saved.keys() == weights.keys()
        for name, value in weights.items():
            torch.testing.assert_close(saved[name], value, rtol=0, atol=SAME, msg=name)


# ---- stages


@pytest.mark.exhaustive
def test_the_pipeline_program_trains_the_same_cut_or_whole(tmp_path: Path) -> None:
    def trained(num_stages: int, stage: int) -> dict[int, list[float]]:
        config = tmp_path / f"{stage}.json"
        config.write_text(
            json.dumps(
                {
                    "train_batch_size": 32,
                    "train_micro_batch_size_per_gpu": 8,
                    "steps_per_print": 2,
                    "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.9, 0.999]}},
                    "wall_clock_breakdown": False,
                    "zero_optimization": {"stage": stage},
                }
            )
        )
        return results("alexnet.py", "--deepspeed_config", config, "-p", str(num_stages))

    whole = trained(1, 0)
    assert whole[0][0] > whole[0][-1]
    for stage in (1, 3):
        assert_same(trained(2, stage), whole, SAME)


@needs_transformers
def test_the_inference_test_answers_as_transformers_does(tmp_path: Path) -> None:
    wanted = _answers_of_transformers(tmp_path)
    found = results("inference.py", tmp_path, f"--model={tmp_path}", "--use_kernel", "--use_meta_tensor")
    assert found == {0: wanted, 1: wanted}


@pytest.mark.exhaustive
@needs_transformers
@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--test_hybrid_engine",),
        ("--dtype=float16", "--use_meta_tensor"),
        ("--zero=cpu",),
        ("--zero=nvme",),
    ],
)
def test_the_inference_test_answers_in_other_ways(tmp_path: Path, words: tuple[str, ...]) -> None:
    wanted = _answers_of_transformers(tmp_path)
    assert results("inference.py", tmp_path, f"--model={tmp_path}", *words, num_ranks=1) == {0: wanted}


def _answers_of_transformers(folder: Path) -> list[float]:
    """Save a small model; return the tokens that it answers with."""
    model = make_model("GPT2")
    model.save_pretrained(folder)
    prompts = torch.tensor([[3, 4, 5], [6, 7, 8]])
    made = model.eval().generate(prompts, max_new_tokens=5, do_sample=False)
    return [float(token) for token in made.flatten().tolist()]
