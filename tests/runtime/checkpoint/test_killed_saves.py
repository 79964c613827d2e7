"""kill -9 at 20 points of a save: whatever it leaves can be loaded, is right to the bit,
and does not stay for ever.
"""

from __future__ import annotations

import multiprocessing
import signal
import tempfile
from collections.abc import Iterator
from multiprocessing.pool import Pool
from pathlib import Path

import pytest

from tests.runtime.checkpoint.killed_saves import ALL, BEFORE, KEPT, NEVER, POINTS, run_all


@pytest.fixture(scope="module")
def warm() -> Iterator[Pool]:
    """One process, which imports torch once."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        yield pool


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """In memory where that can be: what a process wrote outlives it,
    and thousands of fsyncs would prove nothing.
    """
    if not Path("/dev/shm").is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(("is_async", "tag"), [(False, None), (True, "last")])
def test_a_save_that_is_killed_at_any_point_leaves_a_good_checkpoint(
    warm: Pool, folder: Path, is_async: bool, tag: str | None
) -> None:
    outcomes, left = warm.apply(run_all, (folder,), {"is_async": is_async, "tag": tag})
    assert len(outcomes) == POINTS + BEFORE + 1
    for one in outcomes:
        before, after = one.steps
        assert after in (before, before + 1), one
        assert one.differences == [], one
        if one.plan.event == NEVER:
            assert one.statuses == [0, 0], one
            assert after == before + 1, one
        else:
            survivor = {ALL: None, 0: 1, 1: 0}[one.plan.victim]
            for rank, (status, said) in enumerate(zip(one.statuses, one.said, strict=True)):
                if rank == survivor and (one.plan.is_alone or status == 0):
                    assert status == 0, one
                    assert "cannot be written" in said or said.startswith("events"), one
                else:
                    assert status == -signal.SIGKILL, one
    kinds = {after - before for before, after in (one.steps for one in outcomes[BEFORE:-1])}
    assert kinds == {0, 1}  # the last one came too late to hinder it
    tags = ["last"] if tag else sorted(f"global_step{outcomes[-1].steps[1] - back}" for back in range(KEPT))
    assert left == sorted([*tags, "latest", "zero_to_fp32.py", "zero_to_torch.py"])
