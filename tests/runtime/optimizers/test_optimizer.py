"""The fused optimizers as torch optimizers: groups, closures, missing and odd gradients, what is refused."""

from __future__ import annotations

import ast
import copy
import inspect
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dslaunch
from dslaunch.kernels import ADAM, AdamShard
from dslaunch.ops.adagrad import DeepSpeedCPUAdagrad
from dslaunch.ops.adam import DeepSpeedCPUAdam, FusedAdam
from dslaunch.ops.lamb import FusedLamb
from dslaunch.ops.lion import DeepSpeedCPULion, FusedLion

ROOT = Path(__file__).resolve().parents[3]
DEEPSPEED = ROOT / ".venv" / "deepspeed"
KINDS: list[type[torch.optim.Optimizer]] = [
    FusedAdam,
    DeepSpeedCPUAdam,
    FusedLion,
    DeepSpeedCPULion,
    DeepSpeedCPUAdagrad,
    FusedLamb,
]
every_kind = pytest.mark.parametrize("kind", KINDS)


def params(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Parameters with gradients, the same for every call."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for shape in shapes:
        param = nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        param.grad = torch.randn(shape, generator=generator).to(dtype)
        found.append(param)
    return found


def made(kind: Callable[..., torch.optim.Optimizer], given: Any, **options: Any) -> torch.optim.Optimizer:
    return kind(given, **options)


# ---- groups and hyper-parameters


@every_kind
def test_each_group_has_its_own_numbers(kind: type[torch.optim.Optimizer]) -> None:
    together, alone = params((5, 3), (4,)), params((5, 3), (4,))
    hyper: list[dict[str, Any]] = [{"lr": 0.1, "weight_decay": 0.2}, {"lr": 0.01}]
    one = made(kind, [{"params": [param], **own} for param, own in zip(together, hyper, strict=True)])
    others = [made(kind, [param], **own) for param, own in zip(alone, hyper, strict=True)]
    for optimizer in (one, *others):
        optimizer.step()
        optimizer.step()
    assert all(torch.equal(left, right) for left, right in zip(together, alone, strict=True))


@every_kind
def test_lr_may_be_a_tensor_and_a_scheduler_may_change_it(kind: type[torch.optim.Optimizer]) -> None:
    left, right = params((5, 3)), params((5, 3))
    optimizers = [made(kind, left, lr=torch.tensor(0.5)), made(kind, right, lr=0.5)]
    schedulers = [torch.optim.lr_scheduler.StepLR(one, step_size=1, gamma=0.5) for one in optimizers]
    for _ in range(3):
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
    assert torch.equal(left[0], right[0])
    assert float(optimizers[0].param_groups[0]["lr"]) == 0.0625


def test_names_of_parameters_are_kept() -> None:
    model = nn.Linear(3, 2)
    optimizer = FusedAdam(model.named_parameters())
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]


# ---- gradients


@every_kind
def test_without_a_gradient_nothing_moves_and_nothing_is_remembered(
    kind: type[torch.optim.Optimizer],
) -> None:
    moved, still = params((5, 3), (4,))
    before = still.detach().clone()
    still.grad = None
    optimizer = made(kind, [moved, still], lr=0.1, weight_decay=0.5)
    optimizer.step()
    assert torch.equal(still, before)
    assert list(optimizer.state) == [moved]
    made(kind, [nn.Parameter(torch.ones(3))]).step()


def test_a_gradient_that_comes_later_is_at_its_own_first_step() -> None:
    early, late = params((4,), (4,))
    alone = params((4,), (4,))[1]
    late_grad, late.grad = late.grad, None
    optimizer = FusedAdam([early, late])
    optimizer.step()
    late.grad = late_grad
    optimizer.step()
    FusedAdam([alone]).step()
    assert torch.equal(late, alone)
    assert [float(optimizer.state[one]["step"]) for one in (early, late)] == [2.0, 1.0]


@every_kind
def test_two_parameters_may_have_one_gradient(kind: type[torch.optim.Optimizer]) -> None:
    (first, second), (expected,) = params((4,), (4,)), params((4,))
    second.data = first.detach().clone()
    second.grad = first.grad
    made(kind, [first, second]).step()
    made(kind, [expected]).step()
    assert torch.equal(first, expected)
    assert torch.equal(second, expected)


def _sparse(**options: Any) -> tuple[nn.Embedding, nn.Embedding]:
    sides = []
    for is_sparse in (True, False):
        torch.manual_seed(0)
        embedding = nn.Embedding(10, 3, sparse=is_sparse)
        embedding(torch.tensor([1, 7, 1])).pow(2).sum().backward()
        sides.append(embedding)
    return sides[0], sides[1]


def test_adagrad_takes_sparse_gradients() -> None:
    sparse, dense = _sparse()
    before = sparse.weight.detach().clone()
    for one in (sparse, dense):
        DeepSpeedCPUAdagrad(one.parameters(), lr=0.1).step()
    assert torch.equal(sparse.weight, dense.weight)
    assert (sparse.weight != before).any(dim=1).nonzero().flatten().tolist() == [1, 7]


def test_adagrad_refuses_them_with_weight_decay() -> None:
    with pytest.raises(
        RuntimeError, match=r"group 0, parameter 0 has a sparse gradient and weight_decay=0\.1"
    ):
        DeepSpeedCPUAdagrad(_sparse()[0].parameters(), weight_decay=0.1).step()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not DeepSpeedCPUAdagrad])
def test_sparse_gradients_are_refused_by_name(kind: type[torch.optim.Optimizer]) -> None:
    expected = f"{kind.__name__}: group 0, parameter 0 has a gradient of layout torch.sparse_coo"
    with pytest.raises(RuntimeError, match=expected):
        made(kind, _sparse()[0].parameters()).step()


@every_kind
def test_other_dtypes_and_expanded_parameters_are_refused_by_name(kind: type[torch.optim.Optimizer]) -> None:
    for dtype in (torch.float64, torch.complex64):
        (param,) = params((3,), dtype=dtype)
        with pytest.raises(RuntimeError, match=rf"{kind.__name__}: group 0, parameter 0 is {dtype}"):
            made(kind, [param]).step()
        assert not made(kind, [param]).state
    wide = nn.Parameter(torch.zeros(1).expand(3))
    wide.grad = torch.ones(3)
    with pytest.raises(RuntimeError, match="group 0, parameter 0 is expanded"):
        made(kind, [wide]).step()


@pytest.mark.parametrize("kind", [DeepSpeedCPUAdam, DeepSpeedCPULion, DeepSpeedCPUAdagrad])
def test_those_for_host_memory_refuse_another_device(kind: type[torch.optim.Optimizer]) -> None:
    param = nn.Parameter(torch.zeros(3, device="meta"))
    param.grad = torch.zeros(3, device="meta")
    with pytest.raises(RuntimeError, match=rf"{kind.__name__}: group 0, parameter 0 is on meta"):
        made(kind, [param]).step()


# ---- a step


@every_kind
def test_a_closure_runs_first_with_gradients_on(kind: type[torch.optim.Optimizer]) -> None:
    (param,), (expected,) = params((4,)), params((4,))
    param.grad = None
    optimizer = made(kind, [param])

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (param * grad).sum()
        loss.backward()
        return loss

    grad = expected.grad
    assert grad is not None
    loss = (param.detach() * grad).sum()
    assert torch.equal(optimizer.step(closure), loss)  # type: ignore[arg-type]
    made(kind, [expected]).step()
    assert torch.equal(param, expected)
    assert made(kind, [expected]).step() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_call_of_the_kernel_updates_all_parameters(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    step = ADAM.step

    def counted(shards: Iterable[AdamShard], **options: Any) -> None:
        listed = list(shards)
        calls.append(len(listed))
        step(listed, **options)

    monkeypatch.setattr(ADAM, "step", counted)
    many = params(*[(n,) for n in range(40)], dtype=dtype)
    optimizer = FusedAdam([{"params": many[:20]}, {"params": many[20:], "lr": 0.1, "betas": (0.5, 0.6)}])
    optimizer.step()
    assert calls == [40]


@every_kind
def test_autograd_sees_that_parameters_have_changed(kind: type[torch.optim.Optimizer]) -> None:
    param = nn.Parameter(torch.ones(3))
    loss = (param * param).sum()
    param.grad = torch.ones(3)
    made(kind, [param]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("kind", [FusedAdam, FusedLion])
def test_zero_grad_does_as_set_grad_none_says(kind: type[torch.optim.Optimizer]) -> None:
    (param,) = params((3,))
    keeps = made(kind, [param], set_grad_none=False)
    keeps.zero_grad()
    assert torch.equal(param.grad, torch.zeros(3))  # type: ignore[arg-type]
    keeps.zero_grad(set_to_none=True)
    assert param.grad is None
    (param,) = params((3,))
    made(kind, [param]).zero_grad()
    assert param.grad is None


@every_kind
def test_torchs_grad_scaler_steps_it_and_skips_infinities(kind: type[torch.optim.Optimizer]) -> None:
    (param,), (expected,) = params((3,)), params((3,))
    grad, param.grad = param.grad, None
    assert grad is not None
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = made(kind, [param])
    made(kind, [expected]).step()
    for factor in (1.0, float("inf")):
        scaler.scale((param * grad * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert torch.equal(param, expected)
    assert scaler.get_scale() == 2.0


def test_the_gradient_stays_as_it_is() -> None:
    for kind in KINDS:
        (param,) = params((9,))
        before = param.grad.clone()  # type: ignore[union-attr]
        made(kind, [param], weight_decay=0.3).step()
        assert torch.equal(param.grad, before)  # type: ignore[arg-type]


# ---- refusals


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (
            FusedAdam,
            {"amsgrad": True},
            "FusedAdam: group 0 has amsgrad=True, which FusedAdam does not support",
        ),
        (DeepSpeedCPUAdam, {"amsgrad": True}, "DeepSpeedCPUAdam: group 0 has amsgrad=True"),
        (DeepSpeedCPUAdagrad, {"amsgrad": True}, "DeepSpeedCPUAdagrad: group 0 has amsgrad=True"),
        (FusedLamb, {"amsgrad": True}, "FusedLamb: group 0 has amsgrad=True"),
        (
            FusedLamb,
            {"max_grad_norm": 1.0},
            "FusedLamb: group 0 has max_grad_norm=1.0, which FusedLamb does not support",
        ),
        (FusedLamb, {"min_coeff": 2.0, "max_coeff": 1.0}, "min_coeff=2.0 and max_coeff=1.0"),
        (FusedAdam, {"lr": -0.1}, "group 0 has lr=-0.1; it must be finite and at least 0"),
        (FusedLion, {"lr": float("nan")}, "group 0 has lr=nan"),
        (FusedAdam, {"eps": -1e-8}, "group 0 has eps=-1e-08"),
        (FusedLamb, {"weight_decay": float("inf")}, "group 0 has weight_decay=inf"),
        (
            FusedLion,
            {"betas": (0.9, 1.0)},
            r"group 0 has betas=\(0.9, 1.0\); each must be at least 0 and below 1",
        ),
    ],
)
def test_what_is_not_done_is_refused_by_name(
    kind: type[torch.optim.Optimizer], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        made(kind, params((3,)), **options)


def test_a_group_that_is_refused_is_not_added() -> None:
    optimizer = FusedAdam(params((3,)))
    with pytest.raises(ValueError, match="group 1 has maximize=True"):
        optimizer.add_param_group({"params": params((3,)), "maximize": True})
    assert len(optimizer.param_groups) == 1


def test_a_bad_lr_that_comes_later_changes_nothing() -> None:
    (param,) = params((3,))
    optimizer = FusedAdam([param])
    optimizer.step()
    before = param.detach().clone()
    optimizer.param_groups[0]["lr"] = -1.0
    with pytest.raises(ValueError, match="lr: -1; must be finite and >= 0"):
        optimizer.step()
    assert torch.equal(param, before)
    assert float(optimizer.state[param]["step"]) == 1.0


# ---- as objects


@every_kind
@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
def test_a_copy_goes_on_like_the_original(kind: type[torch.optim.Optimizer], how: str) -> None:
    (param,) = params((3, 2))
    original = made(kind, [param], lr=0.1)
    original.step()
    copied = copy.deepcopy(original) if how == "deepcopy" else pickle.loads(pickle.dumps(original))
    (other,) = copied.param_groups[0]["params"]
    for optimizer, one in ((original, param), (copied, other)):
        one.grad = torch.ones(3, 2)
        optimizer.step()
        optimizer.zero_grad()
    assert other is not param
    assert torch.equal(other, param)


def test_modes_are_to_be_read() -> None:
    assert FusedAdam(params((1,))).adam_w_mode
    assert not DeepSpeedCPUAdam(params((1,)), adamw_mode=False).adam_w_mode


def test_the_facade_loads_them_on_first_use() -> None:
    assert dslaunch.ops.adam.FusedAdam is FusedAdam
    names = dir(dslaunch.ops)
    assert {"adagrad", "adam", "lamb", "lion"} <= set(names)
    with pytest.raises(
        AttributeError, match=rf"'dslaunch\.ops' has no attribute 'sgd'; it has {', '.join(names)}$"
    ):
        dslaunch.ops.sgd  # noqa: B018


@pytest.mark.slow
def test_importing_one_loads_neither_the_engine_nor_the_config() -> None:
    program = (
        "import sys, torch; before = set(sys.modules); import dslaunch.ops.adam\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    heavy = ("pydantic", "hjson", "dslaunch.runtime.config", "dslaunch.runtime.zero", "dslaunch.runtime.comm")
    assert not [name for name in loaded if name.startswith((*heavy, "dslaunch.launcher"))]
    assert len(loaded) < 40


# ---- the arguments of the real ones

READ_SIGNATURES = """
import importlib, inspect, json, sys
found = {}
for name in sys.argv[1:]:
    module, _, kind = name.rpartition(".")
    theirs = importlib.import_module(module.replace("dslaunch", "deepspeed"))
    given = list(inspect.signature(getattr(theirs, kind).__init__).parameters.values())[1:]
    found[name] = [[p.name, None if p.default is p.empty else p.default] for p in given]
print("signatures", json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not DEEPSPEED.exists(), reason="without DeepSpeed in .venv/deepspeed; `make setup` puts it there"
)
def test_the_arguments_and_defaults_are_those_of_deepspeed() -> None:
    names = [f"dslaunch.ops.{module}.{kind}" for module, kind in HOMES]
    done = subprocess.run(
        [sys.executable, "-c", READ_SIGNATURES, *names],
        env={**os.environ, "PYTHONPATH": str(DEEPSPEED), "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("signatures ")]
    theirs = json.loads(line.removeprefix("signatures "))
    for name, (module, kind) in zip(names, HOMES, strict=True):
        ours = inspect.signature(getattr(getattr(dslaunch.ops, module), kind))
        found = [
            [one.name, None if one.default is one.empty else one.default] for one in ours.parameters.values()
        ]
        assert json.loads(json.dumps(found)) == theirs[name], name


HOMES = [
    ("adam", "FusedAdam"),
    ("adam", "DeepSpeedCPUAdam"),
    ("lion", "FusedLion"),
    ("lion", "DeepSpeedCPULion"),
    ("adagrad", "DeepSpeedCPUAdagrad"),
    ("lamb", "FusedLamb"),
]


@pytest.mark.skipif(
    not DEEPSPEED.exists(), reason="without DeepSpeed in .venv/deepspeed; `make setup` puts it there"
)
@pytest.mark.parametrize("module", ["adam", "adagrad", "lion", "lamb"])
def test_every_optimizer_that_deepspeed_exports_is_here(module: str) -> None:
    tree = ast.parse((DEEPSPEED / "deepspeed" / "ops" / module / "__init__.py").read_text())
    theirs = {alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    ours = {kind for home, kind in HOMES if home == module}
    # ZenFlow splits a gradient's elements between the GPU and the host, which no placement here does.
    assert {name for name in theirs if not name.startswith("ZenFlow")} == ours


@pytest.mark.parametrize("kind", ["AdamW", "Adam", "Adagrad"])
def test_groups_of_torchs_optimizers_are_taken_with_the_arguments_of_accelerate(kind: str) -> None:
    """It gives the groups of the user's optimizer, and of its defaults lr and weight_decay only."""
    model = torch.nn.Linear(3, 2)
    groups = [{"params": [model.weight], "lr": 0.25, "weight_decay": 0.125}, {"params": [model.bias]}]
    users = getattr(torch.optim, kind)(groups, lr=0.5)
    defaults: dict[str, Any] = {name: users.defaults[name] for name in ("lr", "weight_decay")}
    if kind == "Adagrad":
        mine: Any = dslaunch.ops.adagrad.DeepSpeedCPUAdagrad(users.param_groups, **defaults)
    else:
        mine = dslaunch.ops.adam.DeepSpeedCPUAdam(users.param_groups, adamw_mode=kind == "AdamW", **defaults)
    assert [(group["lr"], group["weight_decay"]) for group in mine.param_groups] == [
        (0.25, 0.125),
        (0.5, users.defaults["weight_decay"]),
    ]
    before = model.weight.detach().clone()
    model(torch.ones(1, 3)).sum().backward()
    mine.step()
    assert not torch.equal(model.weight, before)
