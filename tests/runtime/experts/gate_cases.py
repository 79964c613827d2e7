"""The gating that is compared, and what DeepSpeed makes of it.

`gate_golden.json` was written by DeepSpeed 0.19.8 with torch 2.13 on a CPU, by

    PYTHONPATH=.venv/deepspeed DS_ACCELERATOR=cpu .venv/bin/python -m tests.runtime.experts.gate_cases

The last bits of its weights are those of that CPU: another one adds up with other instructions.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

GOLDEN = Path(__file__).with_name("gate_golden.json")
WIDTH, TOKENS, EXPERTS = 8, 24, 4
CASES: dict[str, dict[str, Any]] = {
    "k1": {},
    "k1-no-rts": {"use_rts": False},
    "k1-tight": {"capacity_factor": 0.5},
    "k1-tight-no-rts": {"capacity_factor": 0.5, "use_rts": False, "min_capacity": 2},
    "k1-no-drop": {"drop_tokens": False},
    "k1-jitter": {"noisy_gate_policy": "Jitter"},
    "k1-rsample": {"noisy_gate_policy": "RSample"},
    "k1-used": {"used": True, "capacity_factor": 0.6},
    "k1-eval": {"eval_capacity_factor": 2.0, "eval": True, "noisy_gate_policy": "RSample"},
    "k2": {"k": 2},
    "k2-tight": {"k": 2, "capacity_factor": 0.4},
    "k2-no-sampling": {"k": 2, "top2_2nd_expert_sampling": False},
    "k2-no-drop": {"k": 2, "drop_tokens": False},
    "k2-jitter": {"k": 2, "noisy_gate_policy": "Jitter"},
    "k3": {"k": 3},
    "k3-tight": {"k": 3, "capacity_factor": 0.5},
    "k3-no-drop": {"k": 3, "drop_tokens": False},
}


def gate_inputs(gate: Any, case: dict[str, Any], number: int) -> tuple[Tensor, Tensor | None]:
    """Give the gate its weights, and return tokens and which of them are used."""
    draw = torch.Generator().manual_seed(number)
    gate.wg.weight.data = torch.randn(EXPERTS, WIDTH, generator=draw)
    tokens = torch.randn(TOKENS, WIDTH, generator=draw)
    used = (torch.rand(TOKENS, generator=draw) > 0.3).long() if case.get("used") else None
    torch.manual_seed(100 + number)
    return tokens, used


def options(case: dict[str, Any]) -> dict[str, Any]:
    """What the gate is made with."""
    given = {name: value for name, value in case.items() if name not in ("used", "eval")}
    return {"model_dim": WIDTH, "num_experts": EXPERTS, "min_capacity": 4, **given}


def bits(value: Tensor) -> list[Any]:
    """Integers as they are, and numbers of float32 by their bits."""
    exact = value.detach().contiguous()
    if exact.dtype == torch.float32:
        exact = exact.view(torch.int32)
    listed: list[Any] = exact.tolist()
    return listed


def _write(path: Path) -> None:
    from deepspeed.moe.sharded_moe import TopKGate  # type: ignore[import-untyped,import-not-found,unused-ignore]

    golden = {}
    for number, (name, case) in enumerate(CASES.items()):
        gate = TopKGate(**options(case)).train(not case.get("eval"))
        tokens, used = gate_inputs(gate, case, number)
        l_aux, capacity, num, experts, places, weights, counts = gate(tokens, used, True)
        golden[name] = {
            "l_aux": bits(l_aux),
            "capacity": int(capacity),
            "num_experts": num,
            "experts": bits(experts.long()),
            "places": bits(places.long()),
            "weights": bits(weights),
            "counts": bits(counts.long()),
        }
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(one)}" for name, one in golden.items())
    path.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    _write(Path(sys.argv[1]) if sys.argv[1:] else GOLDEN)
