"""What is shown of a job's servers, by its events."""

from __future__ import annotations

import math
from typing import Any

from dslaunch.launcher.page.curves import Curves
from dslaunch.launcher.page.run import Run
from dslaunch.launcher.page.tell_run import facts, servers
from dslaunch.launcher.run_state.run_state import RunState
from dslaunch.launcher.top.bars import ASCII
from dslaunch.launcher.top.frame import make_frame
from dslaunch.launcher.top.rows import host_rows, rank_rows
from dslaunch.launcher.top.spans import plain
from dslaunch.launcher.top.view import JobFacts, View

WORKERS = [["node1", 0, 0, 0], ["node1", 0, 1, 1], ["node5", 1, 2, 0, "rollout"]]


def state_of(*events: dict[str, Any]) -> RunState:
    state = RunState()
    first: dict[str, Any] = {"event": "attempt", "attempt": 0, "workers": WORKERS, "log_folder": ""}
    for place, event in enumerate((first, *events)):
        state.take({"at": 100.0 + place, **event})
    return state


def of_server(event: str, **more: Any) -> dict[str, Any]:
    return {"event": event, "attempt": 0, "rank": 2, "role": "rollout", "host": "node5", **more}


UP = (of_server("started", pid=7), of_server("healthy", restarts=0))
AGAIN = (*UP, of_server("exited", code=1, signal=0), of_server("server_restart", restarts=1))


def word(*events: dict[str, Any]) -> str:
    return rank_rows(state_of(*events), None, 200.0)[-1].state


def test_a_server_is_no_rank_and_has_a_row_of_its_own() -> None:
    state = state_of(*UP, {"event": "metrics", "attempt": 0, "ranks": {"2": {"loss": 1.0}}, "hosts": {}})
    assert (list(state.ranks), list(state.servers)) == ([0, 1], [2])
    assert state.attempt is not None
    assert (state.attempt.num_ranks, state.attempt.hosts) == (2, ("node1", "node5"))
    assert not state.has_numbers, "numbers under a server's number are those of no rank"
    assert [one.name for one in rank_rows(state, None, 200.0)] == ["0", "1", "rollout"]
    assert [(one.host, one.name) for one in host_rows(state, None, 200.0)] == [
        ("node1", "2"),
        ("node5", "rollout"),
    ]
    facts_of_job = JobFacts(name="train", state="running", is_live=True)
    frame = make_frame(state, facts_of_job, View(), width=80, height=20, now=200.0, glyphs=ASCII)
    lines = [plain(one) for one in frame.lines]
    assert "2 hosts, 2 ranks, 1 server" in lines[0]
    assert any(line.startswith("rollout node5 serving") for line in lines), lines


def test_the_state_of_a_server_follows_its_events() -> None:
    assert word() == "starting"
    assert word(*UP) == "serving"
    assert word(*UP, of_server("exited", code=1, signal=0)) == "exit 1"
    assert word(*AGAIN) == "again"
    assert word(*AGAIN, *UP) == "serving"
    assert rank_rows(state_of(*UP), None, math.inf)[-1].state == "ended"


def test_the_page_has_a_table_of_servers() -> None:
    state = state_of(*AGAIN, *UP, of_server("exited", code=143, signal=0))
    run = Run(label="train", state=state, curves=Curves(state))
    assert "<td>rollout</td><td>node5</td><td>1</td><td>143</td>" in servers(run)
    assert "servers" in facts(run)
    alone = state_of()
    alone.servers = {}
    assert servers(Run(label="train", state=alone, curves=Curves(alone))) == ""
