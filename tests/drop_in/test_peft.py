"""PEFT's adapters under transformers' Trainer train on dslaunch as on torch, through `import deepspeed`.

Loss: a mean over words in float32, whose last bit is 1.2e-7 of it; ZeRO's sums go in another order than
DDP's, and four updates pass that on. Seen: 6.3e-8 of the loss, 1.1e-7 of the norm of the gradient.
Weights: an update is at most lr = 1e-2 times a ratio of moments that has that error, and a weight below 1 is
rounded. Seen: 1.5e-8.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.drop_in.jobs import WORLD_SIZES, Found, assert_close, assert_same_weights, of_case, run

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("peft") is None, reason="needs peft: pip install --group drop-in"),
]
LOSS_RELATIVE = 1e-6
NORM_RELATIVE = 2e-6
WEIGHT_ABSOLUTE = 2e-7
HALF = 4  # of the micro batches


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Found:
    return run("peft_worker.py", tmp_path_factory.mktemp("peft"), request)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("case", ["stage 2", "stage 3", "stage 3, read under zero.Init"])
def test_adapters_train_as_with_ddp(found: Found, world_size: int, case: str) -> None:
    pairs = zip(of_case(found, world_size, case), of_case(found, world_size, "ddp"), strict=True)
    for result, expected in pairs:
        assert result["trained"] == expected["trained"]
        assert len(result["losses"]) == 2 * HALF
        assert_close(result["losses"], expected["losses"], relative=LOSS_RELATIVE)
        assert_close(result["norms"], expected["norms"], relative=NORM_RELATIVE)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("case", ["stage 2", "stage 3", "stage 3, read under zero.Init"])
def test_saved_adapters_are_loaded_again_by_peft(found: Found, world_size: int, case: str) -> None:
    for result, expected in zip(
        of_case(found, world_size, case), of_case(found, world_size, "ddp"), strict=True
    ):
        assert_same_weights(result["weights"], expected["weights"], absolute=WEIGHT_ABSOLUTE)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("case", ["modules, stage 2", "modules, stage 3"])
def test_whole_modules_beside_the_adapters_train_as_with_ddp(
    found: Found, world_size: int, case: str
) -> None:
    pairs = zip(of_case(found, world_size, case), of_case(found, world_size, "modules, ddp"), strict=True)
    for result, expected in pairs:
        assert any("modules_to_save" in name for name in result["weights"])
        assert result["trained"] == expected["trained"]
        assert_close(result["losses"], expected["losses"], relative=LOSS_RELATIVE)
        assert_same_weights(result["weights"], expected["weights"], absolute=WEIGHT_ABSOLUTE)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize(
    ("case", "whole"),
    [("stage 2, resumed", "stage 2"), ("stage 3, resumed", "stage 3, read under zero.Init")],
)
def test_a_run_that_resumes_from_trained_parameters_alone_goes_on_with_the_same_bits(
    found: Found, world_size: int, case: str, whole: str
) -> None:
    for result, expected in zip(
        of_case(found, world_size, case), of_case(found, world_size, whole), strict=True
    ):
        assert expected["kept"]
        assert all("lora_" in name for name in expected["kept"])
        assert result["losses"] == expected["losses"][HALF:]
        assert result["weights"] == expected["weights"]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_base_that_is_read_under_zero_init_is_sharded_and_the_adapters_come_to_it(
    found: Found, world_size: int
) -> None:
    assert [one["was_sharded"] for one in of_case(found, world_size, "stage 3")] == [False] * world_size
    read = of_case(found, world_size, "stage 3, read under zero.Init")
    assert [one["was_sharded"] for one in read] == [True] * world_size
