"""Stage 3 trains models whose tensors are of any kind that torch has, as one process does."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dslaunch
from dslaunch.runtime.activation.host_inputs import HostInputs
from tests.exhaustive import few
from tests.runtime.models import batch, make_model, snapshot, worst_difference
from tests.runtime.ranks import Ranks
from tests.runtime.training.tensor_kinds import SAVED, WIDTH, make_layers
from tests.runtime.training.test_hard_cases import DRIFT, LR, check_freed, make_config

STEPS = 2
WAYS = ("plain", "host", "checkpoint", "reentrant")
# torch's own checkpoint compares what is saved, and cannot ask these for their shapes.
NOT_IN_CHECKPOINTS = {"nested", "jagged", "refusing"}
SLOW = {"fake", "jagged", "jvp"}  # to be imported


class Sum(nn.Module):
    """A layer of each kind, all of the same input."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.first = way, nn.Linear(WIDTH, WIDTH)
        left_out = SLOW if way in WAYS[:2] else NOT_IN_CHECKPOINTS if way == "checkpoint" else set()
        self.layers = nn.ModuleDict(
            {name: layer for name, layer in make_layers().items() if name not in left_out}
        )

    def run(self, layer: nn.Module, x: Tensor) -> Any:
        if self.way in ("checkpoint", "reentrant"):
            return checkpoint(layer, x, use_reentrant=self.way == "reentrant")
        if self.way == "plain":
            return layer(x)
        with HostInputs().hooks(lambda tensor: True):
            return layer(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        result: Tensor = torch.stack([self.run(layer, x) for layer in self.layers.values()]).mean(0)
        return result


def _make(way: str) -> Sum:
    torch.manual_seed(0)
    return Sum(way)


def _train(rank: int, way: str) -> dict[str, Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # most kinds are said to be in beta
        engine, *_ = dslaunch.initialize(model=_make(way), config=make_config(3))
        for step in range(STEPS):
            part = batch(step, width=WIDTH).chunk(2)[rank]
            engine.backward(engine(part).pow(2).mean())
            engine.step()
            check_freed(engine)
        return snapshot(engine.module.named_parameters())


def _reference(way: str) -> dict[str, Tensor]:
    model = _make(way)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in batch(step, width=WIDTH).chunk(2):
            (model(part).pow(2).mean() / 2).backward()
        optimizer.step()
    return snapshot(model.named_parameters())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", few(WAYS, lambda way: way in WAYS[:2]))
def test_what_autograd_saves_may_be_of_any_kind(ranks: Ranks, way: str) -> None:
    expected = _reference(way)
    for params in ranks(_train, way, world_size=2):
        assert worst_difference(params, expected) <= DRIFT


# ---- buffers

SENT = ("coo", "csr", "csc", "bsr", "bsc", "quantized", "conjugated", "expanded")
KEPT = ("nested", "wrapper", "masked")  # which checkpoints do not hold, or torch does not load


class Holding(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        values = scale * torch.arange(1.0, 1 + WIDTH * WIDTH).view(WIDTH, WIDTH)
        for kind in (*SENT, *KEPT):
            self.register_buffer(kind, SAVED[kind][0](values.clone()), persistent=kind in SENT)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x)
        return result


def _values(model: nn.Module, state: dict[str, Any] | None = None) -> dict[str, Tensor]:
    named = dict(model.named_buffers()) if state is None else state
    return {kind: SAVED[kind][1](named[kind]).clone() for kind in (*SENT, *KEPT) if kind in named}


def _held(rank: int, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine, *_ = dslaunch.initialize(model=Holding(1.0 + rank), config=make_config(3))
        sent, state = _values(engine.module), _values(engine.module, engine.state_dict())
        engine.save_checkpoint(folder)
        engine, *_ = dslaunch.initialize(model=Holding(3.0), config=make_config(3))
        engine.load_checkpoint(folder)
        return sent, state, _values(engine.module)


@pytest.mark.filterwarnings("ignore")
def test_a_buffer_of_any_kind_is_rank_0s_and_is_saved(ranks: Ranks, tmp_path: Path) -> None:
    expected, other = _values(Holding(1.0)), _values(Holding(3.0))
    for sent, state, loaded in ranks(_held, str(tmp_path), world_size=2):
        assert worst_difference(sent, expected) == 0
        assert worst_difference(state, {kind: expected[kind] for kind in SENT}) == 0
        assert worst_difference(loaded, {**other, **{kind: expected[kind] for kind in SENT}}) == 0


def _refused(rank: int) -> str:
    model = make_model(nn.Identity)
    model.linear = nn.Linear(WIDTH, WIDTH)
    model.register_buffer("other", torch.ones(WIDTH, WIDTH).to_mkldnn())
    with pytest.raises(dslaunch.ConfigError) as caught:
        dslaunch.initialize(model=model, config=make_config(3))
    return str(caught.value)


def test_a_buffer_that_cannot_be_sent_is_refused_by_name(ranks: Ranks) -> None:
    for message in ranks(_refused, world_size=2):
        assert message.startswith("buffer 'other' is a tensor of mkldnn (torch._mkldnn), which ranks cannot")
