"""Which optimizer trains: the ds_config's, or the user's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dslaunch
from dslaunch import ConfigError
from tests.exhaustive import few
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


class Uncorrected(torch.optim.Optimizer):
    """AdamW without bias correction."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                state = self.state[param]
                first = state.setdefault("first", torch.zeros_like(param))
                second = state.setdefault("second", torch.zeros_like(param))
                param.mul_(1 - group["lr"] * group["weight_decay"])
                first.mul_(beta1).add_(param.grad, alpha=1 - beta1)
                second.mul_(beta2).addcmul_(param.grad, param.grad, value=1 - beta2)
                param.addcdiv_(first, second.sqrt() + group["eps"], value=-group["lr"])


HYPER: dict[str, Any] = {"lr": 0.02, "betas": (0.8, 0.9), "eps": 1e-2, "weight_decay": 0.2}
ADAM_KEYS: list[tuple[str, dict[str, Any], Callable[[Any], torch.optim.Optimizer]]] = [
    ("AdamW", {"amsgrad": True}, lambda params: torch.optim.AdamW(params, amsgrad=True, **HYPER)),
    ("AdamW", {"maximize": True}, lambda params: torch.optim.AdamW(params, maximize=True, **HYPER)),
    (
        "Adam",
        {"amsgrad": True, "adam_w_mode": False},
        lambda params: torch.optim.Adam(params, amsgrad=True, **HYPER),
    ),
    ("Adam", {"bias_correction": False}, lambda params: Uncorrected(params, HYPER)),
]


def _train_from_config(rank: int, kind: str, keys: dict[str, Any], stage: int) -> dict[str, Tensor]:
    model = make_model()
    section = {"type": kind, "params": {**HYPER, **keys}}
    engine, *_ = dslaunch.initialize(model=model, config=make_config(stage=stage, optimizer=section))
    train_engine(engine, steps=10)
    return snapshot(model.named_parameters())


@pytest.mark.parametrize("stage", few([0, 3], lambda stage: stage == 3))
@pytest.mark.parametrize("place", range(len(ADAM_KEYS)))
def test_the_keys_of_torchs_adam_mean_what_they_mean_there(ranks: Ranks, place: int, stage: int) -> None:
    kind, keys, make = ADAM_KEYS[place]
    model = make_model()
    train_plain(model, make(model.parameters()), steps=10)
    expected = snapshot(model.named_parameters())
    for params in ranks(_train_from_config, kind, keys, stage, world_size=2):
        assert worst_difference(params, expected) <= DRIFT


@pytest.mark.slow
@pytest.mark.parametrize("as_callable", few([False, True], lambda as_callable: not as_callable))
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


class _Wrapped(torch.optim.Optimizer):
    """As Accelerate's wrapper is: an optimizer whose groups are another's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups


def test_what_a_wrapper_steps_is_the_optimizer(ranks: Ranks) -> None:
    ranks(_of_wrapper, world_size=1)


def _of_wrapper(rank: int) -> None:
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)
    config = make_config()
    del config["optimizer"]
    engine, optimizer, *_ = dslaunch.initialize(
        model=model, optimizer=_Wrapped(_Wrapped(inner)), config=config
    )
    assert optimizer.rule.name == "SGD"
    assert [group["momentum"] for group in optimizer.param_groups] == [0.5]
    engine.destroy()
