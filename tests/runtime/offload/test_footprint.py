"""The bytes that training holds at most, on the device, in host memory and on a disk, are the formula's; and
the guide says the formula.

How the two memories are told apart on a machine that has one is said in census.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import dslaunch
from dslaunch.runtime.placement.offload_plan import MemoryKind, OffloadPlan, Residence
from dslaunch.runtime.placement.stage_policy import policy_for_stage
from tests.exhaustive import few
from tests.runtime.footprint import Footprint, ModelSize, peak_bytes
from tests.runtime.models import make_config, make_model
from tests.runtime.offload.census import Census
from tests.runtime.offload.residences import PRECISIONS, pretended
from tests.runtime.ranks import Ranks

GUIDE = Path(__file__).parents[3] / "docs" / "train" / "offload.md"
RESIDENCES = {"none": MemoryKind.GPU, "cpu": MemoryKind.CPU, "nvme": MemoryKind.NVME}
WITHIN = 0.05
BLOCKS, WIDTH = 8, 128
PARAM = WIDTH * WIDTH // 2  # elements
UNIT = 2 * PARAM
PAGE = 4096  # a file ends at the end of one

# As the guide names them.
ROWS = {
    "stage 2": (2, "none", "none"),
    "stage 2, optimizer on `cpu`": (2, "cpu", "none"),
    "stage 2, optimizer on `nvme`": (2, "nvme", "none"),
    "stage 3": (3, "none", "none"),
    "stage 3, optimizer on `cpu`": (3, "cpu", "none"),
    "stage 3, optimizer on `nvme`": (3, "nvme", "none"),
    "stage 3, parameters on `nvme`": (3, "none", "nvme"),
    "stage 3, both on `cpu`": (3, "cpu", "cpu"),
    "stage 3, both on `nvme`": (3, "nvme", "nvme"),
}


class Deep(nn.Module):
    """Units of equal size, of two parameters each, and a root of nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDTH, WIDTH // 2, bias=False), nn.Tanh(), nn.Linear(WIDTH // 2, WIDTH, bias=False)
            )
            for _ in range(BLOCKS)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


class Case(NamedTuple):
    row: str
    precision: str
    num_micro_batches: int
    is_apart: bool  # the CPU counts as an accelerator

    def formula(self, num_ranks: int) -> Footprint:
        stage, states, parameters = ROWS[self.row]
        return peak_bytes(
            policy_for_stage(stage),
            OffloadPlan(
                states=Residence(kind=RESIDENCES[states]),
                parameters=Residence(kind=RESIDENCES[parameters]),
                has_host=self.is_apart,
            ),
            ModelSize(
                numel=BLOCKS * UNIT,
                unit_numel=UNIT,
                param_numel=PARAM,
                param_bytes=4 if self.precision == "fp32" else 2,
            ),
            num_ranks=num_ranks,
            is_accumulating=self.num_micro_batches > 1,
            is_gpu=False,
        )


def _engine(case: Case, folder: str) -> Any:
    stage, states, parameters = ROWS[case.row]
    config = make_config(
        stage=stage,
        reduce_bucket_size=UNIT,
        train_batch_size=case.num_micro_batches * torch.distributed.get_world_size(),
        gradient_accumulation_steps=case.num_micro_batches,
        **PRECISIONS[case.precision],
    )
    zero = config["zero_optimization"]
    zero["offload_optimizer"] = {"device": states, "nvme_path": folder}
    if stage == 3:
        zero |= {
            "offload_param": {"device": parameters, "nvme_path": folder},
            "stage3_prefetch_bucket_size": UNIT,
        }
    with pretended(case.is_apart):
        return dslaunch.initialize(model=make_model(Deep), config=config)[0]


def _train(engine: Any, dtype: torch.dtype) -> None:
    for _ in range(engine.gradient_accumulation_steps()):
        x = torch.ones(1, WIDTH, dtype=dtype)
        engine.backward(engine(x).float().square().mean())
        engine.step()


def _measure(rank: int, cases: list[Case], folder: str) -> list[tuple[int, int, int]]:
    """The most bytes on the device and in host memory, and those of all files of all ranks."""
    found = []
    for case in cases:
        formula = case.formula(torch.distributed.get_world_size())
        with Census() as census, census.of_steps():
            engine = _engine(case, folder)
            dtype = torch.float32 if case.precision == "fp32" else torch.bfloat16
            for _ in range(2):  # until units come early and files are there
                _train(engine, dtype)
            census.watch(engine, allowed=(1 + WITHIN) * formula.device)
            _train(engine, dtype)
            torch.distributed.barrier()
            files = [path for path in Path(folder).rglob("*") if path.is_file()]
            on_disk = sum(path.stat().st_size for path in files if path.suffix != ".lock")
            found.append((*census.most, on_disk))
            torch.distributed.barrier()
        engine.destroy()
    return found


# Where something leaves memory on CPUs, without pretending.
REAL = [row for row, residences in ROWS.items() if "nvme" in residences]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "precision", "num_micro_batches"),
    few([(2, "bf16", 3), (1, "fp32", 1)], lambda world_size, *_: world_size == 1),
)
def test_training_holds_what_the_formula_says(
    ranks: Ranks, tmp_path: Path, world_size: int, precision: str, num_micro_batches: int
) -> None:
    cases = [Case(row, precision, num_micro_batches, is_apart=True) for row in ROWS]
    if world_size == 1:
        cases += [Case(row, precision, num_micro_batches, is_apart=False) for row in REAL]
    measured = ranks(_measure, cases, str(tmp_path), world_size=world_size)
    wrong = []
    for place, case in enumerate(cases):
        formula = case.formula(world_size)
        for device, host, disk in (found[place] for found in measured):
            memories = (
                [(device, formula.device), (host, formula.host)]
                if case.is_apart
                else [(device + host, formula.device + formula.host)]
            )
            padding = world_size * BLOCKS * 5 * PAGE  # five files of a unit at most
            is_right = all(seen == pytest.approx(said, rel=WITHIN, abs=1) for seen, said in memories)
            if not is_right or not 0 <= disk - world_size * formula.disk <= padding:
                wrong.append((case, (device, host, disk), formula))
    assert not wrong, "\n".join(map(str, wrong))


def _term(text: str, letters: dict[str, float]) -> float:
    """As `3 k u/N`: a product."""
    return prod(float(factor) if factor.isdigit() else _quotient(factor, letters) for factor in text.split())


def _quotient(text: str, letters: dict[str, float]) -> float:
    above, _, below = text.partition("/")
    return letters[above] / (letters[below] if below else 1.0)


def _sum(text: str, letters: dict[str, float]) -> float:
    return sum(_term(term, letters) for term in text.split("+") if term.strip())


def _table() -> Iterator[list[str]]:
    for line in GUIDE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| stage") and len(cells) == 4:
            yield cells


@pytest.mark.parametrize("param_bytes", [2, 4])
def test_the_table_of_the_guide_is_the_formula(param_bytes: int) -> None:
    letters: dict[str, float] = {"n": 7e9, "N": 8, "u": 2e8, "p": 6e7, "b": param_bytes}
    seen = set()
    for row, *cells in _table():
        stage, states, parameters = ROWS[row]
        seen.add(row)
        plan = OffloadPlan(
            states=Residence(kind=RESIDENCES[states]),
            parameters=Residence(kind=RESIDENCES[parameters]),
            has_host=True,
        )
        size = ModelSize(
            numel=int(letters["n"]),
            unit_numel=int(letters["u"]),
            param_numel=int(letters["p"]),
            param_bytes=param_bytes,
        )
        said = peak_bytes(
            policy_for_stage(stage), plan, size, num_ranks=8, is_accumulating=False, is_gpu=True
        )
        is_apart = (states == "none") != (parameters == "none")
        letters["k"] = 8 if param_bytes == 4 and not is_apart else 12
        values = [_sum(re.sub("`", "", cell), letters) for cell in cells]
        assert values == pytest.approx([said.device, said.host, said.disk]), row
    assert seen == set(ROWS)
