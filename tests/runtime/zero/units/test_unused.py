"""ignore_unused_parameters false: a trained parameter that no backward of a step has given a
gradient is an error.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dslaunch
from dslaunch import ConfigError
from tests.runtime.models import make_config
from tests.runtime.ranks import Ranks

CPU = {"device": "cpu"}


class Picky(nn.Module):
    """`picks` says which of its layers the next forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.picks = (0, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        for pick in self.picks:
            x = self.layers[pick](x)
        return x


def _engine(**section: Any) -> tuple[dslaunch.Engine, Picky]:
    is_lenient = section.pop("is_lenient", False)
    config = make_config(gradient_accumulation_steps=2)
    config["zero_optimization"] = {
        "ignore_unused_parameters": False,
        "stage3_param_persistence_threshold": 0,
        **section,
    }
    model = Picky()
    engine, *_ = dslaunch.initialize(model=model, config=config, is_lenient=is_lenient)
    return engine, model


def _run(engine: dslaunch.Engine, model: Picky, *picks: tuple[int, ...]) -> None:
    """One step of two micro batches."""
    for model.picks in picks:
        engine.backward(engine(torch.ones(1, 7)).sum())
        engine.step()


def _told(rank: int, section: dict[str, Any]) -> str:
    engine, model = _engine(**section)
    _run(engine, model, (0, 1), (1, 2))  # each once is enough
    model.layers[1].requires_grad_(False)
    _run(engine, model, (0, 2), (0, 2))  # what is frozen is not missed
    model.layers[1].requires_grad_(True)
    with pytest.raises(ConfigError) as caught:
        _run(engine, model, (0, 1), (0, 1))
    engine.destroy()
    return str(caught.value)


SECTIONS: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "stage 2 of a program for DeepSpeed": {"stage": 2, "offload_optimizer": CPU, "is_lenient": True},
}


@pytest.mark.parametrize("section", SECTIONS)
def test_a_parameter_without_a_gradient_is_named_on_all_ranks(ranks: Ranks, section: str) -> None:
    for message in ranks(_told, SECTIONS[section], world_size=2):
        assert message.startswith(
            "no backward of this step gave parameters 'layers.2.weight', 'layers.2.bias' a gradient, and "
            "zero_optimization.ignore_unused_parameters is false; "
        )


def _untold(rank: int, section: dict[str, Any]) -> int:
    engine, model = _engine(**section)
    _run(engine, model, (0, 1), (0, 1))
    return engine.global_steps


def test_a_program_for_deepspeed_is_stopped_only_where_deepspeed_looks(ranks: Ranks) -> None:
    assert ranks(_untold, {"stage": 2, "is_lenient": True}, world_size=1) == [1]


def test_without_the_key_such_a_gradient_is_zero(ranks: Ranks) -> None:
    assert ranks(_untold, {"stage": 2, "ignore_unused_parameters": True}, world_size=1) == [1]


def _hooks_after_the_end(rank: int) -> int:
    engine, model = _engine(stage=2)
    engine.destroy()
    return sum(len(param._post_accumulate_grad_hooks or ()) for param in model.parameters())


def test_a_destroyed_engine_watches_its_parameters_no_more(ranks: Ranks) -> None:
    assert ranks(_hooks_after_the_end, world_size=1) == [0]
