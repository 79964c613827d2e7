"""One run of bench_recovery.py: a tool trains on all hosts, a fault happens, and a step follows."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import IO, Any

from benchmarks.launch_peers import DSLAUNCH
from benchmarks.recovery_peers import EVENTS, OURS, PEERS_FOLDER, Tool, job_options
from benchmarks.recovery_worker import SAVE_EVERY
from dslaunch.launcher.run_state.event_reader import EventReader
from dslaunch.launcher.run_state.run_state import RunState
from tests.lab import Host, Lab

FAULT_AT = SAVE_EVERY + 7  # steps
START_S = 60.0  # until that step
WAIT_S = 60.0  # from the fault to the next step
MORE_STEPS = 2  # that are waited for after it
POLL_S = 0.02


class NotMeasured(Exception):
    """A tool did not do what is measured; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Something that a process did. `of` names the process."""

    of: str
    what: str
    at: float
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A recovery. Units: seconds, of the slowest of the new workers; None without new ones."""

    total_s: float
    to_workers_s: float | None = None
    import_s: float | None = None
    groups_s: float | None = None
    load_s: float | None = None
    step_s: float | None = None
    steps_again: int
    stages_s: Mapping[str, float] = field(default_factory=dict)

    def cells(self) -> list[str]:
        parts = (self.to_workers_s, self.import_s, self.groups_s, self.load_s, self.step_s)
        times = ["" if one is None else f"{one:.2f}" for one in (self.total_s, *parts)]
        return [*times, str(self.steps_again)]


class Run:
    """The folder of a run, in which the ranks note what they do."""

    def __init__(self, lab: Lab) -> None:
        self.folder = lab.shared / "recovery"
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        self._log = (self.folder / "log").open("wb")

    def start(
        self,
        host: Host,
        words: list[str],
        *,
        env: Mapping[str, str] | None = None,
        stdout: IO[bytes] | None = None,
    ) -> subprocess.Popen[Any]:
        return host.popen(
            words,
            cwd=self.folder,
            env={"PYTHONPATH": str(PEERS_FOLDER), **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=stdout or self._log,
            stderr=self._log,
            start_new_session=True,
        )

    def notes(self) -> list[Note]:
        """All notes in the order of time."""
        return sorted(self._notes(), key=lambda one: one.at)

    def _notes(self) -> Iterator[Note]:
        for path in self.folder.glob("notes-*"):
            *whole, _ = path.read_text().split("\n")  # the last line may be half written
            for line in whole:
                yield Note(of=path.name, **json.loads(line))

    def last_words(self) -> str:
        lines = (self.folder / "log").read_text(errors="replace").strip().splitlines()
        return lines[-1][:200] if lines else "it printed nothing"


def _raise(run: Run, host: Host) -> None:
    (run.folder / f"raise-{host.name}").touch()


def _hang(run: Run, host: Host) -> None:
    (run.folder / f"hang-{host.name}").touch()


def _kill(run: Run, host: Host) -> None:
    pids = [path.name.rpartition("-")[2] for path in run.folder.glob(f"notes-{host.name}-*")]
    host.run(["kill", "-9", *pids])


# The faults, each of the last host.
FAULTS: dict[str, Callable[[Run, Host], None]] = {
    "rank raises": _raise,
    "rank killed": _kill,
    "host killed": lambda _, host: host.die(),
    "cable cut": lambda _, host: host.unplug(),
    "rank hangs": _hang,
    "host frozen": lambda _, host: host.freeze(),
}


def measure(lab: Lab, tool: Tool, fault: str) -> Measured:
    """Run the tool, with this fault. Errors: NotMeasured"""
    run, host = Run(lab), lab.nodes[-1]
    processes = tool.start(lab, run.folder, run.start)
    try:
        trained = partial(_has_trained, run, len(lab.nodes), tool.settle_s)
        _wait(run, trained, START_S + tool.settle_s, f"step {FAULT_AT} was not reached")
        fault_at = time.time()
        FAULTS[fault](run, host)
        if fault in ("rank raises", "rank hangs"):
            _wait(run, lambda: bool(_faults(run)), START_S, "no rank took the fault")
            fault_at = _faults(run)[0]
        _wait(run, lambda: _num_after(run, fault_at) > MORE_STEPS, WAIT_S, "no step")
        time.sleep(2.0)  # until the others have noted theirs, and numbers are told
        return _read(run, fault_at)
    finally:
        for process in processes:
            process.kill()


def _faults(run: Run) -> list[float]:
    return [one.at for one in run.notes() if one.what == "fault"]


def many(lab: Lab, num: int) -> list[float]:
    """Kill a rank so many times in one job, by `dslaunch drill`; return the seconds of each way back.

    Errors: NotMeasured
    """
    run = Run(lab)
    faults = ",".join(["rank-killed"] * num)
    words = ["drill", "--json", f"--fault={faults}", f"--steps={SAVE_EVERY + 2}", f"--limit={WAIT_S:g}"]
    hosts = (*job_options(lab, run.folder), "--no_local_rank", OURS)
    with (run.folder / "drill.json").open("wb") as out:
        process = run.start(lab.head, [DSLAUNCH, *words, *hosts], stdout=out)
        try:
            process.wait(num * WAIT_S + START_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise NotMeasured("the drill did not end in time") from None
    text = (run.folder / "drill.json").read_text()
    if not text:
        raise NotMeasured(f"the drill ended with code {process.returncode}: {run.last_words()}")
    ways: list[dict[str, Any]] = json.loads(text)["faults"]
    return [one["total_s"] for one in ways if one["why_not"] is None]


def _wait(run: Run, is_so: Callable[[], bool], limit_s: float, what: str) -> None:
    until = time.monotonic() + limit_s
    while not is_so():
        if time.monotonic() > until:
            raise NotMeasured(f"{what} within {limit_s:g} s; the last words: {run.last_words()}")
        time.sleep(POLL_S)


def _has_trained(run: Run, num_ranks: int, settle_s: float) -> bool:
    """Tell whether all ranks have trained for so long, and the last checkpoint is some steps behind."""
    steps = [one for one in run.notes() if one.what == "step"]
    last = {one.of: one.step for one in steps}
    if len(last) < num_ranks or time.time() - steps[0].at < settle_s:
        return False
    return min(last.values()) >= FAULT_AT and min(last.values()) % SAVE_EVERY >= FAULT_AT % SAVE_EVERY


def _steps_after(notes: list[Note], fault_at: float) -> list[Note]:
    """Return the ends of steps that began after the fault."""
    began: dict[str, float] = {}
    found = []
    for one in notes:
        if one.what == "step begins":
            began[one.of] = one.at
        elif one.what == "step" and began.get(one.of, 0.0) > fault_at:
            found.append(one)
    return found


def _num_after(run: Run, fault_at: float) -> int:
    return len({one.step for one in _steps_after(run.notes(), fault_at)})


def _read(run: Run, fault_at: float) -> Measured:
    notes = run.notes()
    first = _steps_after(notes, fault_at)[0]
    done = max(one.step for one in notes if one.what == "step" and one.at <= fault_at)
    told = _told(run)
    again = max(0, done - (first.step - 1))
    new = {one.of for one in notes if one.what == "begun" and fault_at < one.at < first.at}
    if first.of not in new:  # a survivor
        return Measured(total_s=first.at - fault_at, steps_again=again, stages_s=told)

    def last(what: str) -> float:
        return max((one.at for one in notes if one.of in new and one.what == what), default=first.at)

    begun, imported, groups, loaded = (last(what) for what in ("begun", "imported", "groups", "loaded"))
    return Measured(
        total_s=first.at - fault_at,
        to_workers_s=begun - fault_at,
        import_s=imported - begun,
        groups_s=groups - imported,
        load_s=loaded - groups,
        step_s=max(0.0, first.at - loaded),
        steps_again=again,
        stages_s=told,
    )


def _told(run: Run) -> Mapping[str, float]:
    """Return the stages of the recovery as dslaunch tells them; empty of another tool."""
    path = run.folder / EVENTS
    if not path.exists():
        return {}
    state, reader = RunState(), EventReader(path)
    for event in reader.events():
        state.take(event)
    return state.recoveries[0].stages_s if state.recoveries else {}
