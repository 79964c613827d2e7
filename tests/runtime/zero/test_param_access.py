"""Values, gradients and states of one parameter, read and written at every stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dslaunch
from dslaunch import ConfigError, zero
from tests.runtime.models import ADAMW, batch, make_model, snapshot, worst_difference
from tests.runtime.ranks import Ranks
from tests.runtime.training.hard_models import WIDTH, Model
from tests.runtime.training.test_hard_cases import DRIFT, make_config

STAGES = (0, 1, 2, 3)
NAME = "blocks.1.up.weight"


def _engine(model: nn.Module, stage: int, **changes: Any) -> dslaunch.Engine:
    return dslaunch.initialize(model=model, config=make_config(stage, optimizer=ADAMW, **changes))[0]


def _param(model: nn.Module) -> nn.Parameter:
    return dict(model.named_parameters())[NAME]


def _backward(engine: dslaunch.Engine, step: int) -> None:
    engine.backward(
        engine(batch(step, width=WIDTH).chunk(engine.world_size)[engine.global_rank]).pow(2).mean()
    )


def _some(found: Tensor | None) -> Tensor:
    assert found is not None
    return found


def _read(rank: int, stage: int) -> dict[str, Tensor | None]:
    """Everything that can be read, after two steps and a backward."""
    model = make_model(Model)
    engine = _engine(model, stage)
    for step in range(2):
        _backward(engine, step)
        engine.step()
    _backward(engine, 2)
    param = _param(model)
    found = {
        "value": zero.safe_get_full_fp32_param(param),
        "grad": zero.safe_get_full_grad(param),
        "again": zero.safe_get_full_grad(param),  # reading changes nothing
        "exp_avg": zero.safe_get_full_optimizer_state(param, "exp_avg"),
        "exp_avg_sq": zero.safe_get_full_optimizer_state(param, "exp_avg_sq"),
        "own value": zero.safe_get_local_fp32_param(param),
        "own grad": zero.safe_get_local_grad(param),
        "own exp_avg": zero.safe_get_local_optimizer_state(param, "exp_avg"),
    }
    with pytest.raises(ConfigError, match=f"the optimizer has no state 'exp' of parameter '{NAME}'"):
        zero.safe_get_full_optimizer_state(param, "exp")
    engine.step()
    return {**found, "after": snapshot(model.named_parameters())[NAME]}


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_what_is_read_is_what_plain_pytorch_has(ranks: Ranks, stage: int, world_size: int) -> None:
    model = make_model(Model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(batch(step, width=WIDTH)).pow(2).mean().backward()
        if step < 2:
            optimizer.step()
    param, states = _param(model), optimizer.state[_param(model)]
    assert param.grad is not None
    expected = {
        "value": param.detach().clone(),
        "grad": param.grad,
        "again": param.grad,
        "exp_avg": states["exp_avg"].clone(),
        "exp_avg_sq": states["exp_avg_sq"].clone(),
    }
    optimizer.step()
    results = ranks(_read, stage, world_size=world_size)
    for result in results:
        whole = {name: result[name] for name in expected}
        assert worst_difference(whole, expected) <= DRIFT
        assert worst_difference({"after": result["after"]}, {"after": param.detach()}) <= DRIFT
    for own, name in (("own value", "value"), ("own grad", "grad"), ("own exp_avg", "exp_avg")):
        parts = [_some(result[own]) for result in results]
        assert {(part.dim(), part.dtype) for part in parts} == {
            (1, torch.float32)
        }  # also one without elements
        together = torch.cat(parts) if stage else parts[0]  # at stage 0 each rank's part is all of it
        assert torch.equal(together, results[0][name].reshape(-1))


def _written(rank: int, stage: int, bf16: bool) -> tuple[float, bool]:
    """A gradient, a value and a state that are set are what the step uses."""
    model = make_model(Model)
    dtype = torch.bfloat16 if bf16 else torch.float32
    engine = _engine(model, stage, bf16={"enabled": bf16})
    param = _param(model)
    engine.backward(engine(batch(0, width=WIDTH).to(dtype)).float().pow(2).mean())
    value, grad = torch.full(param.shape, 0.5), torch.full(param.shape, 0.25)
    moment = torch.full(param.shape, 0.125)
    zero.safe_set_full_fp32_param(param, value)
    zero.safe_set_full_grad(param, grad)
    zero.safe_set_full_optimizer_state(param, moment, "exp_avg")
    assert torch.equal(_some(zero.safe_get_full_fp32_param(param)), value)
    assert torch.equal(_some(zero.safe_get_full_grad(param)), grad)
    with zero.GatheredParameters(param):
        is_seen = bool((param == 0.5).all())
    engine.step()
    exp_avg = 0.9 * 0.125 + 0.1 * 0.25
    update = (exp_avg / 0.1) / (
        0.25 + 1e-8
    )  # bias corrections of the first step; exp_avg_sq is that of the gradient
    expected = torch.full(param.shape, 0.5 * (1 - 0.01 * 0.1) - 0.01 * update)
    return float((_some(zero.safe_get_full_fp32_param(param)) - expected).abs().max()), is_seen


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_what_is_written_is_what_the_step_uses(ranks: Ranks, stage: int, world_size: int, bf16: bool) -> None:
    for difference, is_seen in ranks(_written, stage, bf16, world_size=world_size):
        assert difference <= DRIFT
        assert is_seen


def _written_locally(rank: int) -> tuple[Tensor, Tensor, bool]:
    model = make_model(Model)
    _engine_kept = _engine(model, 3)
    param = _param(model)
    own = zero.safe_get_local_fp32_param(param)
    mine = torch.full_like(_some(own), rank + 1.0)
    zero.safe_set_local_fp32_param(param, mine)
    zero.safe_set_local_optimizer_state(param, mine, "exp_avg_sq")
    value = _some(zero.safe_get_full_fp32_param(param))
    state = _some(zero.safe_get_full_optimizer_state(param, "exp_avg_sq"))
    with zero.GatheredParameters(param):
        return value, state, torch.equal(param.detach(), value)


def test_ranks_write_their_own_parts(ranks: Ranks) -> None:
    for value, state, is_seen in ranks(_written_locally, world_size=2):
        assert set(value.unique().tolist()) <= {1.0, 2.0}
        assert torch.equal(value, state)
        assert is_seen


def _updated(rank: int, stage: int) -> tuple[dict[str, Tensor], int]:
    """All gradients, those of biases halved; and the bytes that this took."""
    model = make_model(Model)
    engine = _engine(model, stage)
    _backward(engine, 0)
    name_of = {id(param): name for name, param in model.named_parameters()}

    def halve_biases(grad: Tensor, param: nn.Parameter) -> Tensor:
        assert grad.shape == param.shape
        assert grad.dtype is torch.float32
        return grad / 2 if "bias" in name_of[id(param)] else grad

    before = sum(engine.comm_bytes().values())
    stranger = nn.Parameter(torch.ones(2))
    zero.safe_update_full_grad_vectorized([*model.parameters(), stranger], halve_biases)
    num_bytes = sum(engine.comm_bytes().values()) - before
    return {
        name: _some(zero.safe_get_full_grad(param)) for name, param in model.named_parameters()
    }, num_bytes


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_many_gradients_are_changed_in_one_go(ranks: Ranks, stage: int, world_size: int) -> None:
    model = make_model(Model)
    model(batch(0, width=WIDTH)).pow(2).mean().backward()
    for grads, num_bytes in ranks(_updated, stage, world_size=world_size):
        for name, param in model.named_parameters():
            assert param.grad is not None
            expected = param.grad / 2 if "bias" in name else param.grad
            assert float((grads[name] - expected).abs().max()) <= DRIFT
        # Each of the sub-buffers, which hold six parameters, goes once: half of it to share it, half to
        # average it before.
        whole = sum(param.numel() for param in model.parameters()) * 4
        assert num_bytes <= (0 if world_size == 1 else 1.5 * whole)


def _own_grads_written(rank: int, stage: int) -> Tensor:
    model = make_model(Model)
    engine = _engine(model, stage)
    param = _param(model)
    _backward(engine, 0)
    own = zero.safe_get_local_grad(param)
    zero.safe_set_local_grad(param, torch.full((0 if own is None else own.numel(),), rank + 1.0))
    return _some(zero.safe_get_full_grad(param))


@pytest.mark.parametrize("stage", [2, 3])
def test_ranks_write_their_own_parts_of_a_gradient(ranks: Ranks, stage: int) -> None:
    left, right = ranks(_own_grads_written, stage, world_size=2)
    assert torch.equal(left, right)
    assert set(left.unique().tolist()) <= {1.0, 2.0}
    (whole,) = ranks(_own_grads_written, stage, world_size=1)
    assert torch.equal(whole, torch.ones(15, WIDTH))


def _own_grad_refused(rank: int) -> str:
    model = make_model(Model)
    engine = _engine(model, 0)
    param = _param(model)
    _backward(engine, 0)
    with pytest.raises(ConfigError) as caught:
        zero.safe_set_local_grad(param, torch.ones(param.shape))
    return str(caught.value)


def test_a_gradient_that_every_rank_has_whole_is_not_set_in_parts(ranks: Ranks) -> None:
    assert ranks(_own_grad_refused, world_size=2)[0] == (
        f"the gradient of '{NAME}' is whole on every rank at this ZeRO stage; use safe_set_full_grad()"
    )


def _misused(rank: int) -> list[str]:
    model = make_model(Model)
    _engine_kept = _engine(model, 1)
    param = _param(model)
    said = []
    for attempt in (
        lambda: zero.safe_set_full_grad(param, torch.zeros(1)),
        lambda: zero.safe_set_full_grad(nn.Parameter(torch.zeros(1)), torch.zeros(1)),
        lambda: zero.safe_set_local_fp32_param(param, torch.zeros(3)),
        lambda: zero.safe_set_local_optimizer_state(nn.Parameter(torch.zeros(1)), torch.zeros(1), "exp_avg"),
    ):
        with pytest.raises(ConfigError) as caught:
            attempt()
        said.append(str(caught.value))
    return said


def test_misuse_is_refused_by_name(ranks: Ranks) -> None:
    (said,) = ranks(_misused, world_size=1)
    assert (
        said[0]
        == f"parameter '{NAME}' has shape (15, 8), not (1,); give a tensor of the whole parameter's shape"
    )
    assert said[1].startswith("no engine trains this parameter")
    assert said[2] == (
        f"this rank holds 120 elements of parameter '{NAME}', not 3; give as many as "
        "safe_get_local_fp32_param() returns, or the whole to safe_set_full_fp32_param()"
    )
    assert said[3].startswith("no engine trains this parameter")


def test_of_a_parameter_that_no_engine_has_there_is_nothing() -> None:
    stranger = nn.Parameter(torch.zeros(1))
    assert zero.safe_get_full_fp32_param(stranger) is None
    assert zero.safe_get_full_grad(stranger) is None
    assert zero.safe_get_full_optimizer_state(stranger, "exp_avg") is None
    assert zero.safe_get_local_fp32_param(stranger) is None
    assert zero.safe_get_local_grad(stranger) is None
    assert zero.safe_get_local_optimizer_state(stranger, "exp_avg") is None
