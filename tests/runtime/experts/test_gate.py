"""Which experts a token goes to: as in DeepSpeed, to the bit."""

from __future__ import annotations

import json

import pytest
import torch

from dslaunch.runtime.errors import ConfigError
from dslaunch.runtime.experts.gate import TopKGate
from tests.runtime.experts.gate_cases import CASES, GOLDEN, bits, gate_inputs, options


@pytest.mark.parametrize("name", CASES)
def test_routes_are_deepspeeds_to_the_bit(name: str) -> None:
    case, number = CASES[name], list(CASES).index(name)
    expected = json.loads(GOLDEN.read_text())[name]
    gate = TopKGate(**options(case)).train(not case.get("eval"))
    tokens, used = gate_inputs(gate, case, number)
    routes = gate(tokens, used)
    assert (routes.capacity, routes.num_experts) == (expected["capacity"], expected["num_experts"])
    for field in ("experts", "places", "weights", "l_aux", "counts"):
        assert bits(getattr(routes, field)) == expected[field], field


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
