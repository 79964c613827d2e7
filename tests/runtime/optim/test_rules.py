"""The fused Adam over shards, against torch's over parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dslaunch.runtime.optim.adam import AdamRule, Shard
from dslaunch.runtime.zero.layout import Segment

N, CUT = 301, 117  # two groups that meet at an odd place; the last element belongs to none
JOINT = 64  # where one piece of the gradient ends and the next begins
SEGMENTS = (Segment(group=0, offset=0, numel=CUT), Segment(group=1, offset=CUT, numel=N - 1 - CUT))
SCALE = 0.37
# Two fused float32 kernels that round in different places; values up to 4, four steps. Seen: 1.2e-7.
ROUNDING = 1e-6


def _data(seed: int) -> Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(seed))


def _run_rule(
    update: Callable[..., None], groups: list[dict[str, Any]], *, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    master = _data(0)
    out = None if dtype == torch.float32 else torch.zeros(N, dtype=dtype)
    exp_avg, exp_avg_sq = torch.zeros(N), torch.zeros(N)
    for step in range(1, 5):
        grad = _data(step).to(dtype)
        shard = Shard(
            master=master,
            grads=((0, grad[:JOINT]), (JOINT, grad[JOINT:])),
            param_out=out,
            exp_avg=exp_avg,
            exp_avg_sq=exp_avg_sq,
            segments=SEGMENTS,
        )
        update(shard, groups, step=step, grad_scale=SCALE)
    return master, out


def _run_torch(
    kind: type[torch.optim.Optimizer], groups: list[dict[str, Any]], *, dtype: torch.dtype
) -> Tensor:
    whole = _data(0)
    parts = [torch.nn.Parameter(whole[:CUT].clone()), torch.nn.Parameter(whole[CUT : N - 1].clone())]
    optimizer = kind([{**group, "params": [part]} for group, part in zip(groups, parts, strict=True)])  # type: ignore[call-arg]
    for step in range(1, 5):
        grad = _data(step).to(dtype).float()
        parts[0].grad, parts[1].grad = grad[:CUT] * SCALE, grad[CUT : N - 1] * SCALE
        optimizer.step()
    return torch.cat([*(part.detach() for part in parts), whole[N - 1 :]])


ADAM_GROUPS = [
    {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.3},
    {"lr": 0.02, "betas": (0.8, 0.999), "eps": 1e-6, "weight_decay": 0.0},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_torch", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_adam(kind: type[torch.optim.Optimizer], with_torch: bool, dtype: torch.dtype) -> None:
    rule = AdamRule(adam_w_mode=kind is torch.optim.AdamW)
    assert rule.name == kind.__name__
    update = rule.update_with_torch if with_torch else rule.update  # the former is what a GPU gets
    master, out = _run_rule(update, ADAM_GROUPS, dtype=dtype)
    torch.testing.assert_close(master, _run_torch(kind, ADAM_GROUPS, dtype=dtype), rtol=0, atol=ROUNDING)
    if out is not None:
        assert torch.equal(out[: N - 1], master[: N - 1].to(dtype))
        assert out[N - 1] == 0  # padding
