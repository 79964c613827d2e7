"""DeepSpeed's own functions, run as they are installed, say the same of stage 3, and have the same table."""

from __future__ import annotations

import ast
import itertools
import re
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dslaunch.runtime.compat import estimate

ZERO = (
    Path(sys.prefix) / "deepspeed" / "deepspeed" / "runtime" / "zero"
)  # `make setup` puts the package there
FILES = {2: ZERO / "stage_1_and_2.py", 3: ZERO / "stage3.py"}
MODELS = ((1, 1), (124_439_808, 38_597_376), (7_615_616_512, 544_997_376), (70_553_706_496, 1_050_673_152))
CLUSTERS = ((1, 1), (8, 1), (4, 2), (1, 3), (8, 16), (3, 5))
FACTORS = (1.5, 1.0, 1.37)
_ROW = re.compile(r"^ *([\d.]+)G(?:i)?B \| *([\d.]+)G(?:i)?B \| (.*)$", re.MULTILINE)

needs_deepspeed = pytest.mark.skipif(
    not FILES[3].exists(), reason="without DeepSpeed in .venv/deepspeed; `make setup` puts it there"
)


@cache
def theirs(stage: int) -> SimpleNamespace:
    """The functions of one file of DeepSpeed's that estimate, without the rest of it,
    which takes seconds to import.
    """
    tree = ast.parse(FILES[stage].read_text())
    tree.body = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and (node.name.startswith("estimate_") or node.name == "model_to_params")
    ]
    names: dict[str, Any] = {"OffloadDeviceEnum": SimpleNamespace(cpu="cpu")}
    exec(compile(tree, str(FILES[stage]), "exec"), names)
    return SimpleNamespace(**names)


@needs_deepspeed
def test_numbers_of_stage_3_are_deepspeeds_for_every_model_cluster_and_way_to_offload() -> None:
    name = "estimate_zero3_model_states_mem_needs"
    their, our = getattr(theirs(3), name), getattr(estimate, name)
    for sizes, cluster, factor in itertools.product(MODELS, CLUSTERS, FACTORS):
        if cluster == (1, 1):  # where one rank holds whole gradients in 16 bits here
            continue
        for switches in itertools.product((True, False), repeat=3):
            given = (*sizes, *cluster, *switches, factor)
            assert our(*given) == pytest.approx(their(*given), abs=1), given
    assert our(*sizes, 2) == pytest.approx(their(*sizes, 2), abs=1)


def test_numbers_of_stage_2_are_what_a_rank_of_ours_holds() -> None:
    """Of 8 ranks on two hosts: parameters, a part of gradients in float32, and of masters and two moments."""
    for_gpu = 2 * 80 + (4 + 12) * 80 // 8
    assert estimate.estimate_zero2_model_states_mem_needs(80, 4, 2, False, 1.0) == (4 * 4 * 80, for_gpu)
    assert estimate.estimate_zero2_model_states_mem_needs(80, 4, 2, True, 1.0) == (4 * 4 * 80, 2 * 80)
    assert estimate.estimate_zero2_model_states_mem_needs(80, 1, 2, True, 1.0)[0] == (12 + 4) * 80 // 2


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100_003, 17)
        self.layers = nn.Sequential(nn.Linear(17, 41), nn.LayerNorm(41), nn.Linear(41, 17))
        self.head = nn.Linear(17, 100_003, bias=True)
        self.head.weight = self.embed.weight


@needs_deepspeed
@pytest.mark.parametrize("stage", [2, 3])
def test_tables_have_deepspeeds_columns_and_rows(stage: int, capsys: pytest.CaptureFixture[str]) -> None:
    model = Tied()
    for suffix, sizes in (("all_live", (model,)), ("all_cold", MODELS[2][: stage - 1])):
        name = f"estimate_zero{stage}_model_states_mem_needs_{suffix}"
        for cluster in CLUSTERS:
            getattr(theirs(stage), name)(*sizes, *cluster)
            expected = _ROW.findall(capsys.readouterr().out)
            getattr(estimate, name)(*sizes, *cluster, additional_buffer_factor=1.5)
            found = _ROW.findall(capsys.readouterr().out)
            assert [row[-1] for row in found] == [row[-1] for row in expected]
            assert len(expected) == (2 if stage == 2 else 6)


def test_tied_parameters_count_once_and_those_without_memory_each() -> None:
    model = Tied()
    layers = 17 * 41 + 41 + 2 * 41 + 41 * 17 + 17
    tied = 100_003 * 17
    assert estimate.count_params(model) == (tied + layers + 100_003, tied + 100_003)
    with torch.device("meta"):
        model = Tied()
    assert estimate.count_params(model)[0] == tied + layers + 100_003
    alias = nn.ParameterList([nn.Parameter(torch.ones(6))])
    alias.append(nn.Parameter(alias[0].data))
    assert estimate.count_params(alias)[0] == 6
    assert estimate.count_params(nn.ReLU()) == (0, 0)
