"""Any torch optimizer under sharding, against the same one over the parameters of one process."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import dslaunch
from dslaunch import ConfigError
from dslaunch.ops.lamb import FusedLamb
from dslaunch.ops.lion import FusedLion
from dslaunch.runtime.step.whole_tensors import choose_owners
from tests.exhaustive import few
from tests.runtime.models import (
    MakeOptimizer,
    assert_same_bits,
    make_config,
    make_model,
    snapshot,
    train_engine,
    train_plain,
    trained_at,
    trained_plain,
    worst_difference,
)
from tests.runtime.ranks import Ranks

DRIFT = 3e-6  # two ranks add their gradients in another order; ten steps. Seen: 1.2e-6
# A step as long as the parameter, whichever way the gradient points:
# differences of rounding are multiplied by 1 / |grad|.
STEEP_DRIFT = 2e-5  # Seen: 6e-6
# Newton-Schulz in bfloat16: its input may round to the next number, and how far that carries depends on the
# CPU. Gradients that differ by 1e-7 move torch's own Muon by up to 2.4e-2; a momentum of 0.9 by 4.9e-2.
MUON_DRIFT = 3e-2


class Halving(torch.optim.Optimizer):
    """Shortens a parameter's step by the largest element of all its gradients:
    it must see whole parameters.
    """

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "calls": 0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["calls"] += 1
            for param in group["params"]:
                state = self.state[param]
                state["largest"] = max(state.get("largest", 0.0), float(param.grad.abs().max()))
                state.setdefault("sum", torch.zeros_like(param)).add_(param.grad)
                assert len(param.shape) > 1 or group["lr"] < 1  # of the true shape
                param.sub_(state["sum"] / state["largest"], alpha=group["lr"] / group["calls"])


class OwnAdamW(torch.optim.AdamW):
    """A subclass may override anything: it is stepped on whole parameters."""


def _decayed(model: nn.Module) -> list[dict[str, Any]]:
    """Biases and norms apart; both groups go through every unit."""
    return [
        {
            "params": [param for param in model.parameters() if param.ndim > 1],
            "weight_decay": 0.2,
            "lr": 0.03,
        },
        {"params": [param for param in model.parameters() if param.ndim < 2], "weight_decay": 0.0},
    ]


def _of(kind: Callable[..., torch.optim.Optimizer], **options: Any) -> MakeOptimizer:
    return lambda model: kind(_decayed(model), **options)


ELEMENTWISE: dict[str, MakeOptimizer] = {
    "Adadelta": _of(torch.optim.Adadelta, lr=0.5),
    "Adagrad": _of(torch.optim.Adagrad, lr=0.02, initial_accumulator_value=0.1),
    "Adam amsgrad": _of(torch.optim.Adam, lr=0.01, amsgrad=True, eps=1e-3),
    "AdamW maximize": _of(torch.optim.AdamW, lr=1e-3, maximize=True, eps=1e-3),
    "Adamax": _of(torch.optim.Adamax, lr=0.01, eps=1e-3),
    "ASGD": _of(torch.optim.ASGD, lr=0.05),
    "NAdam": _of(torch.optim.NAdam, lr=0.01, eps=1e-3),
    "RAdam": _of(torch.optim.RAdam, lr=0.01, eps=1e-3),
    "RMSprop": _of(torch.optim.RMSprop, lr=0.01, momentum=0.9, centered=True, eps=1.0),
    "SGD": _of(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "SGD plain": _of(torch.optim.SGD, lr=0.05),
}
WHOLE: dict[str, MakeOptimizer] = {
    "Adafactor": _of(torch.optim.Adafactor, lr=0.02),
    "Halving": lambda model: Halving(model.parameters(), lr=0.1),
    "Lamb": _of(FusedLamb, lr=0.05, eps=1e-3),
    "OwnAdamW": _of(OwnAdamW, lr=0.01, eps=1e-3),
}


def _train(rank: int, name: str) -> list[dict[str, Tensor]]:
    return trained_at((0, 1, 2, 3), {**ELEMENTWISE, **WHOLE}[name])


# Of those that are stepped element by element, one with each kind of state: none, tensors, tensors that do
# not begin as zeros, and numbers that the optimizer changes itself.
FEW = ("Adam amsgrad", "Adagrad", "ASGD", "Adafactor", "Muon", "Halving")


@pytest.mark.slow
@pytest.mark.parametrize("name", few([*ELEMENTWISE, *WHOLE], lambda name: name in FEW))
def test_a_users_optimizer_does_under_sharding_what_it_does_in_one_process(ranks: Ranks, name: str) -> None:
    expected = trained_plain({**ELEMENTWISE, **WHOLE}[name])
    drift = STEEP_DRIFT if name in ("Lamb", "Adafactor", "ASGD") else DRIFT
    for world_size in (2,) if name not in ("Halving", "Adagrad") else (1, 2, 3):
        for by_stage in ranks(_train, name, world_size=world_size):
            for result in by_stage:
                assert worst_difference(result, expected) <= drift
            for other in by_stage[1:]:
                assert_same_bits(by_stage[0], other)  # also whole ones: every rank sees the same numbers


def _in_bf16(rank: int, name: str) -> list[tuple[dict[str, Tensor], float]]:
    results = []
    for stage in (0, 1, 3):
        model = make_model()
        make = {**ELEMENTWISE, **WHOLE}[name]
        config = make_config(stage=stage, bf16={"enabled": True})
        engine, optimizer, *_ = dslaunch.initialize(model=model, optimizer=make(model), config=config)
        assert optimizer is not None
        train_engine(engine, steps=4, dtype=torch.bfloat16)
        worst = max(
            float(
                (sub_buffer.param_shard.own.float() - sub_buffer.optimizer_shard.master).abs().max()
                / sub_buffer.optimizer_shard.master.abs().max()
            )
            for sub_buffer in optimizer.sub_buffers
        )
        results.append((snapshot(model.named_parameters()), worst))
    return results


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Adagrad", "Halving"])
def test_parameters_in_bf16_are_the_rounded_masters(ranks: Ranks, name: str) -> None:
    for (first, rounding), *others in ranks(_in_bf16, name, world_size=2):
        assert 0 < rounding <= 2**-8
        for result, _ in others:
            assert_same_bits(first, result)


def _with_an_empty_shard(rank: int) -> tuple[Tensor, Tensor]:
    """Two parameters of one element, of which each rank owns one. Both lie in rank 0's shard; that of
    rank 1 is padding, and it has nothing to send.
    """
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = nn.Linear(1, 1, dtype=torch.float32)
        plain = copy.deepcopy(model)
        engine, *_ = dslaunch.initialize(
            model=model, optimizer=Halving(model.parameters()), config=make_config(stage=1)
        )
        optimizer = Halving(plain.parameters())
        ones = torch.ones(1, 1, dtype=torch.float32)
        for _ in range(2):
            engine.backward(engine(ones).sum())
            engine.step()
            optimizer.zero_grad()
            plain(ones).sum().backward()
            optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    return _values_of(model), _values_of(plain)


def _values_of(model: nn.Module) -> Tensor:
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def test_a_rank_with_nothing_to_send_receives_float32_whatever_the_default_dtype_is(ranks: Ranks) -> None:
    (first, expected), (second, _) = ranks(_with_an_empty_shard, world_size=2)
    assert torch.equal(first, second)
    assert torch.equal(first, expected)


# ---- by name, from a ds_config


class Named(nn.Module):
    """An embedding and a head, which are for AdamW though they are matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(7, 16, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.wide = nn.Linear(16, 40)
        self.lm_head = nn.Linear(40, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x).tanh()
        result: Tensor = self.lm_head(self.wide(x).tanh())
        return result


def _halves(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    named = list(model.named_parameters())
    is_muon = [p.ndim > 1 and "embed" not in name and "lm_head" not in name for name, p in named]
    pairs = list(zip(named, is_muon, strict=True))
    return [p for (_, p), muon in pairs if muon], [p for (_, p), muon in pairs if not muon]


class Both(torch.optim.Optimizer):
    """Two optimizers as one, for one process."""

    def __init__(self, model: nn.Module) -> None:
        muon, adam = _halves(model)
        self.all = (
            torch.optim.Muon(muon, lr=0.05, weight_decay=0.1),
            torch.optim.AdamW(adam, lr=0.003, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.1),
        )
        super().__init__(model.parameters(), {})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for one in self.all:
            one.step()


NAMED: dict[str, tuple[dict[str, Any], Callable[[nn.Module], torch.optim.Optimizer], float]] = {
    "adagrad": (
        {"lr": 0.02, "lr_decay": 0.1},
        lambda model: torch.optim.Adagrad(model.parameters(), lr=0.02, lr_decay=0.1),
        DRIFT,
    ),
    "Lion": (
        {"lr": 1e-3, "betas": [0.95, 0.98], "weight_decay": 0.5},
        lambda model: FusedLion(model.parameters(), lr=1e-3, betas=(0.95, 0.98), weight_decay=0.5),
        DRIFT,
    ),
    "LAMB": (
        {"lr": 0.02, "weight_decay": 0.01, "max_coeff": 0.3, "eps": 1e-3},
        lambda model: FusedLamb(model.parameters(), lr=0.02, weight_decay=0.01, max_coeff=0.3, eps=1e-3),
        STEEP_DRIFT,
    ),
    "RMSprop": (
        {"lr": 0.01, "eps": 0.01},
        lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01, eps=0.01),
        DRIFT,
    ),
    "Muon": ({"muon_lr": 0.05, "adam_lr": 0.003, "weight_decay": 0.1}, Both, MUON_DRIFT),
}


def _train_named(rank: int, name: str, stage: int) -> dict[str, Tensor]:
    model = make_model(Named)
    config = make_config(stage=stage, optimizer={"type": name, "params": NAMED[name][0]})
    engine, *_ = dslaunch.initialize(model=model, config=config)
    train_engine(engine, steps=10)
    return snapshot(model.named_parameters())


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("name", NAMED)
def test_a_type_in_the_config_is_that_optimizer(ranks: Ranks, name: str, stage: int) -> None:
    _, make, drift = NAMED[name]
    expected = make_model(Named)
    train_plain(expected, make(expected), steps=10)
    for result in ranks(_train_named, name, stage, world_size=2):
        assert worst_difference(result, snapshot(expected.named_parameters())) <= drift


def _state_numels(rank: int) -> tuple[int, int]:
    model = make_model(Named)
    muon = {"type": "Muon", "params": {"lr": 0.01}}
    engine, optimizer, *_ = dslaunch.initialize(model=model, config=make_config(stage=2, optimizer=muon))
    assert optimizer is not None
    train_engine(engine, steps=1)
    shards = [sub_buffer.optimizer_shard for sub_buffer in optimizer.sub_buffers]
    by_element = sum(state.numel() for shard in shards for state in shard.states.values())
    return by_element, sum(state.numel() for shard in shards for *_, state in shard.whole_states())


def test_a_matrix_under_muon_has_one_state(ranks: Ranks) -> None:
    found = ranks(_state_numels, world_size=2)
    matrices, rest = _halves(Named())
    padding = 2 * 2 * 64 * 5  # of two moments on two ranks in five units, whole multiples of 256 bytes
    assert sum(momentum for _, momentum in found) == sum(param.numel() for param in matrices)
    assert 0 <= sum(moments for moments, _ in found) - 2 * sum(param.numel() for param in rest) <= padding


# ---- what it remembers


def _resumed(
    rank: int, folder: str, name: str, stage: int, world_size: int, saves: bool
) -> dict[str, Tensor]:
    model = make_model()
    make = {**ELEMENTWISE, **WHOLE, "Muon": None}[name]
    muon = {"type": "Muon", "params": {"lr": 0.01}}
    config = make_config(stage=stage, **({"optimizer": muon} if make is None else {}))
    engine, *_ = dslaunch.initialize(model=model, optimizer=make and make(model), config=config)
    if saves:
        train_engine(engine, steps=3)
        engine.save_checkpoint(folder)
    else:
        engine.load_checkpoint(folder)
    train_engine(engine, steps=3, first=3)
    return snapshot(model.named_parameters())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    few(
        ["Adam amsgrad", "NAdam", "SGD", "Halving", "Adafactor", "Muon"],
        lambda name: name in ("NAdam", "Muon"),
    ),
)
def test_a_checkpoint_keeps_what_it_remembers(ranks: Ranks, tmp_path: Any, name: str) -> None:
    on = ranks(_resumed, str(tmp_path), name, 2, 2, True, world_size=2)
    assert_same_bits(on[0], ranks(_resumed, str(tmp_path), name, 3, 2, False, world_size=2)[0])
    alone = ranks(_resumed, str(tmp_path), name, 1, 1, False, world_size=1)[0]
    limit = {"Muon": MUON_DRIFT, "Adafactor": STEEP_DRIFT}.get(name, DRIFT)
    assert worst_difference(alone, on[0]) <= limit


def _states(rank: int, name: str, key: str) -> dict[str, Tensor | None]:
    model = make_model()
    engine, *_ = dslaunch.initialize(
        model=model, optimizer={**ELEMENTWISE, **WHOLE}[name](model), config=make_config(stage=2)
    )
    train_engine(engine, steps=2)
    first = next(model.parameters())
    with pytest.raises(ConfigError, match=r"has no state 'none' of parameter 'first\.weight'; it has: "):
        dslaunch.zero.safe_get_full_optimizer_state(first, "none")
    seen = {
        param_name: dslaunch.zero.safe_get_full_optimizer_state(param, key)
        for param_name, param in model.named_parameters()
    }
    dslaunch.zero.safe_set_full_optimizer_state(first, torch.full_like(first, 7.0), key)
    again = dslaunch.zero.safe_get_full_optimizer_state(first, key)
    assert again is not None
    assert again.shape == first.shape
    assert bool((again == 7.0).all())
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(("name", "key"), [("SGD", "momentum_buffer"), ("Halving", "sum")])
def test_states_are_read_and_written_whole(ranks: Ranks, name: str, key: str) -> None:
    plain = make_model()
    optimizer = {**ELEMENTWISE, **WHOLE}[name](plain)
    train_plain(plain, optimizer, steps=2)
    for seen in ranks(_states, name, key, world_size=2):
        for param_name, param in plain.named_parameters():
            state = seen[param_name]
            assert state is not None
            torch.testing.assert_close(state, optimizer.state[param][key], rtol=0, atol=DRIFT)


def _goes_on(rank: int, name: str) -> list[dict[str, Tensor]]:
    return trained_at((0, 2, 3), STEPPED[name], steps_before=3)


STEPPED = {
    "SGD": ELEMENTWISE["SGD"],
    "AdamW": _of(torch.optim.AdamW, lr=0.01, eps=1e-3),
    "Halving": WHOLE["Halving"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", few(STEPPED, lambda name: name == "AdamW"))
def test_an_optimizer_that_has_stepped_before_goes_on(ranks: Ranks, name: str) -> None:
    expected = trained_plain(STEPPED[name])
    for by_stage in ranks(_goes_on, name, world_size=2):
        for result in by_stage:
            assert worst_difference(result, expected) <= DRIFT


def _allocations(rank: int) -> int:
    """Return how many whole shards of zeros a step makes when all states are there."""
    model = make_model()
    engine, *_ = dslaunch.initialize(
        model=model, optimizer=ELEMENTWISE["NAdam"](model), config=make_config(stage=1)
    )
    train_engine(engine, steps=2)
    shards = {sub_buffer.optimizer_shard.master.numel() for sub_buffer in engine._model.trained}
    made = []

    class Zeros(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func in (torch.zeros_like, torch.zeros) and result.numel() in shards:
                made.append(result.numel())
            return result

    with Zeros():
        train_engine(engine, steps=1, first=2)
    return len(made)


def test_states_that_are_there_are_not_made_again(ranks: Ranks) -> None:
    assert ranks(_allocations, world_size=2) == [0, 0]


def _looked_at(rank: int) -> str:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    assert not optimizer.state[next(model.parameters())]  # a look at it makes an empty entry
    chosen = dslaunch.initialize(model=model, optimizer=optimizer, config=make_config())[1]
    assert chosen is not None
    return type(chosen.rule).__name__


def test_an_adam_that_was_only_looked_at_is_fused(ranks: Ranks) -> None:
    assert ranks(_looked_at, world_size=1) == ["FusedRule"]


def _counts(rank: int) -> tuple[list[int], float]:
    model = make_model()
    client = Halving(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(client, step_size=1, gamma=0.1)
    engine, *_ = dslaunch.initialize(
        model=model, optimizer=client, lr_scheduler=scheduler, config=make_config(stage=2)
    )
    train_engine(engine, steps=3)
    return [group["calls"] for group in client.param_groups], client.param_groups[0]["lr"]


def test_what_an_optimizer_writes_into_its_groups_is_the_users_to_see(ranks: Ranks) -> None:
    for calls, lr in ranks(_counts, world_size=2):
        assert calls == [3]
        assert lr == pytest.approx(0.5e-3)


class ShortMemory(torch.optim.SGD):
    is_elementwise = True

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["half"] = param.grad.bfloat16()


def _says_elementwise(rank: int) -> str:
    model = make_model()
    engine, *_ = dslaunch.initialize(
        model=model, optimizer=ShortMemory(model.parameters()), config=make_config(stage=1)
    )
    with pytest.raises(ConfigError) as caught:
        train_engine(engine, steps=1)
    return str(caught.value)


def test_states_of_another_dtype_cannot_be_sharded(ranks: Ranks) -> None:
    assert ranks(_says_elementwise, world_size=1)[0].startswith(
        "optimizer ShortMemory keeps torch.bfloat16 in its state 'half'"
    )


# ---- who owns what


@pytest.mark.parametrize(
    ("numels", "num_ranks", "owners"),
    [
        ([5], 2, (0,)),
        ([1, 9, 3, 3], 2, (1, 0, 1, 1)),
        ([4, 4, 4], 3, (0, 1, 2)),
        ([2, 2, 2, 2, 8], 2, (1, 1, 1, 1, 0)),
        ([], 2, ()),
    ],
)
def test_the_largest_goes_first_to_who_owns_least(
    numels: list[int], num_ranks: int, owners: Iterable[int]
) -> None:
    assert choose_owners(numels, num_ranks) == tuple(owners)


# ---- the formulas


def test_lamb_is_the_formula_in_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    param = nn.Parameter(torch.randn(5, 3, generator=generator))
    optimizer = FusedLamb([param], lr=0.1, weight_decay=0.3, betas=(0.8, 0.9), eps=1e-3)
    p, m, v = param.detach().double().clone(), torch.zeros(5, 3).double(), torch.zeros(5, 3).double()
    for step in range(1, 6):
        param.grad = torch.randn(5, 3, generator=generator)
        g = param.grad.double()
        optimizer.step()
        m = 0.8 * m + 0.2 * g
        v = 0.9 * v + 0.1 * g * g
        u = m / (v.sqrt() + 1e-3) + 0.3 * p
        size = 0.1 * math.sqrt(1 - 0.9**step) / (1 - 0.8**step)
        p = p - size * min(max(float(p.norm() / u.norm()), 0.01), 10.0) * u
        torch.testing.assert_close(param.detach().double(), p, rtol=0, atol=1e-5)


def test_lion_is_the_formula_in_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    param = nn.Parameter(torch.randn(5, 3, generator=generator))
    optimizer = FusedLion([param], lr=0.01, weight_decay=0.3, betas=(0.9, 0.8))
    p, m = param.detach().double().clone(), torch.zeros(5, 3).double()
    for _ in range(5):
        param.grad = torch.randn(5, 3, generator=generator)
        g = param.grad.double()
        optimizer.step()
        p = p - 0.01 * (torch.sign(0.9 * m + 0.1 * g) + 0.3 * p)
        m = 0.8 * m + 0.2 * g
        torch.testing.assert_close(param.detach().double(), p, rtol=0, atol=1e-6)
