"""The engine's behaviour towards a training loop, most of it with one rank and no collective."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

import dslaunch
from dslaunch import ConfigError
from tests.runtime.models import (
    Uneven,
    assert_same_bits,
    batch,
    loss_of,
    make_config,
    make_model,
    snapshot,
    train_engine,
    train_plain,
    worst_difference,
)
from tests.runtime.ranks import Ranks

DRIFT = 1e-6  # as FP32_DRIFT of test_stages: ranks and our fused AdamW round in other places. Seen: 4.5e-8


def _engine(model: nn.Module, **arguments: Any) -> dslaunch.Engine:
    config = arguments.pop("config", None) or make_config()
    engine, *_ = dslaunch.initialize(model=model, config=config, **arguments)
    return engine


# ---- accumulation, counters, getters


def _counters(rank: int) -> list[tuple[int, int, int, bool, bool]]:
    engine = _engine(make_model(), config=make_config(gradient_accumulation_steps=3))
    seen = []
    for _ in range(6):
        boundary = engine.is_gradient_accumulation_boundary()
        engine.backward(loss_of(engine, batch(0, size=4)))
        engine.step()
        seen.append(
            (
                engine.micro_steps,
                engine.global_steps,
                engine.global_samples,
                boundary,
                engine.was_step_applied(),
            )
        )
    return seen


def test_only_every_third_step_is_a_boundary_when_three_micro_batches_are_accumulated(ranks: Ranks) -> None:
    assert ranks(_counters, world_size=1)[0] == [
        (1, 0, 0, False, False),
        (2, 0, 0, False, False),
        (3, 1, 12, True, True),
        (4, 1, 12, False, False),
        (5, 1, 12, False, False),
        (6, 2, 24, True, True),
    ]


def _forced_boundary(rank: int) -> list[int]:
    engine = _engine(make_model(), config=make_config(gradient_accumulation_steps=3))
    steps = []
    for forced in (True, False, False, False, True):
        engine.set_gradient_accumulation_boundary(forced)
        engine.backward(loss_of(engine, batch(0, size=4)))
        engine.step()
        steps.append(engine.global_steps)
    return steps


def test_the_user_may_decide_what_a_boundary_is(ranks: Ranks) -> None:
    assert ranks(_forced_boundary, world_size=1)[0] == [1, 1, 1, 1, 2]


def _backward_value(rank: int) -> tuple[float, float, float]:
    engine = _engine(make_model(), config=make_config(gradient_accumulation_steps=3))
    loss = loss_of(engine, batch(0, size=4))
    scaled = engine.backward(loss, retain_graph=True)
    unscaled = engine.backward(loss, scale_wrt_gas=False)
    return loss.item(), scaled.item(), unscaled.item()


def test_backward_returns_the_loss_it_used(ranks: Ranks) -> None:
    loss, scaled, unscaled = ranks(_backward_value, world_size=1)[0]
    assert scaled == pytest.approx(loss / 3)
    assert unscaled == loss


def _getters(rank: int) -> dict[str, Any]:
    model = make_model()
    config = make_config(stage=1, gradient_accumulation_steps=2, gradient_clipping=0.5)
    engine = _engine(model, config=config)
    names = [name for name, _ in engine.named_parameters()]
    assert engine.module is model
    assert isinstance(engine, nn.Module)
    assert names == [name for name, _ in model.named_parameters()]
    assert [id(param) for param in engine.parameters()] == [id(param) for param in model.parameters()]
    assert engine.state_dict().keys() == model.state_dict().keys()
    assert engine.first is model.get_submodule("first")  # any attribute of the module
    engine.eval()
    assert not model.training
    engine.train()
    assert model.training
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = engine.no_such_thing
    return {
        "train_batch_size": engine.train_batch_size(),
        "micro": engine.train_micro_batch_size_per_gpu(),
        "gas": engine.gradient_accumulation_steps(),
        "clipping": engine.gradient_clipping(),
        "stage": engine.zero_optimization_stage(),
        "bf16": engine.bfloat16_enabled(),
        "lr": engine.get_lr(),
        "mom": engine.get_mom(),
        "ranks": (engine.global_rank, engine.local_rank, engine.world_size, str(engine.device)),
    }


def test_getters_say_what_the_config_says(ranks: Ranks) -> None:
    assert ranks(_getters, world_size=2)[1] == {
        "train_batch_size": 12,
        "micro": 3,
        "gas": 2,
        "clipping": 0.5,
        "stage": 1,
        "bf16": False,
        "lr": [0.01],
        "mom": [(0.9, 0.999)],
        "ranks": (1, 0, 2, "cpu"),  # LOCAL_RANK is not set: it is not the rank
    }


def _progress_lines(rank: int) -> str:
    from contextlib import redirect_stdout
    from io import StringIO

    out = StringIO()
    with redirect_stdout(out):
        train_engine(_engine(make_model(), config=make_config(steps_per_print=2)), steps=5)
    return out.getvalue()


def test_rank_0_prints_a_line_every_steps_per_print(ranks: Ranks) -> None:
    first, second = ranks(_progress_lines, world_size=2)
    *lines, throughput = first.splitlines()
    assert lines == [f"step={step}, skipped=0, lr=[0.01], mom=[(0.9, 0.999)]" for step in (2, 4)]
    assert throughput.startswith("step=4, epoch=0, micro_step=4, samples/s=")
    assert second == ""


def _scheduler(rank: int) -> list[list[float]]:
    warmup = {
        "type": "WarmupLR",
        "params": {"warmup_num_steps": 4, "warmup_max_lr": 0.4, "warmup_type": "linear"},
    }
    engine = _engine(make_model(), config=make_config(scheduler=warmup, gradient_accumulation_steps=2))
    rates = []
    for _ in range(3):
        rates.append(engine.get_lr())
        train_engine(engine, steps=1)
    return rates


def test_the_scheduler_steps_once_per_optimizer_step(ranks: Ranks) -> None:
    assert ranks(_scheduler, world_size=1)[0] == [[0.0], [0.0], [0.1]]


def _plateau(rank: int, lr_kwargs: list[dict[str, float]]) -> tuple[list[float], int]:
    model = make_model()
    engine = dslaunch.initialize(
        model=model,
        config=make_config(),
        lr_scheduler=lambda optimizer: ReduceLROnPlateau(optimizer, patience=0),
    )[0]
    before = snapshot(model.named_parameters())
    engine.backward(loss_of(engine, batch(0)))
    with pytest.raises(ConfigError, match=r'engine\.step\(lr_kwargs=\{"metrics": loss\}\)'):
        engine.step()
    assert_same_bits(snapshot(model.named_parameters()), before)
    for given in lr_kwargs:
        engine.step(lr_kwargs=given)
        engine.backward(loss_of(engine, batch(0)))
    rates: list[float] = engine.get_lr()
    return rates, engine.global_steps


def test_a_scheduler_that_follows_a_metric_asks_for_it_before_the_step(ranks: Ranks) -> None:
    assert ranks(_plateau, [{"metrics": 1.0}, {"metrics": 2.0}], world_size=1)[0] == ([0.001], 2)


# ---- gradients that users touch


def _parity_with(rank: int, meddle: str) -> float:
    """Train with a user who meddles with the gradients, as plain PyTorch without meddling."""
    expected = make_model()
    train_plain(expected, torch.optim.AdamW(expected.parameters(), lr=0.01, weight_decay=0.1), steps=4)
    model = make_model()
    engine = _engine(model, config=make_config(gradient_accumulation_steps=2))
    for step in range(4):
        if meddle == "none":
            model.zero_grad(set_to_none=True)
        elif meddle == "optimizer":
            engine.optimizer.zero_grad()
        for micro in batch(step).chunk(2):
            loss = loss_of(engine, micro)
            engine.backward(loss)
            if meddle == "own tensor":
                for param in model.parameters():
                    assert param.grad is not None
                    param.grad = param.grad.clone()
            engine.step()
        assert all(param.grad is None or not param.grad.any() for param in model.parameters())
    return worst_difference(snapshot(model.named_parameters()), snapshot(expected.named_parameters()))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("meddle", ["nothing", "none", "optimizer", "own tensor"])
def test_users_may_replace_gradients_or_set_them_to_none(ranks: Ranks, meddle: str, world_size: int) -> None:
    assert max(ranks(_parity_with, meddle, world_size=world_size)) <= DRIFT


def _stale_gradient_dropped(rank: int) -> bool:
    """Set to None after a backward, and never computed again: zero, not what was there."""
    model = make_model()
    engine = _engine(model, config=make_config(optimizer={"type": "SGD", "params": {"lr": 1.0}}))
    before = snapshot(model.named_parameters())
    engine.backward(loss_of(engine, batch(0)))
    model.zero_grad(set_to_none=True)
    engine.step()
    assert_same_bits(before, snapshot(model.named_parameters()))
    return engine.get_global_grad_norm() == 0.0


def test_a_gradient_set_to_none_before_the_step_is_zero(ranks: Ranks) -> None:
    assert ranks(_stale_gradient_dropped, world_size=1) == [True]


def _moved_model(rank: int) -> str:
    model = make_model()
    engine = _engine(model)
    loss = loss_of(engine, batch(0))
    model.double()
    with pytest.raises(ConfigError) as caught:
        engine.backward(loss)
    return str(caught.value)


def test_a_model_converted_after_initialize_is_refused(ranks: Ranks) -> None:
    (message,) = ranks(_moved_model, world_size=1)
    assert message.startswith("parameter 'first.weight' is torch.float64")
    assert "before initialize()" in message


# ---- parameters that are not plain


class Halves(nn.Module):
    """Two branches; only one is used when `use_second` is off."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, 15), nn.Linear(7, 15)
        self.use_second = False

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x)
        return y + self.second(x) if self.use_second else y


def _unused(rank: int, stage: int) -> dict[str, Tensor]:
    model = make_model(Halves)
    engine = _engine(model, config=make_config(stage=stage))
    for step in range(5):
        model.use_second = rank == 1 and step == 2  # one rank, one step: ranks disagree about what is used
        own = batch(step).chunk(engine.world_size)[rank]
        engine.backward(loss_of(engine, own))
        engine.step()
    return snapshot(model.named_parameters())


def _unused_reference() -> dict[str, Tensor]:
    model = make_model(Halves)
    assert isinstance(model, Halves)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    for step in range(5):
        halves = batch(step).chunk(2)
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        for rank, half in enumerate(halves):
            model.use_second = rank == 1 and step == 2
            (loss_of(model, half) / 2).backward()
        optimizer.step()
    return snapshot(model.named_parameters())


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_parameter_that_no_rank_used_has_gradient_zero(ranks: Ranks, stage: int) -> None:
    """Not None, as plain PyTorch has it: weight decay and moments go on. DeepSpeed does the same."""
    for result in ranks(_unused, stage, world_size=2):
        assert worst_difference(result, _unused_reference()) <= DRIFT


def _frozen(rank: int, stage: int) -> tuple[dict[str, Tensor], int]:
    model = make_model()
    for name, param in model.named_parameters():
        param.requires_grad_("blocks.1" not in name and "norm" not in name)
    engine = _engine(model, config=make_config(stage=stage))
    train_engine(engine, steps=4)
    assert engine.optimizer is not None
    in_states = sum(states["exp_avg"].numel() for states in engine.optimizer.states)
    for name, param in model.named_parameters():
        assert (param.grad is None) == (stage >= 2 or not param.requires_grad), name
    return snapshot(model.named_parameters()), in_states


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_frozen_parameters_stay_and_cost_neither_gradient_nor_state(ranks: Ranks, stage: int) -> None:
    expected = make_model()
    for name, param in expected.named_parameters():
        param.requires_grad_("blocks.1" not in name and "norm" not in name)
    trained = [param for param in expected.parameters() if param.requires_grad]
    train_plain(expected, torch.optim.AdamW(trained, lr=0.01, weight_decay=0.1), steps=4)
    numel = sum(param.numel() for param in trained)
    for params, in_states in ranks(_frozen, stage, world_size=2):
        assert worst_difference(params, snapshot(expected.named_parameters())) <= DRIFT
        assert (
            numel <= in_states * (2 if stage else 1) < sum(param.numel() for param in expected.parameters())
        )


class Tied(nn.Module):
    """An embedding whose weight is the head's, in two units."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            [nn.Linear(7, 15, bias=False), nn.Linear(15, 15), nn.Linear(7, 15, bias=False)]
        )
        self.parts[2].weight = self.parts[0].weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.parts[1](torch.tanh(self.parts[0](x)))
        return y @ self.parts[2].weight


def _tied(rank: int, stage: int) -> dict[str, Tensor]:
    model = make_model(Tied)
    engine = _engine(model, config=make_config(stage=stage, reduce_bucket_size=1))
    train_engine(engine, steps=4)
    assert model.parts[0].weight is model.parts[2].weight
    state = engine.state_dict()
    assert state["parts.2.weight"].data_ptr() == state["parts.0.weight"].data_ptr()
    return snapshot(model.named_parameters())


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_tied_parameters_stay_one_parameter(ranks: Ranks, stage: int) -> None:
    expected = make_model(Tied)
    train_plain(expected, torch.optim.AdamW(expected.parameters(), lr=0.01, weight_decay=0.1), steps=4)
    for result in ranks(_tied, stage, world_size=2):
        assert worst_difference(result, snapshot(expected.named_parameters())) <= DRIFT


def _decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": [param for param in model.parameters() if param.ndim > 1], "weight_decay": 0.3},
        {
            "params": [param for param in model.parameters() if param.ndim == 1],
            "weight_decay": 0.0,
            "lr": 0.02,
        },
    ]


def _groups(rank: int, stage: int) -> dict[str, Tensor]:
    model = make_model()
    engine = _engine(model, config=make_config(stage=stage), model_parameters=_decay_groups(model))
    assert engine.get_lr() == [0.01, 0.02]
    train_engine(engine, steps=10)
    return snapshot(model.named_parameters())


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_decay_and_no_decay_groups_cut_through_every_unit(ranks: Ranks, stage: int) -> None:
    expected = make_model()
    train_plain(expected, torch.optim.AdamW(_decay_groups(expected), lr=0.01), steps=10)
    for result in ranks(_groups, stage, world_size=3):
        assert worst_difference(result, snapshot(expected.named_parameters())) <= DRIFT


def _untrained(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model = make_model()
    before = snapshot(model.named_parameters())
    engine = _engine(model, model_parameters=list(model.get_submodule("first").parameters()))
    train_engine(engine, steps=2)
    return before, snapshot(model.named_parameters())


def test_parameters_that_model_parameters_leaves_out_are_not_trained(ranks: Ranks) -> None:
    before, after = ranks(_untrained, world_size=1)[0]
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"first.weight", "first.bias"}


class WithBuffers(nn.Module):
    """Buffers of several dtypes, an expanded one among them, and an integer parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(7, 15)
        self.norm = nn.BatchNorm1d(15)
        self.register_buffer("positions", torch.arange(5).expand(1, -1) + int(torch.randint(100, ())))
        self.register_buffer("mask", torch.rand(5) > 0.5, persistent=False)
        self.codes = nn.Parameter(torch.randint(0, 9, (3,)), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.layer(x))
        return y


def _broadcast(rank: int, bf16: bool) -> dict[str, Tensor]:
    model = make_model(WithBuffers, seed=rank)  # every rank starts elsewhere
    engine = _engine(model, config=make_config(bf16={"enabled": bf16}))
    assert engine.module is model
    return snapshot([*model.named_parameters(), *model.named_buffers()])


@pytest.mark.parametrize("bf16", [False, True])
def test_every_rank_gets_rank_0s_parameters_and_buffers(ranks: Ranks, bf16: bool) -> None:
    source = make_model(WithBuffers, seed=0)
    expected = snapshot([*source.named_parameters(), *source.named_buffers()])
    for result in ranks(_broadcast, bf16, world_size=3):
        for name, tensor in expected.items():
            is_weight = bf16 and name in dict(source.named_parameters()) and tensor.is_floating_point()
            assert torch.equal(result[name], tensor.bfloat16() if is_weight else tensor), name


# ---- infinite and NaN gradients


def _poisoned(
    rank: int, stage: int, bf16: bool, poison: float
) -> tuple[bool, int, int, list[float], float | None]:
    model = make_model()
    warmup = {
        "type": "WarmupLR",
        "params": {"warmup_num_steps": 4, "warmup_max_lr": 0.4, "warmup_type": "linear"},
    }
    engine = _engine(model, config=make_config(stage=stage, bf16={"enabled": bf16}, scheduler=warmup))
    dtype = torch.bfloat16 if bf16 else torch.float32
    train_engine(engine, steps=3, dtype=dtype)
    assert engine.optimizer is not None

    def state() -> dict[str, Tensor]:
        parts = engine._model.trained
        named = [(f"master {index}", part.optimizer_shard.master) for index, part in enumerate(parts)]
        assert engine.optimizer is not None
        for index, states in enumerate(engine.optimizer.states):
            named += [(f"{name} {index}", tensor) for name, tensor in states.items()]
        return snapshot([*model.named_parameters(), *named])

    before, lr, steps = state(), engine.get_lr(), engine.optimizer.num_steps
    own = batch(3).chunk(engine.world_size)[rank].to(dtype)

    def poisoned(grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad.view(-1)[3] = poison
        return grad

    hook = next(model.parameters()).register_hook(poisoned) if rank == 0 else None
    engine.backward(loss_of(engine, own))
    if hook is not None:
        hook.remove()
    engine.step()
    assert_same_bits(before, state())
    assert engine.get_lr() == lr
    assert engine.optimizer.num_steps == steps
    result = (
        engine.was_step_applied(),
        engine.skipped_steps,
        engine.global_steps,
        lr,
        engine.get_global_grad_norm(),
    )
    train_engine(engine, steps=1, dtype=dtype)
    assert engine.was_step_applied()
    return result


@pytest.mark.slow
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_gradient_that_is_not_finite_changes_nothing_on_any_rank(
    ranks: Ranks, stage: int, bf16: bool, poison: float
) -> None:
    for applied, skipped, steps, _, norm in ranks(_poisoned, stage, bf16, poison, world_size=2):
        assert (applied, skipped, steps) == (False, 1, 4)
        assert norm is not None
        assert not torch.isfinite(torch.tensor(norm))


# ---- no optimizer, no misuse


def _misuse(rank: int) -> list[str]:
    model = make_model()
    config = make_config()
    del config["optimizer"]
    engine = _engine(model, config=config)
    messages = []
    engine.backward(loss_of(engine, batch(0)))
    with pytest.raises(ConfigError) as no_optimizer:
        engine.step()
    messages.append(str(no_optimizer.value))
    with pytest.raises(ConfigError) as not_a_loss:
        engine.backward(torch.zeros(()))
    messages.append(str(not_a_loss.value))
    with pytest.raises(ConfigError) as not_one_number:
        engine.scale(engine(batch(0)))
    messages.append(str(not_one_number.value))
    config["zero_optimization"]["stage"] = 1
    with pytest.raises(ConfigError) as nothing_to_shard:
        _engine(make_model(), config=config)
    messages.append(str(nothing_to_shard.value))
    engine = _engine(make_model())
    assert engine.optimizer is not None
    with pytest.raises(ConfigError) as direct:
        engine.optimizer.step()
    messages.append(str(direct.value))
    with pytest.raises(ConfigError) as late:
        engine.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    messages.append(str(late.value))
    with pytest.raises(ConfigError) as names:
        _engine(make_model(), model_parameters=[name for name, _ in make_model().named_parameters()])
    messages.append(str(names.value))
    with pytest.raises(ConfigError) as replaced:
        engine.load_state_dict(Uneven().state_dict(), assign=True)
    messages.append(str(replaced.value))
    return messages


def test_misuse_is_refused_by_name(ranks: Ranks) -> None:
    expected = (
        "engine.step() without an optimizer",
        "engine.backward() was given Tensor without a gradient",
        "engine.scale() was given a tensor of shape [12, 1]; a loss is one number",
        "zero_optimization.stage 1 shards an optimizer's states",
        "optimizer.step() was called directly; call engine.step()",
        "add_param_group() after initialize()",
        "initialize(model_parameters=...) has 'first.weight'",
        "load_state_dict(assign=True)",
    )
    for message, beginning in zip(ranks(_misuse, world_size=1)[0], expected, strict=True):
        assert message.startswith(beginning)


def _different_models(rank: int) -> str:
    model = nn.Linear(7, 15 + rank // 2)
    with pytest.raises(ConfigError) as caught:
        _engine(model)
    return str(caught.value)


def test_ranks_with_different_models_are_told_so_at_once(ranks: Ranks) -> None:
    for message in ranks(_different_models, world_size=3):
        assert message.startswith("rank 2 and rank 0 were given different models")


def _weights_from_outside(rank: int) -> float:
    """bf16: the next step must start from the loaded weights, not from a stale float32 master."""
    model = make_model()
    engine = _engine(
        model, config=make_config(bf16={"enabled": True}, optimizer={"type": "SGD", "params": {"lr": 0.0}})
    )
    loaded = make_model(seed=5).state_dict()
    engine.load_state_dict(loaded)
    train_engine(engine, steps=1, dtype=torch.bfloat16)
    return worst_difference(model.state_dict(), {name: tensor.bfloat16() for name, tensor in loaded.items()})


def test_loaded_weights_reach_the_master(ranks: Ranks) -> None:
    assert ranks(_weights_from_outside, world_size=1) == [0.0]


def _destroyed(rank: int) -> bool:
    model = make_model()
    engine = _engine(model, config=make_config(stage=1))
    train_engine(engine, steps=1)
    weights = snapshot(model.named_parameters())
    engine.destroy()
    assert_same_bits(weights, snapshot(model.named_parameters()))
    return all(param.grad is None for param in model.parameters()) and engine.optimizer is None


def test_destroy_leaves_a_usable_model(ranks: Ranks) -> None:
    assert ranks(_destroyed, world_size=2) == [True, True]
