"""A program with transformers' Trainer goes on from memory without a changed line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.drop_in.guide_jobs import HERE, LIMIT_S, requires_hugging_face
from tests.exhaustive import few

pytestmark = [requires_hugging_face, pytest.mark.slow, pytest.mark.timeout(LIMIT_S)]


@pytest.mark.parametrize("stage", few([2, 0, 1, 3], lambda stage: stage == 2))
def test_the_steps_after_a_snapshot_are_the_same_to_the_bit(tmp_path: Path, stage: int) -> None:
    """Epochs have four steps, so the data go on in the middle of one."""
    words = ["--num_gpus=2", "--no_local_rank", "--drop_in=always", "--max_restarts=1", "--min_uptime=0"]
    script = str(HERE / "trainer_snapshots.py")
    job = subprocess.run(
        [sys.executable, "-m", "dslaunch", *words, "--snapshot_every=5", script, str(stage)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert job.returncode == 0, job.stderr
    told = [line.partition(" | ")[2] for line in job.stdout.splitlines()]
    losses = [tuple(json.loads(line)) for line in told if line.startswith("[")]
    assert "dslaunch: training goes on after step 5, from the memory of the hosts" in told
    assert [step for step, _ in losses] == [1, 2, 3, 4, 5, 6, 6, 7, 8]
    assert losses[5] == losses[6]
    assert told[-1] == "8 losses"
    assert not [*tmp_path.glob("out/checkpoint-*")]
