"""transformers' Trainer on dslaunch, through `import deepspeed`: every number is that of plain torch."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest

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
from tests.drop_in.trainer_cases import CASES, FEW, NUM_STEPS, SAVED_STEP, WANTED, Case
from tests.exhaustive import few

pytestmark = [requires_hugging_face, pytest.mark.slow, pytest.mark.timeout(LIMIT_S + 30)]


VOCAB, WIDTH = 64, 32  # of small_training.py, which only the workers import


class Tolerance(NamedTuple):
    """How far a number may be from that of plain torch."""

    loss: float
    norm: float  # as a part of it
    weight: float  # of an element, of 1 at most; after six updates of up to 2e-2 each
    saved: float  # between the losses of one model, in its own precision and in float32


FP32 = Tolerance(5e-6, 5e-6, 2e-6, 5e-6)  # ten roundings of a loss of about 4
# The reference adds gradients of bf16 up in 16 bits, and takes their norm there; dslaunch does both in 32.
# A weight may be two steps of bf16, from 1 to 2, away.
BF16 = Tolerance(6e-3, 2**-6, 2**-6, 2**-9)
FP16 = Tolerance(*(number / 4 for number in BF16))  # two bits more, and a reference in float32


def tolerance(case: Case) -> Tolerance:
    return BF16 if case.bf16 else FP16 if case.fp16 else FP32


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[int, Job]:
    """All cases on one process, which torchrun starts, and on two, which dslaunch starts."""
    script = HERE / "trainer_worker.py"
    starters = {1: ("torchrun", "--standalone"), 2: ("dslaunch", "--preload=torch,transformers.trainer")}
    commands, sizes = {}, asked_for(request, "job")
    for world_size in sizes:
        folder = tmp_path_factory.mktemp(f"trainer{world_size}")
        ask_for_cases(request, folder / WANTED)
        program, *more = starters[world_size]
        commands[folder] = command_of(program, world_size=world_size, script=script, more=tuple(more))
    return dict(zip(sizes, run(commands, DSLAUNCH_DROP_IN="always"), strict=True))


@pytest.fixture(params=WORLD_SIZES)
def job(request: pytest.FixtureRequest, jobs: dict[int, Job]) -> Job:
    return jobs[request.param]


def is_one_of_few(case: Case) -> bool:
    return case.name in FEW


every_case = pytest.mark.parametrize("case", few(CASES, is_one_of_few), ids=lambda case: case.name)


def check_steps(ours: list[Any], theirs: list[Any], limit: Tolerance) -> None:
    """Compare every step's loss, and its gradients' norm before clipping."""
    assert len(ours) == len(theirs)
    for (loss, norm), (loss_there, norm_there) in zip(ours, theirs, strict=True):
        assert loss == pytest.approx(loss_there, abs=limit.loss, rel=0)
        assert norm == pytest.approx(norm_there, rel=limit.norm, abs=0)


@every_case
def test_every_step_and_evaluation_is_that_of_plain_torch(job: Job, case: Case) -> None:
    ours, theirs = job.results[case.name], job.results[case.reference.name]
    assert len(ours["steps"]) == NUM_STEPS
    check_steps(ours["steps"], theirs["steps"], tolerance(case))
    assert ours["evaluations"] == pytest.approx(theirs["evaluations"], abs=tolerance(case).loss, rel=0)
    assert ours["steps"][0][0] - ours["last"] > 20 * BF16.loss  # it has learnt more than tolerances let pass


@every_case
def test_the_model_that_is_saved_is_the_one_that_was_trained(job: Job, case: Case) -> None:
    ours = job.results[case.name]
    assert ours["loaded"] == pytest.approx(ours["last"], abs=tolerance(case).saved, rel=0)
    difference = largest_difference(job.weights(case.name), job.weights(case.reference.name))
    assert difference <= tolerance(case).weight


@pytest.mark.parametrize(
    "case", few([case for case in CASES if case.is_resumed], is_one_of_few), ids=lambda case: case.name
)
def test_a_run_that_is_resumed_goes_on_as_if_it_had_not_stopped(job: Job, case: Case) -> None:
    ours = job.results[case.name]
    assert ours["resumed"] == ours["steps"][SAVED_STEP:]


def extras(*names: str) -> pytest.MarkDecorator:
    """Runs of trainer_worker.py beside the cases, by function and stage; the first one in `make test`."""
    return pytest.mark.parametrize("extra", few(names, lambda name: name == names[0]))


@extras("keep_best-3", "keep_best-1", "keep_best-2")
def test_the_best_model_is_the_one_at_the_end(job: Job, extra: str) -> None:
    ours, theirs = job.results[extra], job.results["keep_best-None"]
    assert (ours["best"], theirs["best"]) == ("checkpoint-2", "checkpoint-2")
    assert ours["evaluations"] == pytest.approx(theirs["evaluations"], abs=FP32.loss, rel=0)
    assert ours["last"] == ours["evaluations"][0]
    assert ours["last"] != pytest.approx(ours["evaluations"][2], abs=20 * FP32.loss, rel=0)


@extras("only_evaluate-3")
def test_an_engine_without_an_optimizer_evaluates_and_predicts(job: Job, extra: str) -> None:
    ours, theirs = job.results[extra], job.results["only_evaluate-None"]
    assert ours["before"] == pytest.approx(theirs["before"], abs=FP32.loss, rel=0)
    assert ours["logits"] == pytest.approx(theirs["logits"], abs=FP32.loss, rel=0)
    assert any(not math.isclose(one, ours["logits"][0], abs_tol=0.1) for one in ours["logits"])


@extras("generate-3", "generate-2")
def test_what_is_generated_is_the_same_to_the_token(job: Job, extra: str) -> None:
    """Stage 3 has the hard case: ranks stop at different lengths, and the parameters of each step
    are gathered by all.
    """
    ours, theirs = job.results[extra], job.results["generate-None"]
    assert ours["predicted"] == theirs["predicted"]
    assert ours["by_hand"] == theirs["by_hand"]
    assert len({tuple(row) for row in ours["predicted"]}) > 1


@extras("add_tokens-3")
@pytest.mark.parametrize("name", ["tied", "untied"])
def test_a_model_that_gets_more_tokens_trains_saves_and_loads_at_stage_3(
    job: Job, extra: str, name: str
) -> None:
    ours, theirs = job.results[extra][name], job.results["add_tokens-None"][name]
    check_steps(ours["steps"], theirs["steps"], FP32)
    assert ours["is_tied"] is theirs["is_tied"] is (name == "tied")
    for values, expected in zip(ours["weights"], theirs["weights"], strict=True):
        assert len(values) == (VOCAB + 7) * WIDTH
        assert values == pytest.approx(expected, abs=FP32.weight, rel=0)
    assert ours["loaded"] == pytest.approx(theirs["loaded"], abs=FP32.loss, rel=0)
