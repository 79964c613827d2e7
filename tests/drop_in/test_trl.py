"""TRL's trainers train on dslaunch as on torch, through `import deepspeed`: SFT and DPO, and GRPO, RLOO
and online DPO, whose answers the model samples while it is trained.

Tolerances: see test_peft.py.

The loss of DPO comes from a difference of sums over words, each about fifty times as large as the loss. Seen:
1.9e-7 with SFT, 1.7e-6 with DPO.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.drop_in.jobs import WORLD_SIZES, Found, assert_close, assert_same_weights, of_case, run

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("trl") is None, reason="needs trl: pip install --group drop-in"),
]
LOSS_RELATIVE = {"sft": 1e-6, "dpo": 1e-5, "grpo": 1e-5, "rloo": 1e-5, "odpo": 1e-5}
LOSS_ABSOLUTE = 5e-7
NORM_RELATIVE = 2e-6
WEIGHT_ABSOLUTE = 2e-7
CASES = [
    ("sft, stage 2", "sft, ddp"),
    ("sft, stage 3", "sft, ddp"),
    ("sft lora, stage 3", "sft lora, ddp"),
    ("dpo, stage 2", "dpo, ddp"),
    ("dpo, stage 3", "dpo, ddp"),
    ("dpo lora, stage 3", "dpo lora, ddp"),
    ("dpo precomputed, stage 2", "dpo, ddp"),
    ("dpo synced, stage 3", "dpo synced, ddp"),
    ("grpo, stage 2", "grpo, ddp"),
    ("grpo, stage 3", "grpo, ddp"),
    ("grpo ungathered, stage 3", "grpo, ddp"),
    ("grpo lora, stage 3", "grpo lora, ddp"),
    ("rloo, stage 3", "rloo, ddp"),
    ("odpo, stage 2", "odpo, ddp"),
    ("odpo, stage 3", "odpo, ddp"),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Found:
    return run("trl_worker.py", tmp_path_factory.mktemp("trl"), request)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize(("case", "reference"), CASES)
def test_a_trainer_trains_as_with_ddp(found: Found, world_size: int, case: str, reference: str) -> None:
    pairs = zip(of_case(found, world_size, case), of_case(found, world_size, reference), strict=True)
    for result, expected in pairs:
        kind = case.split()[0].rstrip(",")
        # advantages of the answers to a prompt add up to zero, and so do losses
        absolute = LOSS_ABSOLUTE if kind in ("grpo", "rloo") else 0.0
        assert_close(result["losses"], expected["losses"], relative=LOSS_RELATIVE[kind], absolute=absolute)
        assert_close(result["norms"], expected["norms"], relative=NORM_RELATIVE)
        assert_same_weights(result["weights"], expected["weights"], absolute=WEIGHT_ABSOLUTE)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize(
    ("case", "reference"), [pair for pair in CASES if pair[0].startswith("sft")]
)  # with LoRA each layer's parameters come when it runs, else all are gathered
def test_a_model_generates_in_the_middle_of_training(
    found: Found, world_size: int, case: str, reference: str
) -> None:
    pairs = zip(of_case(found, world_size, case), of_case(found, world_size, reference), strict=True)
    for result, expected in pairs:
        assert all(len(row) > 3 for row in result["tokens"])
        assert result["tokens"] == expected["tokens"]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize(("case", "is_sharded"), [("dpo, stage 2", False), ("dpo, stage 3", True)])
def test_the_reference_model_is_an_engine_without_an_optimizer(
    found: Found, world_size: int, case: str, is_sharded: bool
) -> None:
    for result in of_case(found, world_size, case):
        assert result["reference"] == {"is engine": True, "stage": 3 if is_sharded else 0, "optimizer": None}


@pytest.mark.parametrize("world_size", [2])
def test_nothing_grows_in_200_steps(found: Found, world_size: int) -> None:
    """The first steps fill caches: the last ones are compared with those after 50."""
    for result in of_case(found, world_size, "grpo long, stage 3"):
        assert len(result["held"]) == 200
        then, now = result["held"][50], result["held"][-1]
        assert now[0] <= then[0]
        assert now[1] <= then[1] + 16 * 2**20
        assert now[2] <= then[2]
