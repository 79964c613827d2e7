"""What the tests know about each optimizer: its classes, its formula in float64, its hyper-parameters.

Letters: n = elements of the shard, p = param, g = grad. A formula gets p, g (already scaled) and
the states as `Rounded`, does what the optimizer's paper says in the order of the kernel, and
returns the new p and states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt
from typing import Any

import torch
from hypothesis import strategies as st

from dslaunch import kernels
from tests.kernels.rounding import Rounded

Formula = Callable[[Any, Mapping[str, Any], Rounded, Rounded, Sequence[Rounded]], tuple[Rounded, ...]]

LR = st.floats(0, 1)
DECAY = st.floats(0, 1)
EPS = st.floats(1e-10, 1e-2)
STEP = st.integers(1, 10**6)
MOMENTS = {"beta1": st.floats(0, 0.9999), "beta2": st.floats(0, 0.99999)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """One optimizer in one of its modes."""

    name: str
    kernel: kernels.Kernel[Any]
    mode: int = 0
    segment: Any  # usual hyper-parameters, of no element yet
    another: Mapping[str, Any]  # hyper-parameters that differ from them
    formula: Formula
    any_hyper: Mapping[str, st.SearchStrategy[Any]]
    options: Mapping[str, Any] = field(default_factory=dict)  # what the mode means, for the formula

    takes_signs: bool = False  # so that an infinite gradient moves an element by lr

    def __str__(self) -> str:
        return self.name

    @property
    def states(self) -> tuple[str, ...]:
        return self.kernel.states

    def whole(self, numel: int, **hyper: Any) -> tuple[Any]:
        """All elements in one segment."""
        return (replace(self.segment, offset=0, numel=numel, **hyper),)

    def run(self, shards: Iterable[Any], *, fast: bool = True, **options: Any) -> None:
        if self.kernel is kernels.LAMB:
            step = kernels.lamb_step if fast else kernels.lamb_step_reference
            step(shards, **self.options, **options)
        else:
            step = self.kernel.step if fast else self.kernel.step_reference
            step(shards, mode=self.mode, **options)


@dataclass(frozen=True, slots=True)
class Arrays:
    """The tensors of one shard, by the names that the kernel's class has for them, and `grad`."""

    optimizer: Optimizer
    tensors: dict[str, torch.Tensor]

    def under(self, segments: Iterable[Any]) -> Any:
        """What the kernel takes, with the gradient in one piece."""
        tensors = dict(self.tensors)
        grad = tensors.pop("grad")
        return self.optimizer.kernel.shard(**tensors, grads=((0, grad),), segments=segments)

    def clone(self) -> Arrays:
        return Arrays(self.optimizer, {name: tensor.clone() for name, tensor in self.tensors.items()})

    def __getitem__(self, part: slice | str) -> Any:
        if isinstance(part, str):
            return self.tensors[part]
        return Arrays(self.optimizer, {name: tensor[part] for name, tensor in self.tensors.items()})


def make_arrays(
    optimizer: Optimizer,
    numel: int,
    *,
    grad: torch.dtype = torch.float32,
    state: torch.dtype = torch.float32,
    out: torch.dtype | None = None,
    seed: int = 0,
) -> Arrays:
    """Random values; states are squares, which every optimizer can start from."""
    generator = torch.Generator().manual_seed(seed)

    def normal() -> torch.Tensor:
        return torch.randn(numel, generator=generator)

    tensors = {"param": normal(), "grad": normal().to(grad)}
    tensors |= {name: normal().square().to(state) for name in optimizer.states}
    if optimizer.kernel.has_update:  # what a step writes and nothing keeps
        tensors["update"] = torch.full((numel,), 5.0)
    if out is not None:
        tensors["param_out"] = torch.full((numel,), 7.0, dtype=out)
    return Arrays(optimizer, tensors)


def assert_same_bits(a: Arrays, b: Arrays) -> None:
    for name, tensor in a.tensors.items():
        assert torch.equal(tensor.view(torch.uint8), b[name].view(torch.uint8)), name


def assert_follows_formula(before: Arrays, after: Arrays, segment: Any, *, grad_scale: float = 1.0) -> None:
    """Every element of every array within what the roundings may do."""
    optimizer = before.optimizer
    g = Rounded.exactly(before["grad"]) * Rounded.coefficient(grad_scale)
    states = [Rounded.exactly(before[name]) for name in optimizer.states]
    p, *states = optimizer.formula(segment, optimizer.options, Rounded.exactly(before["param"]), g, states)
    p.must_hold(after["param"], "param")
    for name, state in zip(optimizer.states, states, strict=True):
        dtype = after[name].dtype
        (state if dtype == torch.float32 else state.stored_as(dtype)).must_hold(after[name], name)
    if "param_out" in after.tensors:
        out = after["param_out"]
        assert torch.equal(out.view(torch.uint8), after["param"].to(out.dtype).view(torch.uint8))
    assert torch.equal(before["grad"], after["grad"])


# ---- formulas --------------------------------------------------------------------------------------------


c = Rounded.coefficient


def adam(
    h: Any, options: Mapping[str, Any], p: Rounded, g: Rounded, states: Sequence[Rounded]
) -> tuple[Rounded, ...]:
    m, v = states
    if options["adam_w_mode"]:
        p = p * c(1 - h.lr * h.weight_decay)
    else:
        g = g + c(h.weight_decay) * p
    m = c(h.beta1) * m + c(1 - h.beta1) * g
    v = c(h.beta2) * v + c(1 - h.beta2) * g * g
    step_size = c(h.lr / (1 - h.beta1**h.step))
    root = v.sqrt() * c(1 / sqrt(1 - h.beta2**h.step))
    return p - step_size * m / (root + c(h.eps)), m, v


def lion(
    h: Any, _: Mapping[str, Any], p: Rounded, g: Rounded, states: Sequence[Rounded]
) -> tuple[Rounded, ...]:
    (m,) = states
    direction = c(h.beta1) * m + c(1 - h.beta1) * g
    p = p * c(1 - h.lr * h.weight_decay) - c(h.lr) * direction.sign()
    return p, c(h.beta2) * m + c(1 - h.beta2) * g


def adagrad(
    h: Any, _: Mapping[str, Any], p: Rounded, g: Rounded, states: Sequence[Rounded]
) -> tuple[Rounded, ...]:
    g = g + c(h.weight_decay) * p
    s = states[0] + g * g
    return p - c(h.lr / (1 + (h.step - 1) * h.lr_decay)) * g / (s.sqrt() + c(h.eps)), s


def sgd(
    h: Any, _: Mapping[str, Any], p: Rounded, g: Rounded, states: Sequence[Rounded]
) -> tuple[Rounded, ...]:
    g = g + c(h.weight_decay) * p
    if h.momentum == 0:
        return p - c(h.lr) * g, *states
    b = c(h.momentum) * states[0] + c(1.0 if h.step == 1 else 1 - h.dampening) * g
    return p - c(h.lr) * (g + c(h.momentum) * b if h.nesterov else b), b


def lamb(
    h: Any, options: Mapping[str, Any], p: Rounded, g: Rounded, states: Sequence[Rounded]
) -> tuple[Rounded, ...]:
    m, v = states
    m = c(h.beta1) * m + c(1 - h.beta1) * g
    v = c(h.beta2) * v + c(1 - h.beta2) * g * g
    root = (v + c(h.eps)).sqrt() if options["eps_inside_sqrt"] else v.sqrt() + c(h.eps)
    u = m / root + c(h.weight_decay) * p
    param_norm, update_norm = sqrt(float((p.value**2).sum())), sqrt(float((u.value**2).sum()))
    step_size, quotient, quotient_error = h.lr, 1.0, 0.0
    if options["bias_correction"]:
        step_size *= sqrt(1 - h.beta2**h.step) / (1 - h.beta1**h.step)
    if param_norm > 0 and update_norm > 0:
        quotient = min(max(param_norm / update_norm, h.min_coeff), h.max_coeff)
        quotient_error = (
            quotient * sqrt(float((u.error**2).sum())) / update_norm
        )  # by the triangle inequality
    factor = c(step_size * quotient)
    factor = Rounded(factor.value, factor.error + 1.01 * step_size * quotient_error)
    return p - factor * u, m, v


# ---- the optimizers --------------------------------------------------------------------------------------

NOWHERE = {"offset": 0, "numel": 0}

ADAM = [
    Optimizer(
        name="AdamW" if adam_w_mode else "Adam",
        kernel=kernels.ADAM,
        segment=kernels.AdamSegment(
            **NOWHERE, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=3
        ),
        another={"lr": 1e-2, "beta1": 0.5, "weight_decay": 0.0, "step": 70},
        formula=adam,
        any_hyper={"lr": LR, **MOMENTS, "eps": EPS, "weight_decay": DECAY, "step": STEP},
        mode=int(adam_w_mode),
        options={"adam_w_mode": adam_w_mode},
    )
    for adam_w_mode in (True, False)
]

LION = Optimizer(
    name="Lion",
    kernel=kernels.LION,
    segment=kernels.LionSegment(**NOWHERE, lr=1e-3, beta1=0.9, beta2=0.99, weight_decay=0.1),
    another={"lr": 1e-2, "beta1": 0.5, "weight_decay": 0.0},
    formula=lion,
    takes_signs=True,
    any_hyper={"lr": LR, **MOMENTS, "weight_decay": DECAY},
)

ADAGRAD = Optimizer(
    name="Adagrad",
    kernel=kernels.ADAGRAD,
    segment=kernels.AdagradSegment(**NOWHERE, lr=1e-2, lr_decay=1e-2, eps=1e-10, weight_decay=0.1, step=3),
    another={"lr": 1e-3, "lr_decay": 0.0, "weight_decay": 0.0, "step": 70},
    formula=adagrad,
    any_hyper={"lr": LR, "lr_decay": st.floats(0, 1), "eps": EPS, "weight_decay": DECAY, "step": STEP},
)

SGD = [
    Optimizer(
        name=name,
        kernel=kernels.SGD,
        segment=kernels.SgdSegment(**NOWHERE, lr=1e-2, weight_decay=0.1, step=3, **hyper),
        another={"lr": 1e-3, "weight_decay": 0.0, "step": 1},
        formula=sgd,
        any_hyper={"lr": LR, "weight_decay": DECAY, "step": STEP, **any_hyper},
    )
    for name, hyper, any_hyper in (
        (
            "SGD",
            {"momentum": 0.9, "dampening": 0.3, "nesterov": False},
            {"momentum": st.floats(0, 1), "dampening": st.floats(-1, 1)},
        ),
        ("SGD without momentum", {"momentum": 0.0, "dampening": 0.3, "nesterov": False}, {}),
        (
            "SGD with Nesterov's momentum",
            {"momentum": 0.9, "dampening": 0.0, "nesterov": True},
            {"momentum": st.floats(1e-3, 1)},
        ),
    )
]

LAMB = [
    Optimizer(
        name="LAMB with eps inside the root" if eps_inside_sqrt else "LAMB",
        kernel=kernels.LAMB,
        segment=kernels.LambSegment(
            **NOWHERE, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-6, weight_decay=0.1, step=3
        ),
        another={"lr": 1e-2, "beta1": 0.5, "weight_decay": 0.0, "step": 70, "max_coeff": 1e-2},
        formula=lamb,
        any_hyper={
            "lr": LR,
            **MOMENTS,
            "eps": EPS,
            "weight_decay": DECAY,
            "step": STEP,
            "min_coeff": st.floats(0, 1),
            "max_coeff": st.floats(1, 100),
        },
        mode=int(eps_inside_sqrt),
        options={"eps_inside_sqrt": eps_inside_sqrt, "bias_correction": not eps_inside_sqrt},
    )
    for eps_inside_sqrt in (False, True)
]

OPTIMIZERS = (*ADAM, LION, ADAGRAD, *SGD, *LAMB)
