"""Twenty steps of every optimizer beside another implementation: torch's own,
or the formula in float64 from step to step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.kernels.optimizers import ADAGRAD, ADAM, LAMB, LION, SGD, Arrays, Optimizer, make_arrays

NUMEL = 1017
STEPS = 20
# Each step moves p by about lr, and each side rounds a few times on the way: 4 roundings of numbers up to 4.
TOLERANCE = STEPS * 4 * 4 * 2.0**-24

PEERS: list[tuple[Optimizer, dict[str, Any], Callable[..., torch.optim.Optimizer], dict[str, Any]]] = [
    (ADAM[0], {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99}, torch.optim.AdamW,
     {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}),
    (ADAM[1], {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99}, torch.optim.Adam,
     {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}),
    (ADAGRAD, {}, torch.optim.Adagrad, {"lr": 1e-2, "lr_decay": 1e-2, "eps": 1e-10, "weight_decay": 0.1}),
    (SGD[0], {}, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    (SGD[1], {}, torch.optim.SGD, {"lr": 1e-2, "dampening": 0.3, "weight_decay": 0.1}),
    (SGD[2], {}, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
]  # fmt: skip


def fresh(optimizer: Optimizer) -> Arrays:
    """Before the first step: states of zeros."""
    arrays = make_arrays(optimizer, NUMEL, seed=1)
    for name in optimizer.states:
        arrays[name].zero_()
    return arrays


def gradients() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(NUMEL, generator=generator) for _ in range(STEPS)]


def run(optimizer: Optimizer, **hyper: Any) -> Arrays:
    arrays = fresh(optimizer)
    for step, grad in enumerate(gradients(), start=1):
        arrays["grad"].copy_(grad)
        counted = {"step": step} if hasattr(optimizer.segment, "step") else {}
        optimizer.run([arrays.under(optimizer.whole(NUMEL, **hyper, **counted))])
    return arrays


@pytest.mark.slow  # the first step of any torch optimizer imports much of torch
@pytest.mark.parametrize(("optimizer", "hyper", "kind", "torch_hyper"), PEERS, ids=[str(p[0]) for p in PEERS])
def test_twenty_steps_equal_torchs_optimizer(
    optimizer: Optimizer,
    hyper: dict[str, Any],
    kind: Callable[..., torch.optim.Optimizer],
    torch_hyper: dict[str, Any],
) -> None:
    param = torch.nn.Parameter(fresh(optimizer)["param"])
    peer = kind([param], **torch_hyper)
    for grad in gradients():
        param.grad = grad
        peer.step()
    ours = run(optimizer, **hyper)
    torch.testing.assert_close(ours["param"], param.detach(), rtol=TOLERANCE, atol=TOLERANCE)
    for name in optimizer.states:
        if name in peer.state[param] and peer.state[param][name] is not None:
            torch.testing.assert_close(ours[name], peer.state[param][name], rtol=TOLERANCE, atol=TOLERANCE)


def test_twenty_steps_of_lion_equal_the_papers_program() -> None:
    h = LION.segment
    p, m = fresh(LION)["param"].double(), torch.zeros(NUMEL, dtype=torch.float64)
    for grad in gradients():
        update = torch.sign(h.beta1 * m + (1 - h.beta1) * grad.double())
        p -= h.lr * (update + h.weight_decay * p)
        m = h.beta2 * m + (1 - h.beta2) * grad.double()
    ours = run(LION)
    torch.testing.assert_close(ours["param"].double(), p, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(ours["exp_avg"].double(), m, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("optimizer", LAMB, ids=str)
def test_twenty_steps_of_lamb_equal_the_papers_algorithm(optimizer: Optimizer) -> None:
    h, options = optimizer.segment, optimizer.options
    p = fresh(optimizer)["param"].double()
    m, v = torch.zeros(2, NUMEL, dtype=torch.float64)
    for step, grad in enumerate(gradients(), start=1):
        g = grad.double()
        m = h.beta1 * m + (1 - h.beta1) * g
        v = h.beta2 * v + (1 - h.beta2) * g * g
        root = torch.sqrt(v + h.eps) if options["eps_inside_sqrt"] else torch.sqrt(v) + h.eps
        u = m / root + h.weight_decay * p
        lr = h.lr
        if options["bias_correction"]:
            lr *= (1 - h.beta2**step) ** 0.5 / (1 - h.beta1**step)
        p = p - lr * (p.norm() / u.norm()).clamp(h.min_coeff, h.max_coeff) * u
    ours = run(optimizer)
    torch.testing.assert_close(ours["param"].double(), p, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(ours["exp_avg"].double(), m, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(ours["exp_avg_sq"].double(), v, rtol=TOLERANCE, atol=TOLERANCE)
