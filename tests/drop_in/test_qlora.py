"""Adapters beside a base that bitsandbytes or torchao has quantized train on dslaunch as with DDP, where
each rank has all of the base.

Loss and norm: as in test_peft.py. Seen: 1.3e-7 of the loss, 1.1e-7 of the norm.
Adapters that TRL makes are bfloat16, which torch updates by themselves; here they have float32 masters, so
weights are rounded otherwise. Seen: 2.0e-5 of the loss.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.drop_in.jobs import WORLD_SIZES, Found, assert_close, assert_same_weights, of_case, run

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        any(find_spec(name) is None for name in ("peft", "bitsandbytes", "torchao")),
        reason="needs peft, bitsandbytes and torchao: pip install --group drop-in",
    ),
]
LOSS_RELATIVE, NORM_RELATIVE = 1e-6, 2e-6
WEIGHT_ABSOLUTE, LOGIT_ABSOLUTE = 2e-7, 1e-2  # merging quantizes again: a number may go to the next code
ROUNDED_LOSS, ROUNDED_NORM = 2e-4, 1e-2  # with adapters of bfloat16
HALF = 4  # of the micro batches
PADDED = 1.1  # units end in whole cache lines, which is much of a model of this size
KINDS = ["4 bits", "8 bits", "experts", "checkpointed", "DoRA", "torchao"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Found:
    return run("qlora_worker.py", tmp_path_factory.mktemp("qlora"), request)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("stage", ["stage 2", "stage 3"])
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_of_a_quantized_base_train_merge_and_load_as_with_ddp(
    found: Found, world_size: int, kind: str, stage: str
) -> None:
    pairs = zip(
        of_case(found, world_size, f"{kind}, {stage}"),
        of_case(found, world_size, f"{kind}, ddp"),
        strict=True,
    )
    for result, expected in pairs:
        assert_close(result["losses"], expected["losses"], relative=LOSS_RELATIVE)
        assert_close(result["norms"], expected["norms"], relative=NORM_RELATIVE)
        assert_same_weights(result["weights"], expected["weights"], absolute=WEIGHT_ABSOLUTE)
        assert_same_weights(result["logits"], expected["logits"], absolute=LOGIT_ABSOLUTE)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("stage", ["stage 2", "stage 3"])
def test_sft_trainer_trains_them_as_with_ddp(found: Found, world_size: int, stage: str) -> None:
    pairs = zip(
        of_case(found, world_size, f"sft, {stage}"), of_case(found, world_size, "sft, ddp"), strict=True
    )
    for result, expected in pairs:
        assert_close(result["losses"], expected["losses"], relative=ROUNDED_LOSS)
        assert_close(result["norms"], expected["norms"], relative=ROUNDED_NORM)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_run_that_resumes_goes_on_with_the_same_bits(found: Found, world_size: int) -> None:
    pairs = zip(
        of_case(found, world_size, "resumed, stage 3"),
        of_case(found, world_size, "4 bits, stage 3"),
        strict=True,
    )
    for result, expected in pairs:
        assert result["losses"] == expected["losses"][HALF:]
        assert result["weights"] == expected["weights"]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("kind", [*KINDS, "sft"])
def test_each_rank_keeps_its_share_of_the_packed_bytes(found: Found, world_size: int, kind: str) -> None:
    whole = of_case(found, world_size, f"{kind}, stage 2")
    for result, all_of_it in zip(of_case(found, world_size, f"{kind}, stage 3"), whole, strict=True):
        assert 0 < result["bytes"] <= PADDED * all_of_it["bytes"] / world_size
