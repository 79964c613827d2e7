"""The update formulas over shards, against torch's optimizers over parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dslaunch import ConfigError
from dslaunch.runtime.optim.adam import AdamRule
from dslaunch.runtime.optim.rule import Rule, Shard
from dslaunch.runtime.optim.sgd import SgdRule
from dslaunch.runtime.zero.layout import Segment

N, CUT = 301, 117  # two groups that meet at an odd place; the last element belongs to none
SEGMENTS = (Segment(group=0, offset=0, numel=CUT), Segment(group=1, offset=CUT, numel=N - 1 - CUT))
SCALE = 0.37
# Two fused float32 kernels that round in different places; values up to 4, four steps. Seen: 1.2e-7.
ROUNDING = 1e-6


class _Adam:
    """AdamRule on torch's fused kernel, which is what a GPU gets."""

    def __init__(self, rule: AdamRule) -> None:
        self.name, self.state_names = rule.name, rule.state_names
        self.update = rule.update_with_torch


def _data(seed: int) -> Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(seed))


def _run_rule(
    rule: Rule, groups: list[dict[str, Any]], *, bf16: bool = False
) -> tuple[Tensor, Tensor | None]:
    master = _data(0)
    out = torch.zeros(N, dtype=torch.bfloat16) if bf16 else None
    states = {name: torch.zeros(N) for name in rule.state_names}
    for step in range(1, 5):
        grad = _data(step).bfloat16() if bf16 else _data(step)
        shard = Shard(master=master, grad=grad, param_out=out, segments=SEGMENTS)
        rule.update(shard, states, groups, step=step, grad_scale=SCALE)
    return master, out


def _run_torch(
    kind: type[torch.optim.Optimizer], groups: list[dict[str, Any]], *, bf16: bool = False
) -> Tensor:
    whole = _data(0)
    parts = [torch.nn.Parameter(whole[:CUT].clone()), torch.nn.Parameter(whole[CUT : N - 1].clone())]
    optimizer = kind([{**group, "params": [part]} for group, part in zip(groups, parts, strict=True)])  # type: ignore[call-arg]
    for step in range(1, 5):
        grad = _data(step).bfloat16().float() if bf16 else _data(step)
        parts[0].grad, parts[1].grad = grad[:CUT] * SCALE, grad[CUT : N - 1] * SCALE
        optimizer.step()
    return torch.cat([*(part.detach() for part in parts), whole[N - 1 :]])


ADAM_GROUPS = [
    {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.3},
    {"lr": 0.02, "betas": (0.8, 0.999), "eps": 1e-6, "weight_decay": 0.0},
]


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("with_torch", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_adam(kind: type[torch.optim.Optimizer], with_torch: bool, bf16: bool) -> None:
    rule = AdamRule(adam_w_mode=kind is torch.optim.AdamW)
    assert rule.name == kind.__name__
    master, out = _run_rule(_Adam(rule) if with_torch else rule, ADAM_GROUPS, bf16=bf16)
    torch.testing.assert_close(master, _run_torch(kind, ADAM_GROUPS, bf16=bf16), rtol=0, atol=ROUNDING)
    if out is not None:
        assert torch.equal(out[: N - 1], master[: N - 1].bfloat16())
        assert out[N - 1] == 0  # padding


SGD_GROUPS = [
    {"lr": 0.1, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.3, "nesterov": False},
    {"lr": 0.02, "momentum": 0.8, "dampening": 0.0, "weight_decay": 0.0, "nesterov": True},
]
PLAIN_SGD = [{"lr": 0.1, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.1, "nesterov": False}] * 2


@pytest.mark.parametrize("groups", [SGD_GROUPS, PLAIN_SGD])
def test_sgd_has_torchs_bits(groups: list[dict[str, Any]]) -> None:
    rule = SgdRule(has_momentum=groups is SGD_GROUPS)
    master, _ = _run_rule(rule, groups)
    assert torch.equal(master, _run_torch(torch.optim.SGD, groups))


def test_sgd_rounds_into_bf16_parameters() -> None:
    master, out = _run_rule(SgdRule(has_momentum=True), SGD_GROUPS, bf16=True)
    assert torch.equal(master, _run_torch(torch.optim.SGD, SGD_GROUPS, bf16=True))
    assert out is not None
    assert torch.equal(out[: N - 1], master[: N - 1].bfloat16())


def test_momentum_that_begins_after_the_states_were_made_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"SGD was made with momentum 0 and now has 0\.9"):
        _run_rule(SgdRule(has_momentum=False), SGD_GROUPS)
