"""The row of the ZeRO paper for 7.5 billion parameters on 64 ranks, from the engine itself.

The whole engine is built as rank 5 of 64: the real cut into units, the real layouts, padding included,
and the real flat buffers, shards, masters and states, on torch's meta device, where a tensor has a size
and no memory. Only two checks stand aside, for what is not there: of the parameters' addresses, and of
the other ranks' models.
Source: ZeRO (arXiv 1910.02054) table 1
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import dslaunch
from dslaunch.runtime.compat.engine.engines import Engine
from dslaunch.runtime.compat.engine.optimizer import DeepSpeedOptimizer
from dslaunch.runtime.config import load_config
from dslaunch.runtime.environment import read_environment
from dslaunch.runtime.step.choose_optimizer import choose_optimizer
from dslaunch.runtime.zero.model import sharded_model as sharded_model
from dslaunch.runtime.zero.units import partition
from dslaunch.shared.axes import axes_of_job

pytestmark = pytest.mark.slow

RANK, NUM_RANKS = 5, 64
PSI = 7.5e9
WIDTH, NUM_BLOCKS, NUM_EMBEDDED = 4096, 37, 12_048  # 7,500,410,880 parameters
PAPER_GB = {0: 120.0, 1: 31.4, 2: 16.6, 3: 1.88}
TOLERANCE = 0.02
# The paper counts 2 bytes for a gradient; without grad_accum_dtype we add up the micro batches'
# shards in float32.
EXTRA_GB = 2 * PSI / NUM_RANKS / 1e9


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.attention_out = nn.Linear(WIDTH, WIDTH)
        self.feed_norm = nn.LayerNorm(WIDTH)
        self.feed_in = nn.Linear(WIDTH, 4 * WIDTH)
        self.feed_out = nn.Linear(4 * WIDTH, WIDTH)


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_EMBEDDED, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)


class Held(NamedTuple):
    """Billions of bytes of one rank."""

    parameters: float
    gradients: float
    masters_and_states: float

    @property
    def total(self) -> float:
        return sum(self)


@pytest.fixture
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[dslaunch.Engine]:
    stage, sums = request.param
    monkeypatch.setattr(partition, "_check_storage", lambda params: None)
    monkeypatch.setattr(sharded_model, "_check_agreement", lambda units, job, settings: None)
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=NUM_RANKS)
    try:
        with torch.device("meta"):
            model = GPT()
        config = load_config(
            {
                "train_micro_batch_size_per_gpu": 1,
                "bf16": {"enabled": True},
                "optimizer": {"type": "AdamW"},
                "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
                "data_types": {"grad_accum_dtype": sums},
            },
            world_size=NUM_RANKS,
        )
        yield Engine(
            model,
            axes=axes_of_job(NUM_RANKS),
            config=config,
            optimizer=choose_optimizer(
                config, kind=DeepSpeedOptimizer, client=None, module=model, model_parameters=None
            ),
            device=torch.device("meta"),
            worker=read_environment({"DSLAUNCH_WATCHDOG_S": "0"}),
        )
    finally:
        dist.destroy_process_group()


def _gigabytes(*tensors: Tensor) -> float:
    """What their storages take, each once."""
    storages = {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in tensors}
    return sum(storages.values()) / 1e9


def _held(engine: dslaunch.Engine) -> Held:
    sub_buffers = engine._model.trained
    return Held(
        parameters=_gigabytes(
            *(
                tensor
                for sub_buffer in sub_buffers
                for tensor in (sub_buffer.param_shard.values.flat, sub_buffer.param_shard.own)
            )
        ),
        gradients=_gigabytes(
            *(
                tensor
                for sub_buffer in sub_buffers
                for tensor in (sub_buffer.gradients.flat, sub_buffer.gradients.shard)
            )  # type: ignore[attr-defined]
        ),
        masters_and_states=_gigabytes(
            *(
                tensor
                for sub_buffer in sub_buffers
                for tensor in (sub_buffer.optimizer_shard.master, *sub_buffer.optimizer_shard.states.values())
            )
        ),
    )


def _all_live() -> float:
    gc.collect()
    return _gigabytes(
        *(one for one in gc.get_objects() if type(one) in (Tensor, nn.Parameter) and one.is_meta)
    )


@pytest.mark.parametrize(
    "engine", [(0, None), (1, None), (2, "bf16"), (3, "bf16"), (2, None), (3, None)], indirect=True
)
def test_a_rank_holds_what_the_paper_says(engine: dslaunch.Engine) -> None:
    stage = engine.zero_optimization_stage()
    assert sum(param.numel() for param in engine.parameters()) == pytest.approx(PSI, rel=1e-4)
    assert len(engine._model.units) > NUM_BLOCKS
    held = _held(engine)
    shards = 1 if stage == 0 else NUM_RANKS
    assert held.masters_and_states == pytest.approx(12 * PSI / shards / 1e9, rel=TOLERANCE)
    assert held.parameters == pytest.approx(2 * PSI / (NUM_RANKS if stage == 3 else 1) / 1e9, rel=TOLERANCE)
    is_wider = stage >= 2 and engine.settings.data_types.grad_accum_dtype is None
    extra = EXTRA_GB if is_wider else 0.0
    assert held.total - extra == pytest.approx(PAPER_GB[stage], rel=TOLERANCE)
    assert _all_live() == pytest.approx(held.total, rel=1e-6), "nothing else is there"
