"""Real jobs in which a rank or a link is slow: it is named on the console and in the events.

tests/benchmarks/bench_stragglers.py has many of them, and says how often it is right.
"""

from __future__ import annotations

import pytest

from tests.benchmarks.bench_stragglers import run_job
from tests.lab import Lab

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]


@pytest.mark.parametrize(
    ("kind", "number", "words"),
    [
        ("compute", 1, "rank 1 on node2 holds up the others"),
        ("data", 2, "rank 2 on node3 holds up the others"),
        ("link", 0, "the outgoing link of node1 holds up the job"),
        ("link", 4, "the incoming link of node2 holds up the job"),
        ("none", 0, ""),
    ],
)
def test_what_the_others_wait_for_is_named(lab: Lab, kind: str, number: int, words: str) -> None:
    run = run_job(lab, kind, number)
    assert run.named == run.expected
    assert len(run.texts) == (1 if words else 0)
    assert all(text.startswith(words) and run.err.count(text) == 1 for text in run.texts)
    assert lab.wait_until_clean() == []
