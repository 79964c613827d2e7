"""What dump_state says that ranks hold is what they hold, by a census of all storages."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Mapping
from contextlib import redirect_stdout
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import dslaunch
from dslaunch.runtime.compat.pipeline.module import PipelineModule
from dslaunch.runtime.compat.pipeline.topology import topology_of
from dslaunch.runtime.metrics.memory_by_place import memory_by_place
from dslaunch.runtime.pipeline.layers import LayerSpec
from dslaunch.runtime.step.fused_rule import FusedRule
from dslaunch.shared.axes import axes_of_job
from tests.exhaustive import few
from tests.runtime.models import make_config
from tests.runtime.offload.census import LET_GO_S, Census
from tests.runtime.ranks import Ranks

pytestmark = pytest.mark.slow

WIDTH = 64
BLOCKS = 3  # of two stages one has two of them
BLOCK = 2 * 4 * WIDTH * WIDTH  # elements
NOT_HELD = 0.02  # of all: batches, losses and numbers, which are no part of the table
DIVIDED = {
    "autotp_size": 2,
    "partition_config": {
        "layer_specs": [
            {"patterns": [r".*\.?up\.weight$"], "partition_type": "column"},
            {"patterns": [r".*\.?down\.weight$"], "partition_type": "row"},
        ]
    },
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Case(NamedTuple):
    pp: int = 1
    tp: int = 1
    stage: int = 1
    is_bf16: bool = False


def _make(case: Case, *, loss_fn: Any = nn.functional.mse_loss, **changes: Any) -> Any:
    axes = axes_of_job(4, pp=case.pp, tp=case.tp)
    config = make_config(stage=case.stage, reduce_bucket_size=BLOCK, dump_state=True)
    config |= {"tensor_parallel": DIVIDED} if case.tp > 1 else {}
    config |= {"bf16": {"enabled": True}} if case.is_bf16 else {}
    config |= {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2}
    config |= changes
    config.pop("train_batch_size")
    model: nn.Module = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    if case.pp > 1:
        model = PipelineModule(
            [LayerSpec(Block) for _ in range(BLOCKS)],
            topology=topology_of(axes),
            loss_fn=loss_fn,
            partition_method="uniform",
        )
    return dslaunch.initialize(model=model, config=config)[0]


def _train(engine: Any, case: Case) -> None:
    """Up to the step's last backward where the program makes it itself, else with the step."""
    kind = torch.bfloat16 if case.is_bf16 else torch.float32
    batch = torch.ones(1, WIDTH, dtype=kind)
    if case.pp > 1:
        engine.train_batch(iter([(batch, batch)] * 2))
        return
    for number in range(2):
        loss = engine(batch).float().pow(2).mean()
        engine.backward(loss)
        if number == 0:
            engine.step()


def _measured(rank: int, case: Case) -> tuple[str, int]:
    """What was printed, and what a census finds after a whole backward."""
    printed, census = io.StringIO(), Census()
    with census:
        with redirect_stdout(printed):
            engine = _make(case)
        census.watch(engine)
        _train(engine, case)
        held, deadline = sum(census.look()), time.monotonic() + LET_GO_S / 4
        while time.monotonic() < deadline:  # gloo's threads let go of a collective's tensors a moment late
            time.sleep(LET_GO_S / 100)
            held = min(held, sum(census.look()))
    engine.destroy()
    return printed.getvalue(), held


def _row_of(rank: int, rows: list[Mapping[str, Any]]) -> Mapping[str, Any]:
    for row in rows:
        for run in row["ranks"].split(","):
            first, _, last = run.partition("-")
            if int(first) <= rank <= int(last or first):
                return row
    raise AssertionError(f"rank {rank} is in no row: {rows}")


CASES = [
    *(Case(tp=2, stage=stage, is_bf16=is_bf16) for stage in (0, 1, 2, 3) for is_bf16 in (False, True)),
    *(Case(pp=2, stage=stage, is_bf16=is_bf16) for stage in (0, 1) for is_bf16 in (False, True)),
    *(Case(pp=2, tp=2, stage=stage) for stage in (0, 1)),
    *(Case(stage=stage) for stage in (1, 3)),
]


@pytest.mark.parametrize("case", few(CASES, lambda one: one in (Case(tp=2, stage=3), Case(pp=2), CASES[-3])))
def test_the_table_is_what_the_ranks_hold(ranks: Ranks, case: Case) -> None:
    (printed, _), *others = measured = ranks(_measured, case, world_size=4)
    assert all(text == "" for text, _ in others)
    rows = json.loads(printed)["memory"]
    for rank, (_, held) in enumerate(measured):
        row = _row_of(rank, rows)
        said = sum(value for name, value in row.items() if name.endswith("_bytes"))
        if case.pp * case.tp == 4:  # who shares its layers with none has gradients in a batch alone
            said -= row["gradients_bytes"]
        assert said <= held <= said * (1 + NOT_HELD), (rank, row)


def test_stages_have_rows_of_their_own(ranks: Ranks) -> None:
    """AdamW in float32: 4 bytes of a parameter, 4 of its gradient, 8 of states over the two ranks."""
    rows = json.loads(ranks(_measured, Case(pp=2), world_size=4)[0][0])["memory"]
    assert rows == [
        {
            "ranks": ranks_of_stage,
            "place": f"stage {stage} of 2",
            "parameters_bytes": 4 * num_blocks * BLOCK,
            "gradients_bytes": 4 * num_blocks * BLOCK,
            "masters_bytes": 0,  # parameters in float32 are their own
            "states_bytes": 8 * num_blocks * BLOCK // 2,
            "whole_in_a_batch_bytes": 0,
        }
        for stage, ranks_of_stage, num_blocks in ((0, "0-1", 2), (1, "2-3", 1))
    ]


def _in_a_batch(rank: int, stage: int, how: dict[str, str]) -> tuple[str, int, int]:
    """What was printed, and in the loss function of the last micro batch the bytes of whole parameters, and
    of gradients that autograd has made; on ranks of the first stage 0.
    """
    seen = [0, 0]

    def loss_fn(outputs: Tensor, labels: Tensor) -> Tensor:
        whole = [one.param_shard.values.flat for unit in engine._model.units for one in unit.sub_buffers]
        grads = [one.grad for one in engine.module.parameters() if one.grad is not None]
        seen[:] = [sum(one.untyped_storage().nbytes() for one in some) for some in (whole, grads)]
        return nn.functional.mse_loss(outputs, labels)

    printed = io.StringIO()
    with redirect_stdout(printed):
        engine = _make(Case(pp=2, stage=stage), loss_fn=loss_fn, pipeline=how)
    batch = torch.ones(1, WIDTH)
    engine.train_batch(iter([(batch, batch)] * 2))
    engine.destroy()
    return printed.getvalue(), *seen


@pytest.mark.parametrize(
    ("stage", "how"),
    [
        (2, {}),
        (3, {}),
        (3, {"reduce": "micro_batch", "unshard": "micro_batch"}),
        (3, {"unshard": "micro_batch"}),
    ],
)
def test_what_a_pipeline_has_whole_while_a_batch_runs(ranks: Ranks, stage: int, how: dict[str, str]) -> None:
    (printed, *_), *_, (_, whole, grads) = ranks(_in_a_batch, stage, how, world_size=4)
    (row,) = (one for one in json.loads(printed)["memory"] if one["place"].startswith("stage 1"))
    has_whole = stage == 3 and "unshard" not in how
    has_grads = "reduce" not in how
    assert row["whole_in_a_batch_bytes"] == (whole if has_whole else 0) + (grads if has_grads else 0)
    assert row["whole_in_a_batch_bytes"] == 4 * BLOCK * (has_whole + has_grads)


def _with_torchs_optimizer(rank: int) -> list[dict[str, Any]]:
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.NAdam(model.parameters(), lr=0.1)
    engine, *_ = dslaunch.initialize(
        model=model, optimizer=optimizer, config={"train_micro_batch_size_per_gpu": 1}
    )
    rows = memory_by_place(engine._model, has_states=isinstance(engine.optimizer.rule, FusedRule))
    engine.destroy()
    return rows


def test_states_that_torch_makes_in_the_first_step_are_not_known(ranks: Ranks) -> None:
    for (row,) in ranks(_with_torchs_optimizer, world_size=2):
        assert row["states_bytes"] is None
