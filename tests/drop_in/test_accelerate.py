"""Accelerate on dslaunch, in loops of a program's own, started by `accelerate launch --use_deepspeed`."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.drop_in.accelerate_cases import CASES, FEW, LAUNCHED_STAGE, NUM_STEPS, SAVED_STEP, WANTED, Case
from tests.drop_in.guide_jobs import (
    HERE,
    LIMIT_S,
    WORLD_SIZES,
    Job,
    ask_for_cases,
    command_of,
    largest_difference,
    requires_hugging_face,
    run,
)
from tests.drop_in.jobs import asked_for
from tests.exhaustive import few

pytestmark = [
    requires_hugging_face,
    pytest.mark.exhaustive,
    pytest.mark.slow,
    pytest.mark.timeout(LIMIT_S + 30),
]

FP32 = 5e-6  # ten roundings of a loss of about 4
# The reference adds gradients up in 16 bits, and takes their norm there; dslaunch does both in 32.
BF16, BF16_NORM = 6e-3, 2**-6  # the first of a loss, the other of a norm, as a part of it
WEIGHTS = 2e-6  # of an element, of 1 at most; after six updates of up to 2e-2 each
BF16_WEIGHTS = 2**-6  # two steps between numbers of 16 bits from 1 to 2
SAVED = 2**-9  # of a loss of about 4, computed in float32 from weights of 16 bits, and once in 16 bits

DS_CONFIG = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "zero_optimization": {"stage": LAUNCHED_STAGE, "stage3_gather_16bit_weights_on_model_save": True},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": [0.9, 0.999], "eps": 1e-3, "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[int, Job]:
    """All cases on one process and on two."""
    commands, sizes = {}, asked_for(request, "job")
    for world_size in sizes:
        folder = tmp_path_factory.mktemp(f"accelerate{world_size}")
        ask_for_cases(request, folder / WANTED)
        (folder / "ds_config.json").write_text(json.dumps(DS_CONFIG))
        commands[folder] = command_of(
            "accelerate",
            world_size=world_size,
            script=HERE / "accelerate_worker.py",
            more=("--main_process_port=0",),
        )
    shown = subprocess.run(
        [sys.executable, "-m", "dslaunch.drop_in"], check=True, stdout=subprocess.PIPE, text=True
    )
    return dict(zip(sizes, run(commands, PYTHONPATH=shown.stdout.strip()), strict=True))


def is_one_of_few(case: Case) -> bool:
    return case.name in FEW


every_case = pytest.mark.parametrize("case", few(CASES, is_one_of_few), ids=lambda case: case.name)


@pytest.fixture(params=WORLD_SIZES)
def job(request: pytest.FixtureRequest, jobs: dict[int, Job]) -> Job:
    return jobs[request.param]


@every_case
def test_every_step_is_that_of_plain_torch(job: Job, case: Case) -> None:
    ours, theirs = job.results[case.name], job.results[case.reference.name]
    assert len(ours["steps"]) == len(theirs["steps"]) == NUM_STEPS
    for (loss, norm, lr), (loss_there, norm_there, lr_there) in zip(
        ours["steps"], theirs["steps"], strict=True
    ):
        assert loss == pytest.approx(loss_there, abs=BF16 if case.bf16 else FP32, rel=0)
        assert norm == pytest.approx(norm_there, rel=BF16_NORM if case.bf16 else FP32, abs=0)
        assert lr == pytest.approx(lr_there, rel=1e-12)
    assert ours["last"] == pytest.approx(theirs["last"], abs=BF16 if case.bf16 else FP32, rel=0)
    assert ours["steps"][0][0] - ours["last"] > 20 * BF16  # it has learnt more than tolerances let pass


@every_case
def test_the_model_that_is_saved_is_the_one_that_was_trained(job: Job, case: Case) -> None:
    ours = job.results[case.name]
    assert ours["plain"] == "Qwen2ForCausalLM"
    assert ours["loaded"] == pytest.approx(ours["last"], abs=SAVED if case.bf16 else FP32, rel=0)
    weights = job.weights(case.name)
    assert largest_difference(weights, job.weights(case.reference.name)) <= (
        BF16_WEIGHTS if case.bf16 else WEIGHTS
    )
    if case.way == "dummy":
        assert largest_difference(weights, job.weights(case.name, "bare")) == 0


@pytest.mark.parametrize(
    "case", few([case for case in CASES if case.is_resumed], is_one_of_few), ids=lambda case: case.name
)
def test_a_run_goes_on_from_saved_states_as_if_it_had_not_stopped(job: Job, case: Case) -> None:
    ours = job.results[case.name]
    assert ours["resumed"] == ours["steps"][SAVED_STEP:]


def test_accelerate_knows_of_a_step_that_was_skipped(job: Job) -> None:
    """(whether it was, whether the learning rate is still the first):
    of a step with infinite gradients, and the next.
    """
    assert job.results["skip_step"]["skipped"] == [[True, True], [False, False]]
