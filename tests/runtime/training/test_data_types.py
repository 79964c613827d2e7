"""data_types and communication_data_type: in which dtype gradients are added up and sent,
and what buffers become.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dslaunch
from dslaunch import ConfigError
from tests.runtime.models import assert_same_bits, make_config, make_model, snapshot, train_engine
from tests.runtime.ranks import Ranks

BF16 = {"enabled": True}
NUM_MICRO_BATCHES = 64


class OneNumber(nn.Module):
    """Its gradient is the input: 1 for the first micro batch, then so little that bfloat16
    drops it from the sum.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8))
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def _summed(rank: int, stage: int, changes: dict[str, Any]) -> tuple[Tensor, torch.dtype]:
    model = OneNumber()
    config = {
        **make_config(
            stage=stage, optimizer={"type": "SGD", "params": {"lr": 1.0}}, **{"bf16": BF16, **changes}
        ),
        "train_batch_size": NUM_MICRO_BATCHES * _world_size(),
        "gradient_accumulation_steps": NUM_MICRO_BATCHES,
    }
    engine, *_ = dslaunch.initialize(model=model, config=config)
    for micro in range(NUM_MICRO_BATCHES):
        x = torch.full((8,), 1.0 if micro == 0 else 2.0**-9, dtype=model.weight.dtype)
        engine.backward(engine(x))
        engine.step()
    master = dslaunch.zero.safe_get_full_fp32_param(model.weight)
    assert master is not None
    return master, model.scale.dtype


def _world_size() -> int:
    return torch.distributed.get_world_size()


EXACT = (1.0 + (NUM_MICRO_BATCHES - 1) * 2.0**-9) / NUM_MICRO_BATCHES


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_float32_sums_lose_nothing(ranks: Ranks, stage: int, world_size: int) -> None:
    changes = {"data_types": {"grad_accum_dtype": "fp32"}}
    for master, _ in ranks(_summed, stage, changes, world_size=world_size):
        assert torch.equal(master, torch.full((8,), -EXACT))


def test_bfloat16_sums_lose_what_is_small(ranks: Ranks) -> None:
    """Which is why the key exists."""
    in_bf16 = {"data_types": {"grad_accum_dtype": "bf16"}}
    for stage, world_size, changes in ((1, 1, {}), (1, 2, {}), (2, 2, in_bf16), (3, 2, in_bf16)):
        for master, _ in ranks(_summed, stage, changes, world_size=world_size):
            assert torch.equal(master, torch.full((8,), -1.0 / NUM_MICRO_BATCHES))


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("bf16", [False, True])
def test_sums_of_float16_are_as_exact_as_that_where_gradients_are_sharded(
    ranks: Ranks, stage: int, bf16: bool
) -> None:
    """2 to the -9th is added up in float16, which has three bits more than bfloat16, without a loss."""
    changes: dict[str, Any] = {"data_types": {"grad_accum_dtype": "fp16"}, "bf16": {"enabled": bf16}}
    for master, _ in ranks(_summed, stage, changes, world_size=2):
        assert torch.allclose(master, torch.full((8,), -EXACT), rtol=2**-10, atol=0)
        assert not torch.equal(master, torch.full((8,), -1.0 / NUM_MICRO_BATCHES))


def _summed_for_deepspeed(rank: int) -> bool:
    """At stage 1 gradients are added up as the model has them, and a program for DeepSpeed is
    not stopped for that.
    """
    masters = []
    for sums in ("bf16", None):
        engine, *_ = dslaunch.initialize(
            model=(model := make_model()),
            config=make_config(stage=1, data_types={"grad_accum_dtype": sums}),
            is_lenient=True,
        )
        train_engine(engine, steps=2)
        masters.append(snapshot(model.named_parameters()))
    assert_same_bits(*masters)
    return True


def test_narrow_sums_at_stage_1_are_a_warning_to_programs_for_deepspeed(ranks: Ranks) -> None:
    assert ranks(_summed_for_deepspeed, world_size=2) == [True, True]


@pytest.mark.parametrize("stage", [1, 3])
def test_buffers_become_what_is_asked_for(ranks: Ranks, stage: int) -> None:
    for name, dtype in ((None, torch.float32), ("bf16", torch.bfloat16)):
        changes = {"data_types": {"buffer_dtype": name}}
        assert ranks(_summed, stage, changes, world_size=1)[0][1] == dtype


def _kept(rank: int) -> dict[str, list[str]]:
    class Router(nn.Linear):
        _keep_in_fp32_modules_strict = ("bias_*",)

        def __init__(self) -> None:
            super().__init__(4, 4)
            self.register_buffer("bias_of_choice", torch.ones(4, dtype=torch.bfloat16))
            self.register_buffer("other", torch.ones(4, dtype=torch.bfloat16))

    said = {}
    for case, changes in (
        ("listed", {}),
        ("none", {"keep_in_fp32_modules": []}),
        ("named", {"keep_in_fp32_modules": ["0.oth*r"], "buffer_dtype": "fp16", "param_dtype": "bfloat16"}),
        ("float32", {"param_dtype": "fp32"}),
    ):
        model = nn.Sequential(Router())
        config = make_config(data_types=changes, bf16={"enabled": case != "float32"})
        dslaunch.initialize(model=model, config=config)[0].destroy()
        said[case] = [str(buffer.dtype).removeprefix("torch.") for buffer in model.buffers()]
    return said


def test_buffers_that_a_model_or_the_ds_config_names_stay_float32(ranks: Ranks) -> None:
    assert ranks(_kept, world_size=1)[0] == {
        "listed": ["float32", "bfloat16"],
        "none": ["bfloat16", "bfloat16"],
        "named": ["float16", "float32"],
        "float32": ["bfloat16", "bfloat16"],
    }


def _sent(rank: int, stage: int, changes: dict[str, Any]) -> tuple[int, dict[str, Tensor]]:
    model = make_model()
    engine, *_ = dslaunch.initialize(model=model, config=make_config(stage=stage, **changes))
    before = engine.comm_bytes().get("reduce_scatter", 0)
    dtype = torch.bfloat16 if engine.bfloat16_enabled() else torch.float32
    train_engine(engine, steps=2, dtype=dtype)
    return engine.comm_bytes()["reduce_scatter"] - before, snapshot(model.named_parameters())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_of_16_bits_are_sent_with_32(ranks: Ranks, stage: int) -> None:
    narrow = ranks(_sent, stage, {"bf16": BF16}, world_size=2)
    wide = ranks(_sent, stage, {"bf16": BF16, "communication_data_type": "fp32"}, world_size=2)
    assert wide[0][0] == 2 * narrow[0][0]
    assert_same_bits(wide[0][1], wide[1][1])
    accumulated = ranks(
        _sent,
        1,
        {"bf16": BF16, "data_types": {"grad_accum_dtype": "float32"}},
        world_size=2,
    )
    assert_same_bits(
        wide[0][1], accumulated[0][1]
    )  # one way or the other: the ranks' gradients meet in float32


def test_gradients_of_32_bits_are_sent_with_16_where_they_are_sharded(ranks: Ranks) -> None:
    one_unit = {"reduce_bucket_size": 10_000}
    half = ranks(_sent, 2, {"communication_data_type": "bf16", **one_unit}, world_size=2)
    full = ranks(_sent, 2, one_unit, world_size=2)
    # Each sub-buffer is padded to 256 bytes per rank, whatever its dtype.
    assert half[0][0] == pytest.approx(full[0][0] / 2, rel=0.1)


def _refused(rank: int) -> list[str]:
    messages = []
    for changes in (
        {"communication_data_type": "bf16"},
        {"data_types": {"grad_accum_dtype": "bf16"}},
        {"bf16": BF16, "data_types": {"grad_accum_dtype": "fp16"}},
    ):
        with pytest.raises(ConfigError) as caught:
            dslaunch.initialize(model=make_model(), config=make_config(stage=1, **changes))
        messages.append(str(caught.value))
    return messages


def test_what_has_no_meaning_is_refused(ranks: Ranks) -> None:
    narrower, sums, other = ranks(_refused, world_size=2)[0]
    assert narrower.startswith(
        "communication_data_type is narrower than parameter 'first.weight', which is torch.float32"
    )
    assert sums.startswith(
        "data_types.grad_accum_dtype torch.bfloat16 is neither float32 nor the model's dtype, torch.float32"
    )
    assert other.startswith(
        "data_types.grad_accum_dtype torch.float16 is neither float32 nor the model's dtype, torch.bfloat16"
    )
