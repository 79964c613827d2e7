"""Tools that train by turns: one that fails is named with its cause, and the others go on."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks.training_turns import median_turns, take_turns

LIMIT_S = 20.0  # far more than a process needs to start
HANGS_S = 0.5
WORKER = """
import json, os, sys
shape, tool = sys.argv[1:]
for turn, _ in enumerate(sys.stdin):
    if tool == "dies" and turn == 1 and os.environ["RANK"] == "1":
        sys.exit("it has no memory left")
    if tool == "hangs" and os.environ["RANK"] == "1":
        continue
    print(json.dumps({"s": turn, "loss": 2.0 if tool == "other" else 1.0}), flush=True)
"""


class Turn(NamedTuple):
    s: float
    loss: float


@pytest.fixture
def worker(tmp_path: Path) -> list[str]:
    path = tmp_path / "worker.py"
    path.write_text(WORKER)
    return [str(path), "shape"]


def test_each_tool_that_fails_has_a_cause_and_the_others_a_median(worker: list[str]) -> None:
    tools = ["one", "two", "dies", "other"]
    found, causes = take_turns(worker, Turn, 2, tools, rounds=3, limit_s=LIMIT_S)
    assert found == {"one": Turn(2, 1.0), "two": Turn(2, 1.0)}  # turn 0 warms up
    assert causes.keys() == {"dies", "other"}
    assert causes["dies"] == "dies: rank 1 ended with 1: it has no memory left"
    assert causes["other"].startswith("other: did not train as the others")


def test_a_tool_that_takes_too_long_is_ended(worker: list[str]) -> None:
    found, causes = take_turns(worker, Turn, 2, ["hangs"], rounds=1, limit_s=HANGS_S)
    assert not found
    assert causes["hangs"].startswith("hangs: no answer from rank 1 in its 0.5 s")


def test_where_all_tools_must_train_one_that_fails_is_an_error(worker: list[str]) -> None:
    with pytest.raises(RuntimeError, match="it has no memory left"):
        median_turns(worker, Turn, 2, ["one", "dies"], rounds=1)
