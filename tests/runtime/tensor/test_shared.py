"""Rules and modules that stand in several places, and what does not fit together."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dslaunch
from dslaunch.runtime.errors import ConfigError
from tests.runtime.ranks import Ranks
from tests.runtime.tensor.models import (
    Block,
    Numbers,
    check,
    loss_of_numbers,
    make_config,
    make_net,
    number_batches,
    numbers,
    train,
    train_plain,
)

COLUMNS, ROWS = {"patterns": [r".*up\.weight$"]}, {"patterns": [r".*down\.weight$"], "partition_type": "row"}


def _divided(*rules: dict[str, Any]) -> dict[str, Any]:
    return {"tensor_parallel": {"autotp_size": 2, "partition_config": {"layer_specs": rules}}}


def _with_shared_modules() -> nn.Module:
    """The second block is the first one, and the third has its second layer."""
    net = make_net()
    net.blocks[1] = net.blocks[0]
    net.blocks[2].down = net.blocks[0].down
    return net


def _shared_modules(rank: int) -> tuple[Numbers, Numbers]:
    plain = _with_shared_modules()
    engine, *_ = dslaunch.initialize(model=deepcopy(plain), config=make_config(3, **_divided(COLUMNS, ROWS)))
    got = train(engine, loss_of_numbers, number_batches(), tp=2)
    engine.destroy()
    return got, train_plain(plain, loss_of_numbers, number_batches())


def test_a_module_in_several_places_is_divided_once(ranks: Ranks) -> None:
    for got, expected in ranks(_shared_modules, world_size=2):
        check(got, expected)


class Tied(nn.Module):
    """A layer whose weight is an embedding's, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up = nn.Embedding(7, 7), nn.Linear(7, 7, bias=False)
        self.up.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.up(x)
        return result


def _errors(rank: int) -> list[str]:
    found = []
    torch.manual_seed(0)
    with pytest.raises(ConfigError) as caught:
        dslaunch.initialize(model=Tied(), config=make_config(1, **_divided(COLUMNS)))
    found.append(str(caught.value))
    model = nn.Sequential(Block(7), Block(7))
    engine, *_ = dslaunch.initialize(
        model=model, config=make_config(1, **_divided({"patterns": [r".*(up|down)\.weight$"]}))
    )
    with pytest.raises(ConfigError) as caught:
        engine(numbers()[:2])
    engine.destroy()
    return [*found, str(caught.value)]


def test_rules_that_divide_nothing_or_take_parts_for_wholes_are_named(ranks: Ranks) -> None:
    for nothing, part in ranks(_errors, world_size=2):
        assert nothing.startswith(
            "the plan divides 'up' and no other layer, and its parameter is also 'embed.weight'"
        )
        assert part.startswith(
            "'0.down' is divided by columns and takes all 28 elements of its input, and it was given 14"
        )


class Heads(nn.Module):
    """Attention that counts with all heads, as OPT's does."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).view(x.shape[0], -1, 3, 4, 2)
        result: Tensor = self.out(heads.reshape(*x.shape[:2], -1))
        return result


class Labelled(nn.Module):
    """A head, and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), torch.full((12,), 5))


MISFITS: list[tuple[nn.Module, str, str]] = [
    (Heads(), "qkv", "'0.qkv' gives each rank 12 of 24 elements of its output, for [2, 6] positions, and "),
    (Block(8), "up", "the model cannot compute with the parts of its parameters that tensor_parallel gives"),
    (Labelled(), "head", "the model cannot compute with the parts of its parameters that tensor_parallel"),
]


def _misfits(rank: int) -> list[str]:
    found = []
    for model, name, _ in MISFITS:
        given = nn.Sequential(model) if isinstance(model, Heads) else model
        rules = (
            {"patterns": [rf".*{name}\.weight$"]},
            {"patterns": [r".*out\.weight$"], "partition_type": "row"},
        )
        engine, *_ = dslaunch.initialize(model=given, config=make_config(1, **_divided(*rules)))
        with pytest.raises(ConfigError) as caught:
            engine(torch.ones(2, 6, 8))
        found.append(str(caught.value))
        engine.destroy()
    return found


def test_modules_that_take_parts_for_wholes_are_named(ranks: Ranks) -> None:
    for found in ranks(_misfits, world_size=2):
        for said, (_, _, text) in zip(found, MISFITS, strict=True):
            assert said.startswith(text)


def _wrong_labels(rank: int) -> str:
    model = Labelled()
    model.head = nn.Linear(8, 4)
    rule = {"patterns": [r"head\.weight$"], "gather_output": True}
    engine, *_ = dslaunch.initialize(model=model, config=make_config(1, **_divided(rule)))
    with pytest.raises(IndexError) as caught:
        engine(torch.ones(2, 6, 8))
    engine.destroy()
    return str(caught.value)


def test_labels_that_no_head_knows_are_not_the_plan_s_fault(ranks: Ranks) -> None:
    for said in ranks(_wrong_labels, world_size=2):
        assert said == "Target 5 is out of bounds."
