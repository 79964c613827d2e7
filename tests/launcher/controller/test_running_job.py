"""What is said of a job that runs: who the others wait for, by the numbers that its hosts send."""

from __future__ import annotations

import io
import time
from collections.abc import Mapping
from typing import Any

import pytest

from dslaunch.launcher.controller.running_job import RunningJob
from dslaunch.launcher.inputs.hostfile import Host
from dslaunch.launcher.inputs.selection import Selected
from dslaunch.launcher.job.plan import Endpoint, Plan, plan_nodes, plan_program
from dslaunch.launcher.output.console import Console
from dslaunch.launcher.wire.frames import Metrics

INTERVAL_S = 1.0


class FakeHost:
    """As the roster knows it; every host's clock is behind by another time."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock_offset_s = {"a": 0.0, "b": 10.0, "c": 300.0}[name]


class Kept:
    """A sink for events."""

    def __init__(self) -> None:
        self.events: list[Mapping[str, Any]] = []

    def take(self, event: Mapping[str, Any]) -> None:
        self.events.append(event)

    def close(self) -> None:
        pass

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [{**one, "at": 0} for one in self.events if one["event"] == kind]


def plan() -> Plan:
    program = plan_program("train.py", (), python="python3")
    selected = tuple(Selected(Host(name=name, slots=1), ("0",)) for name in ("a", "b", "c"))
    return Plan(
        nodes=plan_nodes(selected, program, local_names=frozenset()),
        master=Endpoint(address=None, port=29500, is_port_fixed=False),
        program=program,
        cwd="/work",
        venv_script=None,
        environment=(),
        kill_grace_s=1.0,
        heartbeat_s=30.0,
    )


def test_a_straggler_is_one_warning_and_one_event_and_its_end_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    err, kept = io.BytesIO(), Kept()
    console = Console(log_level="info", out=io.BytesIO(), err=err)
    console.telemetry.add(kept)
    job = RunningJob([], console, plan(), [])  # type: ignore[arg-type] # it has nothing to ask the hosts
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for second in range(80):
        for rank, name in enumerate("abc"):
            own_s = 0.9 if rank == 1 and second < 40 else 0.6
            row = {"steps": 10, "step_s": 1.0, "comm_s": 1 - own_s, "data_s": 0.0}
            host = FakeHost(name)
            frame = Metrics(now[0] - host.clock_offset_s, {str(rank): row}, {})
            job.record(host, frame, now[0] + 0.01)  # type: ignore[arg-type]
        job.look(started_at=None)
        now[0] += INTERVAL_S
    monkeypatch.undo()
    console.drain(5.0)
    text = (
        "rank 1 on b holds up the others by 30 ms in each step of 100 ms, 30 %: it computes for 90 ms a "
        "step, others 60 ms; look at the load, the clock and the temperature of its processors"
    )
    assert err.getvalue().decode() == f"dslaunch: warning: {text}\n"
    named = {"at": 0, "rank": 1, "host": "b", "cause": "compute"}
    assert kept.of("straggler") == [{"event": "straggler", **named, "share": 0.3, "text": text}]
    assert kept.of("straggler_over") == [{"event": "straggler_over", **named}]


def test_a_job_goes_on_where_its_numbers_make_no_sense() -> None:
    said = io.BytesIO()
    console = Console(log_level="info", out=io.BytesIO(), err=said)
    job = RunningJob([], console, plan(), [])  # type: ignore[arg-type] # as above
    for _ in range(2):
        job.record(FakeHost("a"), Metrics(0.0, {}, {"places": {"first": "stage 0"}}), 0.0)  # type: ignore[arg-type]
    job.look(started_at=None)
    assert console.drain(10)
    assert said.getvalue().count(b"stragglers are not looked for any more: ValueError: ") == 1
