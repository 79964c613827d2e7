"""At stage 3 forwards are the same on all ranks, and each rank's loss may reach other parts of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dslaunch
from dslaunch.utils import safe_get_full_fp32_param
from tests.exhaustive import few
from tests.runtime.models import make_config
from tests.runtime.ranks import Ranks

WIDTH, STEPS, RANKS, LR = 8, 4, 2, 0.5
HEADS, DETACHED, NOTHING, FIRST_ONLY = "other heads", "no body", "nothing", "the first head, later the second"
Trained = tuple[list[float], dict[str, Tensor]]


class Net(nn.Module):
    def __init__(self, other_width: int, is_checkpointed: bool) -> None:
        super().__init__()
        self.body = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.heads = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, width), nn.Linear(width, 3)) for width in (WIDTH, other_width)
        )
        self.is_checkpointed = is_checkpointed

    def forward(self, x: Tensor) -> tuple[list[Tensor], Tensor]:
        for layer in self.body:
            x = torch.tanh(layer(x))
        found, cut = [], x.detach()
        for head in self.heads:
            found.append(checkpoint(head, x, use_reentrant=False) if self.is_checkpointed else head(x))
        return found, self.heads[0](cut)


def loss_of(outputs: tuple[list[Tensor], Tensor], case: str, rank: int, step: int) -> Tensor:
    heads, of_cut = outputs
    if case == DETACHED and rank:
        return of_cut.square().mean()
    if case == NOTHING and rank == step % 2:
        return torch.zeros((), requires_grad=True)
    second = rank == 1 and step == STEPS - 1 if case == FIRST_ONLY else (rank + step) % 2
    return heads[second].square().mean()


def make_net(other_width: int, is_checkpointed: bool) -> Net:
    torch.manual_seed(3)
    return Net(other_width, is_checkpointed)


def data(rank: int, step: int) -> Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def _train(rank: int, case: str, other_width: int, is_checkpointed: bool) -> Trained:
    settings: dict[str, Any] = {
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "train_batch_size": 2 * RANKS,
    }
    config = make_config(stage=3, reduce_bucket_size=50, **settings)
    config["zero_optimization"] |= {
        "stage3_prefetch_bucket_size": 50,
        "stage3_param_persistence_threshold": 0,
    }
    engine, *_ = dslaunch.initialize(model=make_net(other_width, is_checkpointed), config=config)
    norms = []
    for step in range(STEPS):
        engine.backward(loss_of(engine(data(rank, step)), case, rank, step))
        engine.step()
        norms.append(engine.get_global_grad_norm() or 0.0)
    values = {name: safe_get_full_fp32_param(param) for name, param in engine.module.named_parameters()}
    engine.destroy()
    return norms, values


def _train_alone(case: str, other_width: int) -> Trained:
    net = make_net(other_width, False)
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(RANKS):
            (loss_of(net(data(rank, step)), case, rank, step) / RANKS).backward()
        norms.append(nn.utils.get_total_norm([one.grad for one in net.parameters() if one.grad is not None]))
        optimizer.step()
    return [float(norm) for norm in norms], {name: one.detach() for name, one in net.named_parameters()}


CASES = [
    (case, other_width, is_checkpointed)
    for case in (HEADS, DETACHED, NOTHING, FIRST_ONLY)
    for other_width in (WIDTH, 2 * WIDTH)
    for is_checkpointed in (False, True)
]
_FEW = (*((case, 2 * WIDTH, False) for case in (HEADS, NOTHING, FIRST_ONLY)), (DETACHED, WIDTH, True))


@pytest.mark.parametrize(("case", "other_width", "is_checkpointed"), few(CASES, lambda *row: row in _FEW))
def test_losses_that_reach_other_units_train_as_one_process_does(
    ranks: Ranks, case: str, other_width: int, is_checkpointed: bool
) -> None:
    norms, expected = _train_alone(case, other_width)
    for own_norms, values in ranks(_train, case, other_width, is_checkpointed, world_size=RANKS):
        assert own_norms == pytest.approx(norms, rel=1e-5)
        for name, value in values.items():
            torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=1e-5, msg=name)
