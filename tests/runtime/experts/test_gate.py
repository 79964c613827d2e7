"""Which experts a token goes to: as in DeepSpeed, to the bit on the same machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dslaunch.runtime.errors import ConfigError
from dslaunch.runtime.experts.gate import Routes, TopKGate
from tests.runtime.experts.gate_cases import CASES, GOLDEN, bits, gate_inputs, options

DEEPSPEED = Path(sys.prefix) / "deepspeed"  # `make setup` puts the package there
CHECKOUT = Path(__file__).parents[3]
LAST_BITS = 64  # of float32, 8e-6 of a value: what CPUs may differ by; a rule of another kind differs by more


def _routes(name: str) -> Routes:
    case, number = CASES[name], list(CASES).index(name)
    gate = TopKGate(**options(case)).train(not case.get("eval"))
    tokens, used = gate_inputs(gate, case, number)
    routes: Routes = gate(tokens, used)
    return routes


def _as_bits(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


@pytest.mark.parametrize("name", CASES)
def test_routes_are_deepspeeds(name: str) -> None:
    expected, routes = json.loads(GOLDEN.read_text())[name], _routes(name)
    assert (routes.capacity, routes.num_experts) == (expected["capacity"], expected["num_experts"])
    for field in ("experts", "places", "counts"):
        assert bits(getattr(routes, field)) == expected[field], field
    for field in ("weights", "l_aux"):
        found, wanted = _as_bits(bits(getattr(routes, field))), _as_bits(expected[field])
        assert (found - wanted).abs().max() <= LAST_BITS, field


@pytest.mark.slow
@pytest.mark.skipif(not (DEEPSPEED / "deepspeed").is_dir(), reason="make setup has not found DeepSpeed")
def test_routes_are_deepspeeds_of_this_machine_to_the_bit(tmp_path: Path) -> None:
    path = tmp_path / "made.json"
    variables = {**os.environ, "PYTHONPATH": str(DEEPSPEED), "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "-m", "tests.runtime.experts.gate_cases", str(path)]
    done = subprocess.run(command, cwd=CHECKOUT, env=variables, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    for name, expected in json.loads(path.read_text()).items():
        routes = _routes(name)
        for field in ("experts", "places", "weights", "l_aux", "counts"):
            assert bits(getattr(routes, field)) == expected[field], (name, field)


def test_the_cases_drop_tokens_and_keep_all() -> None:
    golden = json.loads(GOLDEN.read_text())
    drops = {name: -1 in {expert for row in one["experts"] for expert in row} for name, one in golden.items()}
    assert drops["k1-tight"]
    assert drops["k2-tight"]
    assert drops["k3-tight"]
    assert not any(drops[f"k{k}-no-drop"] for k in (1, 2, 3))


def test_a_gate_is_computed_in_float32_under_autocast() -> None:
    gate = TopKGate(8, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert gate(torch.randn(16, 8)).weights.dtype == torch.float32


def test_what_a_gate_cannot_do_is_refused() -> None:
    with pytest.raises(ConfigError, match="16 tokens and min_capacity 32"):
        TopKGate(8, 4, min_capacity=32)(torch.randn(16, 8))
    with pytest.raises(ConfigError, match="k=5: a token goes to at least 1 and at most all 4 experts"):
        TopKGate(8, 4, k=5)
