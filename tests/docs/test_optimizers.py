"""The program in the guide to the fused optimizers runs, and what it tells of rounding is so."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from dslaunch.ops.adam import FusedAdam

GUIDE = (Path(__file__).resolve().parents[2] / "docs" / "train" / "optimizers.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_program_runs_and_torch_goes_on_from_it() -> None:
    (program,) = PROGRAMS
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    said = re.fullmatch(r"loss (\S+) after 50 steps\n", done.stdout)
    assert said is not None
    assert float(said.group(1)) < 5  # it begins with 16


@pytest.mark.parametrize(("lr", "moves"), [(0.0038, False), (0.0040, True)])
def test_a_bfloat16_parameter_grows_by_no_less_than_it_can_hold(lr: float, moves: bool) -> None:
    assert "a bfloat16 parameter of 1.0 does not grow in steps of less than 0.0039" in GUIDE
    param = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    param.grad = -torch.ones(1, dtype=torch.bfloat16)
    FusedAdam([param], lr=lr).step()
    assert bool(param > 1) is moves
