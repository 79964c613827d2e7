"""Any stage, offload and number of ranks reads what any other wrote: the same bits,
and the same training afterwards.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.exhaustive import few
from tests.runtime.checkpoint.states import make, run, whole_state
from tests.runtime.models import assert_same_bits
from tests.runtime.offload.residences import pretended
from tests.runtime.ranks import Ranks

BEFORE, AFTER = 2, 2  # steps


class Row(NamedTuple):
    """How an engine holds its state."""

    stage: int
    states: str = "none"  # offload_optimizer.device
    parameters: str = "none"  # offload_param.device
    is_apart: bool = False  # the CPU counts as an accelerator
    bf16: bool = True

    def __str__(self) -> str:
        return self.name

    @property
    def name(self) -> str:
        return f"stage{self.stage}-{self.states}-{self.parameters}-{'bf16' if self.bf16 else 'fp32'}"


NVME, HOST, HOST_STATES = (
    Row(3, "nvme", "nvme"),
    Row(3, "cpu", "cpu", is_apart=True),
    Row(2, "cpu", is_apart=True),
)
FLOAT32 = (Row(0, bf16=False), Row(3, bf16=False))
# By the number of ranks, what they write; each stage and each number of ranks writes, and reads.
WRITERS: dict[int, tuple[Row, ...]] = {
    1: (Row(0),),
    2: (Row(3), Row(1, "nvme"), HOST_STATES, HOST, NVME, *FLOAT32),
    3: (Row(2),),
    4: (Row(1),),
}


def _engine(row: Row, folder: Path, *, seed: int) -> object:
    zero = {"stage": row.stage, "reduce_bucket_size": 1}
    zero["offload_optimizer"] = {"device": row.states, "nvme_path": str(folder)}
    if row.stage == 3:
        zero["offload_param"] = {"device": row.parameters, "nvme_path": str(folder)}
    with pretended(row.is_apart):
        return make(row.stage, row.bf16, seed=seed, zero_optimization=zero)


def _save(rank: int, rows: tuple[Row, ...], root: Path) -> None:
    world_size = torch.distributed.get_world_size()
    for row in rows:
        engine = _engine(row, root, seed=0)
        folder = root / f"{row.name}-{world_size}"
        engine.module.note = "kept"
        run(engine, first=0, steps=BEFORE)
        engine.save_checkpoint(folder, client_state={"epoch": 3, "seen": torch.arange(2)})
        expected = {"saved": whole_state(engine), "lr": engine.get_lr(), "world_size": world_size}
        run(engine, first=BEFORE, steps=AFTER)
        expected["later"] = whole_state(engine)
        if rank == 0:
            torch.save(expected, folder / "expected")
        engine.destroy()
    torch.distributed.barrier()


def _load(rank: int, row: Row, root: Path, names: list[str]) -> int:
    """One engine loads one checkpoint after another: of the last one nothing may be left."""
    engine = _engine(row, root, seed=99)
    num_continued = 0
    for name in names:
        run(engine, first=50, steps=1)
        engine.module.note = "gone"
        expected = torch.load(root / name / "expected", weights_only=True)
        path, client_state = engine.load_checkpoint(root / name)
        assert path == str(root / name / f"global_step{BEFORE}")
        assert (client_state["epoch"], client_state["seen"].tolist()) == (3, [0, 1])
        assert engine.module.note == "kept"
        counters = (engine.global_steps, engine.global_samples, engine.skipped_steps, engine.micro_steps)
        assert counters == (BEFORE, BEFORE * 12, 0, BEFORE)
        assert engine.get_lr() == expected["lr"]
        assert_same_bits(whole_state(engine), expected["saved"])
        if expected["world_size"] == engine.world_size:  # another one adds gradients in another order
            run(engine, first=BEFORE, steps=AFTER)
            assert_same_bits(whole_state(engine), expected["later"])
            num_continued += 1
    engine.destroy()
    return num_continued


@pytest.fixture(scope="module")
def root(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of each writer."""
    folder = tmp_path_factory.mktemp("matrix")
    for world_size, rows in WRITERS.items():
        ranks(_save, rows, folder, world_size=world_size)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "world_size"),
    few(
        [
            *((Row(0), 4), (Row(1), 3), (Row(2), 1), (Row(3), 2), (Row(3, bf16=False), 2)),
            *((Row(0), 2), (Row(1), 1), (Row(2), 4), (Row(3), 3), (Row(0, bf16=False), 3)),
        ],
        lambda row, world_size: (row.stage, world_size) in ((0, 4), (1, 3), (2, 1), (3, 2)),
    ),
    ids=str,
)
def test_any_stage_and_world_reads_what_any_other_wrote(
    ranks: Ranks, root: Path, row: Row, world_size: int
) -> None:
    written = [(one, world) for world, rows in WRITERS.items() for one in rows if one.bf16 == row.bf16]
    names = [f"{one.name}-{world}" for one, world in written]
    continued = ranks(_load, row, root, names, world_size=world_size)
    assert set(continued) == {sum(world == world_size for _, world in written)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "world_size"),
    few(
        [(HOST_STATES, 2), (NVME, 2), (HOST, 3), (Row(1, "nvme"), 3)], lambda row, world_size: world_size == 2
    ),
    ids=str,
)
def test_so_does_an_engine_whose_values_are_elsewhere(
    ranks: Ranks, root: Path, row: Row, world_size: int
) -> None:
    names = [f"{one.name}-{world}" for world, rows in WRITERS.items() for one in rows if one.bf16]
    ranks(_load, row, root, names, world_size=world_size)
