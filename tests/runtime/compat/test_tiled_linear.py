"""TiledLinear beside torch.nn.Linear, alone and trained at ZeRO stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dslaunch
from dslaunch.runtime.compat.tiled_linear import TiledLinear, TiledLinearReturnBias
from dslaunch.runtime.errors import ConfigError
from tests.runtime.ranks import Ranks

CLOSE = 2e-5  # of float32 values near 1: sums in another order, and some Adam steps


class ReturnsBias(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return x @ self.weight.T, self.bias


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("splits", [(1, 1), (3, 1), (1, 4), (3, 4), (7, 15)])
def test_it_computes_what_linear_does(splits: tuple[int, int], bias: bool) -> None:
    linear = nn.Linear(7, 15, bias=bias)
    tiled = TiledLinear(7, 15, bias=bias, in_splits=splits[0], out_splits=splits[1], init_linear=linear)
    x, y = (torch.randn(2, 5, 7).requires_grad_() for _ in range(2))
    y.data.copy_(x.data)
    made, expected = tiled(x), linear(y)
    torch.testing.assert_close(made, expected)
    made.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    rows = [torch.cat([tile.weight.grad for tile in row], dim=1) for row in tiled.linears]
    torch.testing.assert_close(torch.cat(rows), linear.weight.grad)
    assert sum(one.numel() for one in tiled.parameters()) == sum(one.numel() for one in linear.parameters())


def test_parts_come_in_and_go_out_as_lists_and_a_bias_apart() -> None:
    linear, x = nn.Linear(7, 15), torch.randn(5, 7)
    options: dict[str, Any] = {"in_splits": 2, "out_splits": 3, "init_linear": linear}
    apart = TiledLinear(7, 15, input_is_already_split=True, combine_out_splits=False, **options)
    parts = apart(x.split([4, 3], dim=-1))
    assert [part.shape[-1] for part in parts] == [5, 5, 5]
    torch.testing.assert_close(torch.cat(parts, dim=-1), linear(x))
    output, bias = TiledLinearReturnBias(7, 15, linear_cls=ReturnsBias, **options)(x)
    torch.testing.assert_close(output + bias, linear(x))
    assert TiledLinearReturnBias(7, 15, bias=False, linear_cls=ReturnsBias, in_splits=2)(x)[1] is None


def test_what_does_not_fit_is_refused() -> None:
    for splits in ({"in_splits": 0}, {"in_splits": 8}, {"out_splits": 16}):
        with pytest.raises(RuntimeError, match="must be from 1 to"):
            TiledLinear(7, 15, **splits)
    with pytest.raises(ConfigError, match=r"the weight is \[15, 8\] and must be \[15, 7\]"):
        TiledLinear(7, 15).copy_params_from(nn.Linear(8, 15))
    with pytest.raises(ConfigError, match="both need a bias"):
        TiledLinear(7, 15).copy_params_from(nn.Linear(7, 15, bias=False))
    with pytest.raises(ConfigError, match="given 3 parts of inputs, and in_splits is 2"):
        TiledLinear(7, 15, in_splits=2, input_is_already_split=True)(torch.ones(7).split([3, 3, 1]))


class Model(nn.Module):
    def __init__(self, *, is_tiled: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(7, 15), nn.Linear(15, 1)
        self.source = nn.Linear(15, 15)
        self.middle = (
            TiledLinear(15, 15, in_splits=2, out_splits=3, init_linear=self.source)
            if is_tiled
            else self.source
        )

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))
        return made


def _trained(rank: int, stage: int) -> None:
    plain, model = Model(is_tiled=False), Model(is_tiled=True)
    del model.source
    zero = {
        "stage": stage,
        "stage3_param_persistence_threshold": 0,
        "reduce_bucket_size": 50,
        "stage3_prefetch_bucket_size": 50,
    }
    config = {
        "train_batch_size": 12,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
        "zero_optimization": zero,
    }
    engine, *_ = dslaunch.initialize(model=model, config=config)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.1)
    for step in range(5):
        torch.manual_seed(step)
        x = torch.randn(12, 7)
        loss = engine(x[6 * rank : 6 * rank + 6]).square().mean()
        engine.backward(loss)
        engine.step()
        optimizer.zero_grad()
        plain(x).square().mean().backward()
        optimizer.step()
        norm = torch.stack([one.grad.norm() for one in plain.parameters() if one.grad is not None]).norm()
        torch.testing.assert_close(engine.get_global_grad_norm(), norm.item(), rtol=1e-4, atol=1e-5)
    with dslaunch.zero.GatheredParameters(engine.parameters()):
        rows = [torch.cat([tile.weight for tile in row], dim=1) for row in model.middle.linears]  # type: ignore[union-attr,arg-type]
        torch.testing.assert_close(torch.cat(rows), plain.middle.weight, rtol=CLOSE, atol=CLOSE)
        torch.testing.assert_close(model.first.weight, plain.first.weight, rtol=CLOSE, atol=CLOSE)
    # Whose values count is rank 0's.
    torch.manual_seed(100 + rank)
    other = nn.Linear(15, 15)
    model.middle.copy_params_from(other)  # type: ignore[operator]
    x = torch.randn(6, 15)
    made, (weight, bias) = engine.module.middle(x), (other.weight.detach(), other.bias.detach())
    for value in (weight, bias):
        torch.distributed.broadcast(value, 0)
    torch.testing.assert_close(made, x @ weight.T + bias, rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_it_trains_and_takes_values_over_as_linear_does(ranks: Ranks, stage: int) -> None:
    ranks(_trained, stage, world_size=2)


def _made_sharded(rank: int) -> None:
    config = {
        "train_batch_size": 2,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 50},
    }
    torch.manual_seed(0)
    linear = nn.Linear(15, 17)
    with dslaunch.zero.Init(config_dict_or_path=config):
        tiled = TiledLinear(15, 17, in_splits=2, out_splits=3, init_linear=linear)
    engine, *_ = dslaunch.initialize(model=tiled, config=config)
    x = torch.randn(6, 15)
    torch.testing.assert_close(engine(x), linear(x), rtol=CLOSE, atol=CLOSE)


def test_it_can_be_made_sharded_from_a_linear_layer(ranks: Ranks) -> None:
    ranks(_made_sharded, world_size=2)
