"""The gradient norm and the clip factor."""

from __future__ import annotations

from math import fsum, inf, isinf, isnan, nan, sqrt

import pytest
import torch
from torch import nn

import dslaunch
from dslaunch.runtime.step import grad_norm
from dslaunch.runtime.step.grad_norm import clip_factor
from tests.fake_cuda.torch_cuda import device
from tests.runtime.models import batch, loss_of, make_config, make_model
from tests.runtime.ranks import Ranks


@pytest.mark.parametrize(
    ("norm", "max_norm", "factor"),
    [(0.5, 1.0, 1.0), (2.0, 1.0, 1.0 / (2.0 + 1e-6)), (2.0, 0.0, 1.0), (0.0, 1.0, 1.0), (1e300, 1.0, 1e-300)],
)
def test_gradients_are_scaled_down_to_the_limit_and_never_up(
    norm: float, max_norm: float, factor: float
) -> None:
    assert clip_factor(norm, max_norm=max_norm) == pytest.approx(factor, rel=1e-12)


def _norm(rank: int, stage: int, bf16: bool) -> tuple[float, float]:
    """Return the engine's norm and torch's over the gradients of the whole batch."""
    dtype = torch.bfloat16 if bf16 else torch.float32
    plain = make_model().to(dtype)
    parts = batch(0).to(dtype).chunk(torch.distributed.get_world_size())
    total: list[torch.Tensor] = [torch.zeros_like(param, dtype=torch.float32) for param in plain.parameters()]
    for part in parts:
        plain.zero_grad()
        loss_of(plain, part).backward()
        for mean, param in zip(total, plain.parameters(), strict=True):
            assert param.grad is not None
            mean += param.grad.float() / len(parts)
    for mean, param in zip(total, plain.parameters(), strict=True):
        param.grad = mean.to(dtype)
    expected = torch.nn.utils.clip_grad_norm_([*plain.float().parameters()], inf)
    config = make_config(stage=stage, bf16={"enabled": bf16}, gradient_clipping=1e-3)
    engine, *_ = dslaunch.initialize(model=make_model(), config=config)
    engine.backward(loss_of(engine, parts[rank]))
    engine.step()
    norm = engine.get_global_grad_norm()
    assert norm is not None
    return norm, float(expected)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("world_size", [1, 3])
def test_the_norm_is_clip_grad_norms_before_clipping(ranks: Ranks, world_size: int, bf16: bool) -> None:
    first, *others = [ranks(_norm, stage, bf16, world_size=world_size) for stage in (0, 1, 2, 3)]
    assert all(other == first for other in others)  # equal to the bit, across stages
    for norm, expected in first:
        assert norm == first[0][0]  # and across ranks
        assert norm == pytest.approx(expected, rel=1e-6)  # torch adds in float32


def _overflowing(rank: int, value: float) -> float | None:
    model = nn.Linear(7, 1)
    engine, *_ = dslaunch.initialize(model=model, config=make_config(stage=1))
    with engine.no_sync():  # the step averages
        engine.backward(engine(batch(0, size=2)).sum())
    if rank == 1:
        assert model.weight.grad is not None
        model.weight.grad[0, 6] = value
    engine.step()
    return engine.get_global_grad_norm()


def test_squares_that_float32_cannot_hold_are_no_infinity(ranks: Ranks) -> None:
    for norm in ranks(_overflowing, 2e30, world_size=2):
        assert norm == pytest.approx(1e30, rel=1e-6)


def test_infinity_and_nan_come_through_to_every_rank(ranks: Ranks) -> None:
    assert all(norm is not None and isinf(norm) for norm in ranks(_overflowing, inf, world_size=2))
    assert all(norm is not None and isnan(norm) for norm in ranks(_overflowing, nan, world_size=2))


# ---- on a GPU with slow float64

BOUND = grad_norm._MOST_ROUNDINGS * 2.0**-24 / 2  # of the norm, relative
WIDTH = 61  # a parameter's squares are rounded no more often on the host, which stands in for the GPU


class Scaled(nn.Module):
    """Each parameter's gradient is its own input, so that they are of all sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(WIDTH)) for _ in range(20))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([weight @ row for weight, row in zip(self.weights, x, strict=True)]).sum()


def _inputs(scale: float) -> torch.Tensor:
    drawn = torch.randn(20, WIDTH, generator=torch.Generator().manual_seed(3))
    return drawn * torch.logspace(-2, 2, 20).unsqueeze(1) * scale


def _norm_on(rank: int, scale: float, capabilities: tuple[tuple[int, int], ...]) -> tuple[float, int]:
    """The norm of one step, whose gradients are the same on all ranks, and how often the host waited."""
    torch.cuda.init()  # type: ignore[no-untyped-call]  # which asks for it, too
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: capabilities[rank])
        config = make_config(stage=0, train_batch_size=torch.distributed.get_world_size())
        engine, *_ = dslaunch.initialize(model=Scaled(), config=config)
        for _ in range(2):  # in the first step ranks tell each other the order of gradients
            engine.backward(engine(_inputs(scale).to(engine.device)))
            torch.cuda.synchronize()
            device().clear_counters()
            engine.step()
            waits = sum(device().host_waits().values())
        norm = engine.get_global_grad_norm()
        engine.destroy()
    assert norm is not None
    return norm, waits


def _exact(scale: float) -> float:
    return sqrt(fsum((_inputs(scale).double() ** 2).flatten().tolist()))


FAST, SLOW = (9, 0), (8, 6)


@pytest.mark.parametrize(
    ("scale", "capabilities", "waits", "error"),
    [
        (1.0, (FAST,), 1, 1e-15),
        (1.0, (SLOW,), 1, BOUND),
        (1.0, (FAST, SLOW), 1, BOUND),  # the largest are the last rank's
        (1e25, (SLOW, FAST), 2, 1e-15),  # squares of float32 are infinite
        (1e-25, (FAST, SLOW), 2, 1e-15),  # or zero
        (1e25, (FAST,), 1, 1e-15),
    ],
)
def test_gpus_with_slow_float64_add_in_float32_where_that_is_near_enough(
    cuda_ranks: Ranks, scale: float, capabilities: tuple[tuple[int, int], ...], waits: int, error: float
) -> None:
    found = cuda_ranks(_norm_on, scale, capabilities, world_size=len(capabilities))
    assert found == found[:1] * len(capabilities)
    norm, waited = found[0]
    assert waited == waits
    assert norm == pytest.approx(_exact(scale), rel=error)
    assert (abs(norm / _exact(scale) - 1) > 1e-12) == (error == BOUND)  # it was float32


def _blocks(rank: int) -> list[float]:
    """The same values as one block, and as many."""
    chunks = [torch.linspace(-1, 1, 300, device="cuda"), torch.zeros(0, device="cuda")]
    found = []
    for block_numel in (300, 7):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(grad_norm, "_BLOCK_NUMEL", block_numel)
            found.append(float(grad_norm._sum_on_gpu(chunks, in_float32=True)))
    many = [torch.full((1,), 2.0**12, device="cuda"), *torch.ones(1000, device="cuda").split(1)]
    return [*found, float(grad_norm._sum_on_gpu(many, in_float32=True))]


def test_every_block_is_counted_once(cuda_ranks: Ranks) -> None:
    exact = fsum((torch.linspace(-1, 1, 300).double() ** 2).tolist())
    ((whole, cut, many),) = cuda_ranks(_blocks, world_size=1)
    assert whole == pytest.approx(exact, rel=300 * 2.0**-24)
    assert cut == pytest.approx(exact, rel=8 * 2.0**-24)
    assert many == 2.0**24 + 1000  # float32 has no odd numbers there
