"""Which optimizer trains: the ds_config's, or the user's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dslaunch
from dslaunch import ConfigError
from tests.runtime.models import (
    make_config,
    make_model,
    snapshot,
    train_engine,
    train_plain,
    worst_difference,
)
from tests.runtime.ranks import Ranks

DRIFT = 1e-6  # as FP32_DRIFT of test_stages, ten steps. Seen: 1.2e-7


def _adam_w(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.02, weight_decay=0.2, betas=(0.8, 0.99))


def _adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.02, weight_decay=0.2, eps=1e-6)


def _decoupled_adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.02, weight_decay=0.2, decoupled_weight_decay=True)


def _sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)


def _train(
    rank: int, make: Callable[[Any], torch.optim.Optimizer], as_callable: bool, stage: int
) -> dict[str, Tensor]:
    model = make_model()
    optimizer = make if as_callable else make(model.parameters())
    engine, chosen, _, _ = dslaunch.initialize(
        model=model, optimizer=optimizer, config=make_config(stage=stage)
    )
    assert chosen is engine.optimizer
    train_engine(engine, steps=10)
    return snapshot(model.named_parameters())


@pytest.mark.slow
@pytest.mark.parametrize("as_callable", [False, True])
@pytest.mark.parametrize("make", [_adam_w, _adam, _decoupled_adam, _sgd])
def test_a_users_optimizer_is_taken_over_with_its_hyper_parameters(
    ranks: Ranks, make: Callable[[Any], torch.optim.Optimizer], as_callable: bool
) -> None:
    expected = make_model()
    train_plain(expected, make(expected.parameters()), steps=10)
    for stage in (0, 1, 2, 3):
        for result in ranks(_train, make, as_callable, stage, world_size=2):
            assert worst_difference(result, snapshot(expected.named_parameters())) <= DRIFT


def _with_scheduler(rank: int, how: str) -> list[float]:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)

    def make(given: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(given, step_size=1, gamma=0.1)

    class OneTenth(torch.optim.lr_scheduler.StepLR):
        def __init__(self, given: torch.optim.Optimizer) -> None:
            super().__init__(given, step_size=1, gamma=0.1)

    scheduler = {"instance": make(optimizer), "function": make, "class": OneTenth}[how]
    engine, _, _, chosen = dslaunch.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=make_config()
    )
    assert chosen is engine.lr_scheduler
    train_engine(engine, steps=2)
    return engine.get_lr()


@pytest.mark.parametrize("how", ["instance", "function", "class"])
def test_a_users_scheduler_steers_the_engines_optimizer(ranks: Ranks, how: str) -> None:
    assert ranks(_with_scheduler, how, world_size=1)[0] == pytest.approx([0.005])


def _refusals(rank: int) -> list[str]:
    messages: list[str] = []

    def refused(make: Callable[[nn.Module], Any], **arguments: Any) -> None:
        model = make_model()
        named = arguments.pop("from_config", None)
        config = make_config(**({"optimizer": named} if named else {}))
        with pytest.raises(ConfigError) as caught:
            dslaunch.initialize(model=model, optimizer=make(model), config=config, **arguments)
        messages.append(str(caught.value))

    refused(lambda model: torch.optim.LBFGS(model.parameters()))
    refused(lambda model: torch.optim.SparseAdam(model.parameters()))
    refused(lambda model: torch.optim.AdamW(model.parameters(), differentiable=True))
    refused(lambda model: lambda params: 3)
    strange = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    refused(
        lambda model: _sgd(model.parameters()),
        lr_scheduler=torch.optim.lr_scheduler.StepLR(strange, step_size=1),
    )
    refused(lambda model: _sgd(nn.Linear(2, 2).parameters()))
    refused(lambda model: _sgd(model.requires_grad_(False).parameters()))
    refused(lambda model: None, from_config={"type": "SGD", "params": {"nesterov": True}})
    return messages


def test_what_cannot_be_stepped_here_is_refused_by_name(ranks: Ranks) -> None:
    expected = (
        "optimizer torch.optim.lbfgs.LBFGS runs forward and backward itself, in step(closure)",
        "optimizer torch.optim.sparse_adam.SparseAdam: averaged gradients are dense here",
        "optimizer torch.optim.adamw.AdamW(differentiable=True) is not supported",
        "optimizer=<function ",
        "lr_scheduler StepLR was made for another optimizer",
        "2 of the optimizer's 2 parameters are not the model's",
        "no parameter of the optimizer requires a gradient",
        "optimizer.params.nesterov true: SGD does not take this: Nesterov momentum requires a momentum",
    )
    for message, beginning in zip(ranks(_refusals, world_size=1)[0], expected, strict=True):
        assert message.startswith(beginning)


def _nothing_to_train(rank: int) -> str:
    model = make_model()
    model.requires_grad_(False)
    with pytest.raises(ConfigError) as caught:
        dslaunch.initialize(model=model, config=make_config())
    return str(caught.value)


def test_a_model_without_trained_parameters_needs_no_optimizer(ranks: Ranks) -> None:
    assert ranks(_nothing_to_train, world_size=1)[0].startswith("no parameter requires a gradient")
