"""Settings of an engine that know nothing of stages: a model in stages trains as the whole does with them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dslaunch
from dslaunch.runtime.activation import checkpointing
from dslaunch.runtime.compat.pipeline.module import PipelineModule
from dslaunch.runtime.pipeline.layers import LayerSpec
from dslaunch.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from tests.exhaustive import few
from tests.runtime.pipeline.models import Block, Embed, Head, Judge, data, loss_fn, specs, take_values
from tests.runtime.pipeline.test_train import MICRO, SIZE, config_of, pairs
from tests.runtime.ranks import Ranks

STEPS = 3
Trained = tuple[list[float], list[float], list[float], dict[str, Tensor]]
Options = Callable[[nn.Module], dict[str, Any]]


def groups(module: nn.Module) -> dict[str, Any]:
    """A client's optimizer, with groups of which a stage has other parameters than the next one."""
    small = [param for param in module.parameters() if param.ndim == 1]
    large = [param for param in module.parameters() if param.ndim > 1]
    each = [{"params": small, "weight_decay": 0.0}, {"params": large, "weight_decay": 0.1, "lr": 0.2}]
    return {"optimizer": torch.optim.SGD(each, lr=0.5, momentum=0.9)}


def halved(module: nn.Module) -> dict[str, Any]:
    return {"lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}


def with_rule(name: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": name, "params": {"lr": 0.01, **params}}}


WARMUP = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 0.5, "warmup_num_steps": 4},
}
# By name: what is added to the ds_config, what is given to initialize(), and what is done besides.
CASES: dict[str, tuple[dict[str, Any], Options | None, str]] = {
    "groups": ({}, groups, "set"),
    "scheduler of the client": ({}, halved, ""),
    "scheduler": ({"scheduler": WARMUP}, None, ""),
    "LAMB": (with_rule("Lamb"), None, ""),
    "Muon": (with_rule("Muon"), None, ""),
    "Lion": (with_rule("Lion"), None, ""),
    "prescaled": ({"communication_data_type": "fp32", "prescale_gradients": True}, None, ""),
    "profiled": ({"flops_profiler": {"enabled": True, "profile_step": 1}}, None, ""),
    "timed": ({"wall_clock_breakdown": True, "steps_per_print": 1}, None, ""),
    "compiled": ({}, None, "compile"),
}
WHOLE = {"LAMB", "Muon"}  # want to see whole parameters: not of a layer that is tied over stages
KEPT = ("groups", "LAMB", "scheduler")


class Alone(nn.Module):
    """The whole model with its loss."""

    def __init__(self, *, is_tied: bool) -> None:
        super().__init__()
        self.net = Judge(is_tied=is_tied)

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return loss_fn(self.net(inputs), labels)


def _engine(module: nn.Module, name: str, stage: int, **changes: Any) -> Any:
    added, options, does = CASES[name]
    config = config_of(stage, **added, **changes)
    given = {} if options is None else options(module)
    if "optimizer" in given:
        del config["optimizer"]
    engine, *_ = dslaunch.initialize(model=module, config=config, **given)
    if does == "compile":
        warnings.simplefilter("ignore")  # torch's compiler asks for what it warns of
        engine.compile(backend="aot_eager")
    return engine


def _trained(engine: Any, name: str, train: Callable[[int], float]) -> Trained:
    losses, norms, rates = [], [], []
    for step in range(STEPS):
        losses.append(train(step))
        norms.append(engine.get_global_grad_norm())
        rates.append(engine.get_lr()[0])
        for param in engine.module.parameters() if CASES[name][2] == "set" else ():
            safe_set_full_fp32_param(param, safe_get_full_fp32_param(param) * 0.5)
    values = {
        key.removeprefix("net."): safe_get_full_fp32_param(param)
        for key, param in engine.module.named_parameters()
    }
    engine.destroy()
    return losses, norms, rates, values


def _in_stages(rank: int, name: str, stage: int, is_tied: bool) -> Trained:
    module = PipelineModule(specs(is_tied=is_tied), 2, loss_fn=loss_fn, partition_method="uniform")
    take_values(module, Judge(is_tied=is_tied))
    engine = _engine(module, name, stage)

    def train(step: int) -> float:
        batch = data(step, size=SIZE * MICRO * engine.dp_world_size)
        return engine.train_batch(pairs(*batch, engine, MICRO)).item()  # type: ignore[no-any-return]

    return _trained(engine, name, train)


def _whole(rank: int, name: str, is_tied: bool) -> Trained:
    """Each micro batch is those of both copies of the model."""
    engine = _engine(Alone(is_tied=is_tied), name, 0, train_micro_batch_size_per_gpu=2 * SIZE)

    def train(step: int) -> float:
        total = 0.0
        halves = [[part.chunk(MICRO) for part in one.chunk(2)] for one in data(step, size=SIZE * MICRO * 2)]
        for number in range(MICRO):
            loss = engine(*(torch.cat([first[number], second[number]]) for first, second in halves))
            engine.backward(loss)
            engine.step()
            total += loss.item() / MICRO
        return total

    return _trained(engine, name, train)


@pytest.mark.parametrize(
    ("name", "stage", "is_tied"),
    few(
        ((name, (3, 1)[place % 2], name not in WHOLE) for place, name in enumerate(CASES)),
        lambda name, *_: name in KEPT,
    ),
)
def test_settings_mean_the_same_in_stages(ranks: Ranks, name: str, stage: int, is_tied: bool) -> None:
    [(losses, norms, rates, values)] = ranks(_whole, name, is_tied, world_size=1)
    names = set()
    for found in ranks(_in_stages, name, stage, is_tied, world_size=4):
        assert found[0] == pytest.approx(losses, abs=2e-6)
        assert found[1] == pytest.approx(norms, rel=3e-6)
        assert found[2] == rates
        for key, value in found[3].items():
            torch.testing.assert_close(value, values[key], atol=6e-6, rtol=1e-5, msg=key)
        names |= set(found[3])
    assert names == set(values)


# ---- activations that are computed again


class Drop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.drop = Block(), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.block(x))  # type: ignore[no-any-return]


def _dropped(
    rank: int, schedule: str, stage: int, is_reentrant: bool, seed_layers: bool
) -> list[tuple[list[float], list[float], dict[str, Tensor]]]:
    found = []
    for interval in (0, 2):
        torch.manual_seed(3)
        module = PipelineModule(
            [LayerSpec(Embed), *(LayerSpec(Drop) for _ in range(6)), LayerSpec(Head)],
            2,
            loss_fn=loss_fn,
            schedule=schedule,
            activation_checkpoint_interval=interval,
            seed_layers=seed_layers,
            **(
                {} if is_reentrant else {"activation_checkpoint_func": checkpointing.non_reentrant_checkpoint}
            ),
        )
        engine, *_ = dslaunch.initialize(model=module, config=config_of(stage))
        torch.manual_seed(17 + rank)
        losses, norms = [], []
        for step in range(STEPS):
            losses.append(engine.train_batch(pairs(*data(step, size=SIZE * MICRO), engine, MICRO)).item())
            norms.append(engine.get_global_grad_norm())
        values = {name: safe_get_full_fp32_param(param) for name, param in module.named_parameters()}
        found.append((losses, norms, values))
        engine.destroy()
    return found


@pytest.mark.parametrize(
    ("schedule", "stage", "is_reentrant", "seed_layers"),
    [("1f1b", 3, True, False), ("interleaved", 0, False, True)],
)
def test_what_is_computed_again_draws_the_same_numbers(
    ranks: Ranks, schedule: str, stage: int, is_reentrant: bool, seed_layers: bool
) -> None:
    for kept, again in ranks(_dropped, schedule, stage, is_reentrant, seed_layers, world_size=2):
        assert again[0] == pytest.approx(kept[0], abs=1e-6)
        assert again[1] == pytest.approx(kept[1], rel=1e-5)
        for name, value in again[2].items():
            torch.testing.assert_close(value, kept[2][name], atol=2e-6, rtol=1e-5, msg=name)


# ---- groups of a client's optimizer


def _uneven(rank: int, names_empty: bool) -> str:
    module = PipelineModule(specs(is_tied=False), 2, loss_fn=loss_fn)
    embedding = [param for name, param in module.named_parameters() if name == "0.weight"]
    rest = [param for name, param in module.named_parameters() if name != "0.weight"]
    each: list[dict[str, Any]] = [{"params": rest, "lr": 0.1}]
    if embedding or names_empty:
        each.append({"params": embedding, "lr": 0.3})
    config = config_of(1)
    del config["optimizer"]
    engine, *_ = dslaunch.initialize(model=module, optimizer=torch.optim.SGD(each, lr=0.5), config=config)
    try:
        return str(engine.train_batch(iter([data(0, size=SIZE)] * MICRO)).item())
    except dslaunch.ConfigError as error:
        return str(error)


def test_groups_that_a_stage_has_no_parameter_of_are_asked_for(ranks: Ranks) -> None:
    for found in ranks(_uneven, False, world_size=2):
        assert "have other groups in their optimizers" in found
        assert '{"params": [], ...}' in found
    first, second = ranks(_uneven, True, world_size=2)
    assert float(first) == float(second)
