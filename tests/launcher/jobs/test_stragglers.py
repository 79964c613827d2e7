"""Real jobs in which a rank or a link is slow: it is named on the console and in the events.

benchmarks/bench_stragglers.py has many of them, and says how often it is right.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.bench_stragglers import LIMIT_S, run_job
from tests.lab import Lab
from tests.launcher.local_job import Start

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]


@pytest.mark.parametrize(
    ("kind", "number", "words"),
    [
        ("compute", 1, "rank 1 on node2 holds up the others"),
        ("link", 0, "the outgoing link of node1 holds up the job"),
        ("none", 0, ""),
    ],
)
def test_what_the_others_wait_for_is_named(lab: Lab, kind: str, number: int, words: str) -> None:
    """Of each way one: benchmarks/bench_stragglers.py runs them all, many times."""
    run = run_job(lab, kind, number)
    assert run.named == run.expected
    assert len(run.texts) == (1 if words else 0)
    assert all(text.startswith(words) and run.err.count(text) == 1 for text in run.texts)
    assert lab.wait_until_clean() == []


TRAIN = """
import torch
import dslaunch

class Net(torch.nn.Linear):
    def forward(self, inputs):
        time.sleep(0.06 + 0.03 * (sys.argv[1] == 'compute' and rank == 1))
        return super().forward(inputs)

torch.set_num_threads(1)
engine, *_ = dslaunch.initialize(
    model=Net(64, 64),
    config={
        'train_micro_batch_size_per_gpu': 4,
        'optimizer': {'type': 'AdamW', 'params': {'lr': 0.01}},
        'zero_optimization': {'stage': 2},
    },
)
for step in range(400):
    time.sleep(0.005 + 0.03 * (sys.argv[1] == 'data' and rank == 1))
    engine.backward(engine(torch.randn(4, 64)).square().mean())
    engine.step()
    if step % 100 == 50:
        engine.save_checkpoint('saved')
"""


@pytest.mark.parametrize("kind", ["data"])
def test_what_engines_tell_is_enough(start: Start, tmp_path: Path, kind: str) -> None:
    job = start(TRAIN, "--num_gpus", "2", "--no_local_rank", "--events", "events", "--", kind)
    assert job.wait(LIMIT_S) == 0
    events = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    said = [(one["rank"], one["cause"]) for one in events if one["event"] == "straggler"]
    assert said == ([] if kind == "none" else [(1, kind)])
