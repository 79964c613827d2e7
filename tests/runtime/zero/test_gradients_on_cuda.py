"""Sharded gradients on a GPU: small ones are copied together, in little memory, and to the same bits."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dslaunch
from dslaunch.runtime.zero.gradients import sharded_gradients
from tests.fake_cuda.torch_cuda import device
from tests.runtime.models import assert_same_bits, make_config, make_model
from tests.runtime.ranks import Ranks

UNITS, PARAMS, WIDTH = 3, 8, 64
PARAM_BYTES = 2 * WIDTH * WIDTH  # in bfloat16


class Unit(nn.Module):
    """Some matrices, each used where it is computed again in the backward, one of them twice: autograd
    finishes its gradient twice.
    """

    unused = -1  # the place of a matrix

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH) for _ in range(PARAMS)
        )

    def forward(self, x: Tensor) -> Tensor:
        for index in (0, 1, *range(1, PARAMS)):
            if index != self.unused:
                product = partial(self._product, index)  # a backward of its own finishes the gradient
                x = x + torch.utils.checkpoint.checkpoint(product, x, use_reentrant=True)
        return x

    def _product(self, index: int, x: Tensor) -> Tensor:
        return x @ self.weights[index]


class Units(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Unit() for _ in range(UNITS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _trained(
    rank: int, small_bytes: int, waiting_bytes: int, unused: int = -1
) -> tuple[dict[str, int], int, dict[str, Tensor]]:
    """Launches of a backward, the most memory that it takes, and the shards of the sum of two."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded_gradients, "_SMALL_BYTES", small_bytes)
        patch.setattr(sharded_gradients, "_WAITING_BYTES", waiting_bytes)
        config = make_config(stage=2, bf16={"enabled": True}, gradient_accumulation_steps=3)
        config["zero_optimization"]["reduce_bucket_size"] = 1
        model = make_model(Units)
        for block in model.blocks:
            block.unused = unused
        engine, *_ = dslaunch.initialize(model=model, config=config)
        own = torch.ones(2, WIDTH, dtype=torch.bfloat16, device=engine.device, requires_grad=True)
        for number in range(2):
            loss = engine(own * (rank + 1)).float().pow(2).mean()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            device().clear_counters()
            engine.backward(loss)
            if number == 0:
                engine.step()
        at_most = torch.cuda.max_memory_allocated() - before
        launches = device().launches()
        launches["copies"] = device().copies().get("device to device", (0, 0))[0]
        shards: dict[str, Any] = {
            sub_buffer.label: sub_buffer.gradients.shard.cpu() for sub_buffer in engine._model.trained
        }
        engine.destroy()
    return launches, at_most, shards


@pytest.mark.parametrize(
    ("waiting", "num_launches"),
    [
        (PARAMS, UNITS * 2),  # all that came before the one that comes twice, and the rest
        (3, UNITS * 4),  # no more than three at a time
    ],
)
def test_small_gradients_of_a_unit_are_copied_together_to_the_same_bits(
    cuda_ranks: Ranks, waiting: int, num_launches: int
) -> None:
    one_by_one = cuda_ranks(_trained, 0, 0, world_size=2)
    together = cuda_ranks(_trained, PARAM_BYTES, waiting * PARAM_BYTES, world_size=2)
    for (plain, least, expected), (launches, at_most, shards) in zip(one_by_one, together, strict=True):
        assert_same_bits(shards, expected)
        assert plain.get("aten::_foreach_copy_", 0) == 0
        assert launches["aten::_foreach_copy_"] == num_launches
        assert plain["copies"] - launches["copies"] == UNITS * PARAMS
        assert at_most <= least + waiting * PARAM_BYTES


def test_of_a_unit_with_a_parameter_that_a_backward_does_not_reach_the_others_count(
    cuda_ranks: Ranks,
) -> None:
    for (_, _, expected), (launches, _, shards) in zip(
        cuda_ranks(_trained, 0, 0, 2, world_size=2),
        cuda_ranks(_trained, PARAM_BYTES, PARAMS * PARAM_BYTES, 2, world_size=2),
        strict=True,
    ):
        assert_same_bits(shards, expected)
        assert launches["aten::_foreach_copy_"] >= UNITS


def test_large_gradients_are_copied_at_once(cuda_ranks: Ranks) -> None:
    launches, at_most, _ = cuda_ranks(_trained, PARAM_BYTES - 1, 2**30, world_size=2)[0]
    plain, least, _ = cuda_ranks(_trained, 0, 0, world_size=2)[0]
    assert (launches, at_most) == (plain, least)


def _failed(rank: int) -> int:
    """A backward that ends in the middle of a unit leaves nothing for the next one."""
    config = make_config(stage=2, bf16={"enabled": True})
    engine, *_ = dslaunch.initialize(model=make_model(Units), config=config)
    own = torch.ones(2, WIDTH, dtype=torch.bfloat16, device=engine.device, requires_grad=True)
    (unit,) = {id(one): one for one in engine._model.trained[-1:]}.values()
    hook = unit.members[PARAMS // 2].param.register_hook(lambda grad: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        engine.backward(engine(own).float().pow(2).mean())
    hook.remove()
    engine.zero_grad()
    waiting = sum(len(one.gradients._waiting) for one in engine._model.trained)  # type: ignore[attr-defined]
    engine.destroy()
    return waiting


def test_a_backward_that_failed_leaves_no_gradient_that_waits(cuda_ranks: Ranks) -> None:
    assert cuda_ranks(_failed, world_size=2) == [0, 0]
