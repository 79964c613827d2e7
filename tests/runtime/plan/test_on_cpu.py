"""Predicted host memory beside a census of the storages of the same steps on CPUs."""

from __future__ import annotations

import pytest

from tests.runtime.plan.beside import Row
from tests.runtime.plan.layouts import layout
from tests.runtime.plan.on_cpu import measure_on_cpu, predict_on_cpu

TOLERANCE = 0.05
LAYOUTS = (("stage 0", "fp32"), ("stage 2", "bf16"), ("stage 3", "fp32"))


def assert_alike(*words: str, program: str = "blocks") -> None:
    from tests.runtime.ranks import Ranks

    name, config = layout(*words)
    row = Row(program=program, layout=name, config=config)
    planned, problem = predict_on_cpu(row)
    ranks = Ranks()  # of its own: the census stays in the processes
    try:
        real = ranks(measure_on_cpu, row, world_size=row.world_size)[0]
    finally:
        ranks.stop()
    assert problem == ""
    assert planned == pytest.approx(real, rel=TOLERANCE)


@pytest.mark.slow
@pytest.mark.ranks
def test_a_plan_says_what_memory_a_run_on_cpus_needs() -> None:
    assert_alike("stage 1", "fp32")


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    "words",
    [("stage 0", "fp32"), ("stage 2", "bf16"), ("stage 3", "fp32"), ("stage 3", "bf16")],
    ids=", ".join,
)
def test_a_plan_says_what_memory_a_run_on_cpus_needs_in_every_layout(words: tuple[str, str]) -> None:
    assert_alike(*words)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("zero", ["stage 0", "stage 2", "stage 3"])
@pytest.mark.parametrize("program", ["Llama, 4 bits, LoRA", "Llama, 8 bits, LoRA", "Llama, torchao, LoRA"])
def test_a_plan_says_what_memory_adapters_of_a_quantized_model_need(zero: str, program: str) -> None:
    pytest.importorskip("torchao" if "torchao" in program else "bitsandbytes")
    assert_alike(zero, "bf16", program=program)
