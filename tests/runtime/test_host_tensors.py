"""No tensor of the runtime lies where the program's default device happens to be: each says where.

The steps of all features run so where their waits are counted, in engine/test_on_cuda.py.
"""

from __future__ import annotations

import ast
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._device import _device_constructors

import dslaunch
from dslaunch.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state
from tests.fake_cuda.features import DEPTH, WIDTH, make_config
from tests.runtime.models import Blocks
from tests.runtime.ranks import Ranks

RUNTIME = Path(__file__).parents[2] / "runtime"
# As torch has it, and what is older.
MAKERS = {make.__name__.removeprefix("fft_") for make in _device_constructors()} | {
    "FloatTensor",
    "LongTensor",
    "ByteTensor",
}
PATCHES_MAKERS = "compat/on_device.py"  # has them as keys


def without_device(source: str) -> list[int]:
    """Return the lines in which something of torch's that makes tensors is named, and not where they lie."""
    tree = ast.parse(source)
    silent = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        and (node.module or "").partition(".")[0] == "torch"
        and any(one.name in MAKERS for one in node.names)
    ]
    saying = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and any(keyword.arg == "device" for keyword in node.keywords):
            saying |= {node.func, *node.args}  # partial(torch.zeros, device=...), too
    made = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in MAKERS
        and ast.unparse(node.value) in ("torch", "torch.nested", "torch.fft")
    )
    return silent + [node.lineno for node in made if node not in saying]


@pytest.mark.slow
def test_every_tensor_says_where_it_lies() -> None:
    """After torch.set_default_device("cuda") what was meant for host memory would be on the GPU."""
    found = {
        str(path.relative_to(RUNTIME)): lines
        for path in RUNTIME.rglob("*.py")
        if (lines := without_device(path.read_text()))
    }
    found.pop(PATCHES_MAKERS)
    assert not found, "give device=, and 'cpu' for host memory"


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("torch.empty(3)", [1]),
        ("torch.empty(3, device='cpu')", []),
        ("x = [torch.tensor(\n1.0)]", [1]),
        ("torch.empty_like(x)", []),
        ("x.new_zeros(3)", []),
        ("torch.full((), 1.0, pin_memory=True)", [1]),
        ("torch.tril_indices(3, 3)", [1]),
        ("torch.FloatTensor(3)", [1]),
        ("from torch import Tensor, zeros", [1]),
        ("make = torch.zeros", [1]),
        ("partial(torch.zeros, 3)", [1]),
        ("partial(torch.zeros, 3, device=device)", []),
        ("torch.stack([torch.zeros(3)], device=device)", [1]),
    ],
)
def test_what_counts_as_silent(source: str, lines: list[int]) -> None:
    assert without_device(source) == lines


PINNED, PLAIN = ({"device": "cpu", "pin_memory": is_pinned} for is_pinned in (True, False))
DISK = {"device": "nvme", "nvme_path": ""}  # in the test's folder
LIVES: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (1, {}, {}),
    (2, {"offload_optimizer": PINNED}, {}),
    (2, {}, {"optimizer": {"type": "Muon", "params": {"lr": 0.01}}}),
    (2, {"offload_optimizer": DISK}, {}),
    (3, {"offload_param": DISK, "offload_optimizer": DISK}, {}),
    (3, {"offload_param": PLAIN, "offload_optimizer": PLAIN}, {"flops_profiler": {"enabled": True}}),
]


def _whole_life(
    rank: int, stage: int, zero: dict[str, Any], changes: dict[str, Any], folder: str
) -> list[float]:
    """Make, train, read, save and load."""
    places = {
        name: {**part, "nvme_path": folder} if "nvme_path" in part else part for name, part in zero.items()
    }
    config = make_config(stage, zero_optimization=places, **changes)
    with ExitStack() as stack:
        if stage == 3:
            stack.enter_context(dslaunch.zero.Init(config_dict_or_path=config))
        with torch.device(f"cuda:{rank}"):
            torch.manual_seed(0)
            model = Blocks(WIDTH, DEPTH)
    data = [torch.full((WIDTH,), 0.1 * one, dtype=torch.bfloat16, device="cpu") for one in range(12)]
    engine, _, loader, _ = dslaunch.initialize(model=model, config=config, training_data=data)
    params = list(model.parameters())
    losses = []
    for number, one in enumerate(loader):
        loss = engine(one.to(engine.device)).float().pow(2).mean()
        losses.append(loss.item())
        engine.backward(loss)
        safe_get_full_grad(params[0])
        engine.step()
        if number == 1:
            engine.save_checkpoint(folder)
            engine.load_checkpoint(folder)
            engine.save_16bit_model(folder)
            if not zero:
                engine.offload_states()
                engine.reload_states()
    for read in (safe_get_full_fp32_param, partial(safe_get_full_optimizer_state, optim_state_key="exp_avg")):
        read(params[1])
    with dslaunch.zero.GatheredParameters(params, modifier_rank=0), torch.no_grad():
        params[0].add_(1)
    engine.destroy()
    return losses


def _plainly_and_beside(rank: int, folder: str) -> list[list[list[float]]]:
    """Return of each life the losses, and those as if it were on another rank's device."""
    found = []
    for number, given in enumerate(LIVES):
        plain = _whole_life(rank, *given, f"{folder}/{number}")
        with torch.device("cuda", 1 - rank):
            found.append([plain, _whole_life(rank, *given, f"{folder}/{number}-beside")])
    return found


def test_what_an_engine_does_beside_steps_makes_no_tensor_on_the_default_device(
    cuda_ranks: Ranks, tmp_path: Path
) -> None:
    for number in range(len(LIVES)):
        for name in (f"{number}", f"{number}-beside"):
            (tmp_path / name).mkdir()
    for of_rank in cuda_ranks(_plainly_and_beside, str(tmp_path), world_size=2):
        for given, (plain, beside) in zip(LIVES, of_rank, strict=True):
            assert beside == plain, given
