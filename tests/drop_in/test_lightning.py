"""Lightning's DeepSpeedStrategy, of its Trainer and of Fabric, trains on dslaunch as DDPStrategy does.

Tolerances: see test_peft.py. Seen: 1.9e-7 of the loss, 6e-8 in weights.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.drop_in.jobs import WORLD_SIZES, Found, assert_close, assert_same_weights, of_case, run

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("lightning") is None, reason="needs lightning: pip install --group drop-in"),
]
LOSS_RELATIVE = 1e-6
WEIGHT_ABSOLUTE = 3e-7
TRAINED = ["stage 1", "stage 2", "stage 3", "stage 3, made sharded"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Found:
    return run("lightning_worker.py", tmp_path_factory.mktemp("lightning"), request)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("case", TRAINED)
def test_fit_accumulates_clips_and_steps_as_with_ddp(found: Found, world_size: int, case: str) -> None:
    for result, expected in zip(
        of_case(found, world_size, case), of_case(found, world_size, "ddp"), strict=True
    ):
        assert_close(result["losses"], expected["losses"], relative=LOSS_RELATIVE)
        assert (result["global_step"], result["lr"]) == (expected["global_step"], expected["lr"])
        assert result["clip"] == 0.05


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize(
    ("case", "reference"),
    [("stage 2, not clipped", "ddp, divided twice"), ("stage 2, made up for", "ddp, not clipped")],
)
def test_lightning_and_the_engine_both_divide_by_the_batches_that_are_accumulated(
    found: Found, world_size: int, case: str, reference: str
) -> None:
    """As with DeepSpeed. A norm that is clipped hides it: what is clipped does not depend on a factor."""
    pairs = zip(of_case(found, world_size, case), of_case(found, world_size, reference), strict=True)
    for result, expected in pairs:
        assert_close(result["losses"], expected["losses"], relative=LOSS_RELATIVE)
        assert_same_weights(result["weights"], expected["weights"], absolute=WEIGHT_ABSOLUTE)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("case", TRAINED)
def test_a_checkpoint_becomes_lightnings_single_file(found: Found, world_size: int, case: str) -> None:
    for result, expected in zip(
        of_case(found, world_size, case), of_case(found, world_size, "ddp"), strict=True
    ):
        assert_same_weights(result["weights"], expected["weights"], absolute=WEIGHT_ABSOLUTE)
        assert {"epoch", "global_step", "loops", "lr_schedulers", "pytorch-lightning_version"} <= set(
            result["kept"]
        )


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("case", ["stage 2, resumed", "stage 3, resumed"])
def test_fit_goes_on_from_a_checkpoint_as_with_ddp(found: Found, world_size: int, case: str) -> None:
    pairs = zip(of_case(found, world_size, case), of_case(found, world_size, "ddp, resumed"), strict=True)
    for result, expected in pairs:
        assert_close(result["losses"], expected["losses"], relative=LOSS_RELATIVE)
        assert (result["global_step"], result["lr"]) == (expected["global_step"], expected["lr"])
        assert_same_weights(result["weights"], expected["weights"], absolute=WEIGHT_ABSOLUTE)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("case", ["validated, stage 2", "validated, stage 3"])
def test_a_checkpoint_is_evaluated_without_an_optimizer(found: Found, world_size: int, case: str) -> None:
    pairs = zip(of_case(found, world_size, case), of_case(found, world_size, "validated, ddp"), strict=True)
    for result, expected in pairs:
        assert_close(result["losses"], expected["losses"], relative=LOSS_RELATIVE)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("case", ["in turn, stage 2", "in turn, stage 3"])
def test_one_trainer_fits_validates_tests_predicts_and_fits_again_as_with_ddp(
    found: Found, world_size: int, case: str
) -> None:
    pairs = zip(of_case(found, world_size, case), of_case(found, world_size, "in turn, ddp"), strict=True)
    for result, expected in pairs:
        assert_close(result["losses"], expected["losses"], relative=LOSS_RELATIVE)
        assert result["counts"] == expected["counts"]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("case", ["fabric, stage 2", "fabric, stage 3"])
def test_a_loop_of_ones_own_with_fabric_trains_saves_and_loads_as_with_ddp(
    found: Found, world_size: int, case: str
) -> None:
    pairs = zip(of_case(found, world_size, case), of_case(found, world_size, "fabric, ddp"), strict=True)
    for result, expected in pairs:
        assert_close(result["losses"], expected["losses"], relative=LOSS_RELATIVE)
        assert result["losses"][4:] == result["losses"][2:4]  # the checkpoint lies before these
        assert result["seen"] == 2


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_model_that_is_made_in_configure_model_is_sharded_at_once(found: Found, world_size: int) -> None:
    assert [one["was_sharded"] for one in of_case(found, world_size, "stage 3, made sharded")] == [
        True
    ] * world_size
    assert [one["was_sharded"] for one in of_case(found, world_size, "stage 3")] == [False] * world_size


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_stage_3_with_lightnings_defaults_trains_sums_up_and_saves(found: Found, world_size: int) -> None:
    results, expected = (
        of_case(found, world_size, "stage 3, defaults"),
        of_case(found, world_size, "ddp, defaults"),
    )
    for result, other in zip(results, expected, strict=True):
        assert_close(result["losses"], other["losses"], relative=LOSS_RELATIVE)
        assert result["counts"][0] == other["whole"]
        assert result["is_saved"]
    assert sum(result["counts"][1] for result in results) == expected[0]["whole"]
