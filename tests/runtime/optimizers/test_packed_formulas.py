"""Every formula over flat arrays in two ways: our kernels in host memory,
and torch's operations, which a GPU gets.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dslaunch.kernels.cuda import lamb, steps
from dslaunch.kernels.cuda.arrays import CPU
from dslaunch.runtime.optimizers.adagrad import AdagradFormula
from dslaunch.runtime.optimizers.adam import AdamFormula
from dslaunch.runtime.optimizers.flat_arrays import ElementRun, FlatArrays
from dslaunch.runtime.optimizers.formula import Formula
from dslaunch.runtime.optimizers.lamb import LambFormula
from dslaunch.runtime.optimizers.lion import LionFormula
from dslaunch.runtime.optimizers.on_device import SWITCH
from dslaunch.runtime.optimizers.sgd import SgdFormula
from tests.kernels.cuda.host_device import HostDevice

N, CUT = 301, 117  # two groups that meet at an odd place; the last element belongs to none
JOINT = 64  # where one piece of the gradient ends and the next begins
SCALE = 0.37
STEPS = 4
# Two float32 programs of one formula, values up to 4: 4 steps * about 12 roundings * 4 * 2^-24. Seen: 2.4e-7.
ROUNDING = 4 * 12 * 4 * 2.0**-24

BASE: dict[str, Any] = {"weight_decay": 0.3, "eps": 1e-6, "betas": (0.9, 0.99)}
LAMB = {**BASE, "min_coeff": 0.01, "max_coeff": 10.0}
SGD = {"weight_decay": 0.3, "momentum": 0.9, "dampening": 0.0, "nesterov": False}
CASES: dict[str, tuple[Formula, dict[str, Any]]] = {
    "AdamW": (AdamFormula(adam_w_mode=True), BASE),
    "Adam": (AdamFormula(adam_w_mode=False), BASE),
    "AdamW without bias correction": (AdamFormula(adam_w_mode=True), {**BASE, "bias_correction": False}),
    "Lion": (LionFormula(), BASE),
    "Adagrad": (AdagradFormula(), {**BASE, "lr_decay": 0.1}),
    "Lamb": (LambFormula(eps_inside_sqrt=False), LAMB),
    "Lamb eps inside": (LambFormula(eps_inside_sqrt=True), {**LAMB, "bias_correction": False}),
    "SGD": (SgdFormula(), {**SGD, "momentum": 0.0}),
    "SGD momentum": (SgdFormula(), {**SGD, "dampening": 0.2}),
    "SGD nesterov": (SgdFormula(), {**SGD, "nesterov": True}),
}


def _normal(seed: int) -> Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(seed))


def _run(
    formula: Formula,
    way: str,
    group: dict[str, Any],
    dtype: torch.dtype | None,
    *,
    kind: type[Tensor] = Tensor,
) -> FlatArrays:
    """Two groups over a padded shard, the gradient in two pieces, scaled; `dtype`: of a copy,
    and of the gradients.
    """
    groups = [{**group, "lr": 0.1}, {**group, "lr": 0.02, "weight_decay": 0.0}]
    param, states = _normal(0), {name: torch.zeros(N) for name in formula.names_for(groups)}
    joint = JOINT if formula.is_elementwise else CUT  # else every run has its gradient in one piece
    param_out = None if dtype is None else torch.zeros(N, dtype=dtype)
    for step in range(1, STEPS + 1):
        grad = _normal(step) if dtype is None else _normal(step).to(dtype)
        one = FlatArrays(
            param=param.as_subclass(kind),
            grads=((0, grad[:joint]), (joint, grad[joint:])),
            states=states,
            runs=(
                ElementRun(offset=0, numel=CUT, group=groups[0], step=step),
                ElementRun(offset=CUT, numel=N - 1 - CUT, group=groups[1], step=step),
            ),
            param_out=param_out,
        )
        getattr(formula, way)([one], grad_scale=SCALE)
    return one


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_both_ways_do_the_same(name: str, dtype: torch.dtype | None) -> None:
    formula, group = CASES[name]
    ours, torchs = (
        _run(formula, way, group, dtype) for way in ("update_in_host_memory", "update_with_torch")
    )
    torch.testing.assert_close(ours.param, torchs.param, rtol=0, atol=ROUNDING)
    assert ours.states.keys() == torchs.states.keys()
    for state in ours.states:
        torch.testing.assert_close(ours.states[state], torchs.states[state], rtol=1e-6, atol=ROUNDING)
    for side in (ours, torchs):
        assert side.param[N - 1] == _normal(0)[N - 1]  # padding
        assert all(values[N - 1] == 0 for values in side.states.values())
        if side.param_out is not None:
            assert torch.equal(side.param_out[: N - 1], side.param[: N - 1].to(side.param_out.dtype))
            assert side.param_out[N - 1] == 0


@pytest.mark.parametrize(
    "options", [{}, {"momentum": 0.9, "dampening": 0.2}, {"momentum": 0.9, "nesterov": True}]
)
def test_sgd_is_torchs(options: dict[str, Any]) -> None:
    param, expected = _normal(0), torch.nn.Parameter(_normal(0))
    optimizer = torch.optim.SGD([expected], lr=0.1, weight_decay=0.3, **options)
    formula, group = SgdFormula(), optimizer.param_groups[0]
    states = {name: torch.zeros(N) for name in formula.names_for([group])}
    for step in range(1, 21):
        expected.grad = _normal(step)
        optimizer.step()
        run = ElementRun(offset=0, numel=N, group=group, step=step)
        formula.update([FlatArrays(param=param, grads=((0, _normal(step)),), states=states, runs=(run,))])
    torch.testing.assert_close(param, expected.detach(), rtol=0, atol=20 * 6 * 4 * 2.0**-24)


@pytest.mark.parametrize("way", ["update_in_host_memory", "update_with_torch"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_adam_is_torchs(kind: type[torch.optim.AdamW] | type[torch.optim.Adam], way: str) -> None:
    param, expected = _normal(0), torch.nn.Parameter(_normal(0))
    optimizer = kind([expected], lr=0.1, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.3)
    formula, group = AdamFormula(adam_w_mode=kind is torch.optim.AdamW), optimizer.param_groups[0]
    states = {name: torch.zeros(N) for name in formula.state_names}
    for step in range(1, STEPS + 1):
        expected.grad = _normal(step)
        optimizer.step()
        run = ElementRun(offset=0, numel=N, group=group, step=step)
        one = FlatArrays(param=param, grads=((0, _normal(step)),), states=states, runs=(run,))
        getattr(formula, way)([one])
    torch.testing.assert_close(param, expected.detach(), rtol=0, atol=ROUNDING)


# ---- on a device: the CUDA kernels' source runs on the host, and only torch's streams are not real -------


class OnDevice(Tensor):
    """In host memory, and says that it is not."""

    is_cpu = False
    is_cuda = True


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> HostDevice:
    return HostDevice(tmp_path_factory.mktemp("host-kernels"))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, host: HostDevice) -> HostDevice:
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=1234))
    for module in (steps, lamb):
        monkeypatch.setattr(module, "step", partial(module.step, device=host, device_types=(CPU,)))
    monkeypatch.setenv(SWITCH, "1")
    host.launches.clear()
    return host


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_on_a_device_our_kernels_do_what_they_do_in_host_memory(name: str, device: HostDevice) -> None:
    formula, group = CASES[name]
    ours = _run(formula, "update", group, torch.bfloat16, kind=OnDevice)
    assert device.launches
    in_host_memory = _run(formula, "update", group, torch.bfloat16)
    assert torch.equal(ours.param, in_host_memory.param)
    for state, values in in_host_memory.states.items():
        assert torch.equal(ours.states[state], values)
    assert ours.param_out is not None
    assert in_host_memory.param_out is not None
    assert torch.equal(ours.param_out, in_host_memory.param_out)


@pytest.mark.parametrize("name", ["AdamW", "Lamb"])
def test_without_the_switch_torchs_operations_do_it(
    name: str, device: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SWITCH)
    formula, group = CASES[name]
    ours = _run(formula, "update", group, torch.bfloat16, kind=OnDevice)
    assert not device.launches
    torchs = _run(formula, "update_with_torch", group, torch.bfloat16)
    assert torch.equal(ours.param, torchs.param)


def test_nothing_to_update_is_no_error() -> None:
    for formula, _ in CASES.values():
        formula.update([])
