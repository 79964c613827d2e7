"""The comparison of what soak.py did, what ranks noted, and what the job told."""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.launch_peers import DSLAUNCH
from dslaunch.launcher.run_state.run_state import RunState
from tests.lab import Lab

SNAPSHOT_EVERY = 5
SAME_LOSS = 1e-6  # a part of the loss: sums over other numbers of ranks round differently
SAME_GOODPUT = 0.02
MOST_LOST = 2 * SNAPSHOT_EVERY  # the last snapshot may be on its way
LATE_S = 30.0  # after which nothing that follows is blamed on a fault
WORKER = str(Path(__file__).with_name("soak_worker.py"))


class Made(NamedTuple):
    """A fault that was made. `at` is in seconds since the epoch; `attempt` was the last one then."""

    kind: str
    host: str
    rank: int
    occasion: str
    at: float
    attempt: int


class Sample(NamedTuple):
    """Things that launcher and agents hold, in a moment in which the job trains."""

    threads: int
    descriptors: int
    memfds: int
    launcher_mb: float
    agents_mb: float
    files: int


def sampled(lab: Lab) -> Sample:
    """Count what the launcher and the agents hold, and files in the hosts' temporary folders."""
    threads = descriptors = memfds = 0
    megabytes = {"launcher": 0.0, "agents": 0.0}
    for name, process in lab.processes():
        proc = Path(f"/proc/{process.pid}")
        if "soak_worker.py" in process.argv and name != lab.head.name:
            continue  # a rank, or the process from which they are forked
        try:
            links = [os.readlink(one) for one in (proc / "fd").iterdir()]
            status = dict(
                line.split(":", 1) for line in (proc / "status").read_text().splitlines() if ":" in line
            )
        except OSError:
            continue  # it has ended
        threads += int(status["Threads"])
        descriptors += len(links)
        memfds += sum("memfd:" in one for one in links)
        key = "launcher" if name == lab.head.name else "agents"
        megabytes[key] += int(status.get("RssAnon", "0 kB").split()[0]) / 1000
    folders = [host.home.with_name(part) for host in lab.hosts for part in ("tmp", "var_tmp", "home")]
    files = sum(len(list(folder.rglob("*"))) for folder in folders)
    return Sample(threads, descriptors, memfds, megabytes["launcher"], megabytes["agents"], files)


class NoteReader:
    """Reads what ranks note, as they go."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._places = folder, dict[Path, int]()
        self._attempts: dict[Path, int] = {}  # the number that a process has noted
        self._attempt = -1
        self.began_at, self.steps_done = 0.0, 0  # what the newest attempt has
        self.counts, self.last = Counter[str](), dict[str, int]()  # by kind of note, and its last step
        self.losses: dict[int, set[float]] = {}  # by step
        self._notes: dict[tuple[Path, int], list[dict[str, Any]]] = {}  # by process
        # how many processes there were so far: a host that has booted gives their ids again
        self._number: dict[Path, int] = {}

    def read(self) -> None:
        """Read what is new."""
        for entry in os.scandir(self._folder):
            path = Path(entry.path)
            place = self._places.get(path, 0)
            if not entry.name.startswith("notes-") or entry.stat().st_size == place:
                continue
            with path.open("rb") as file:
                file.seek(place)
                data = file.read()
            data = data[: data.rfind(b"\n") + 1]
            self._places[path] = place + len(data)
            for line in data.splitlines():
                self._take(path, json.loads(line))

    def _take(self, path: Path, note: dict[str, Any]) -> None:
        what, step = str(note["what"]), int(note["step"])
        if what == "begun":
            self._number[path] = self._number.get(path, 0) + 1
        if what == "attempt":
            number = self._attempts[path] = int(note["attempt"])
            if number != self._attempt and note["at"] > self.began_at:
                self._attempt, self.began_at, self.steps_done = number, note["at"], 0
        elif what == "step":
            self.losses.setdefault(step, set()).add(float(note["loss"]))
            self.steps_done += self._attempts[path] == self._attempt
        self.counts[what] += 1
        self.last[what] = step
        self._notes.setdefault((path, self._number[path]), []).append(note)

    def courses(self) -> list[list[dict[str, Any]]]:
        """Return the notes of rank 0 of each attempt that has loaded, in their order."""
        found = [
            notes
            for notes in self._notes.values()
            if any(one["what"] == "loaded" and one["rank"] == 0 for one in notes)
        ]
        return sorted(found, key=lambda notes: float(notes[0]["at"]))


def judge(
    made: Sequence[Made],
    rebooted: Sequence[Made],
    state: RunState,
    notes: NoteReader,
    samples: Sequence[Sample],
    folder: Path,
    left: Sequence[object],
) -> tuple[list[str], list[str]]:
    """Return lines that describe the run, and what is wrong with it."""
    wrong = [f"{len(left)} processes are left: {left[:3]}"] if left else []
    lines = [
        f"{len(made)} faults in {state.num_attempts} starts: "
        + _counted(one.kind for one in made)
        + "; "
        + _counted(f"in {one.occasion}" for one in made)
    ]
    for part in (
        _causes(made, rebooted, state),
        _losses(notes, folder),
        _steps(notes, made),
        _time(notes, state, folder),
        _growth(samples),
    ):
        lines.append(part[0])
        wrong += part[1]
    return lines, wrong


def _counted(words: Iterable[str]) -> str:
    return ", ".join(f"{number} {word}" for word, number in sorted(Counter(words).items()))


def _causes(made: Sequence[Made], rebooted: Sequence[Made], state: RunState) -> tuple[str, list[str]]:
    """Each failed attempt must name a host on which there was a fault, and each fault of an attempt that had
    not failed must be named.
    """
    wrong, num_named, num_failed = [], 0, 0
    named: dict[int, set[str]] = {}
    ended: dict[int, float] = {}
    for attempt in state.attempts.values():
        verdict = attempt.verdict
        if verdict is None:
            continue
        failures = [verdict.culprit, *verdict.keys.get("others", ())] if verdict.culprit else []
        named[attempt.number] = {str(one.get("host")) for one in failures}
        ended[attempt.number] = attempt.fault_at or verdict.at
        if not verdict.culprit:
            continue
        num_failed += 1
        known = (*made, *rebooted)
        guilty = {one.host for one in known if attempt.began_at - LATE_S < one.at < verdict.at}
        are_all_lost = verdict.culprit.get("kind") == "launcher" and guilty >= set(attempt.hosts)
        if verdict.culprit.get("host") not in guilty and not are_all_lost:
            wrong.append(f"attempt {attempt.number} accuses: {verdict.text}; faults were on {sorted(guilty)}")
    for place, one in enumerate(made):
        near = [name for number, names in named.items() if number >= one.attempt for name in names][:8]
        notes = [note.text for note in state.notes if 0 < note.at - one.at < LATE_S]
        if one.host in near or any(one.host in text for text in notes):
            num_named += 1
        elif one.at < ended.get(one.attempt, 0.0):
            wrong.append(f"fault {place + 1} is named nowhere: {one}")
    return f"{num_failed} attempts failed; {num_named} faults are named", wrong


def _losses(notes: NoteReader, folder: Path) -> tuple[str, list[str]]:
    """Train as many steps undisturbed, and compare."""
    last = max(notes.losses, default=0)
    calm = folder / "calm"
    calm.mkdir()
    words = [DSLAUNCH, "-q", "--num_gpus=1", "--no_local_rank", WORKER, str(last)]
    subprocess.run(words, cwd=calm, check=True, timeout=600, stdin=subprocess.DEVNULL)
    reader = NoteReader(calm)
    reader.read()
    worst, at, wrong = 0.0, 0, []
    for step, losses in notes.losses.items():
        (true,) = reader.losses[step]
        off = max(abs(one - true) / true for one in losses)
        if off > worst:
            worst, at = off, step
    if worst > SAME_LOSS:
        wrong.append(f"the loss of step {at} is off by {worst:.2e}: {notes.losses[at]}, {reader.losses[at]}")
    # A step after which all ranks ended, for a change of hosts, was noted by none of them.
    loaded = {one["step"] for course in notes.courses() for one in course if one["what"] == "loaded"}
    missing = set(reader.losses) - set(notes.losses) - loaded
    if missing:
        wrong.append(f"steps were left out: {sorted(missing)[:10]}")
    return f"{last} steps; the loss of each is that of an undisturbed run up to {worst:.1e} of it", wrong


def _steps(notes: NoteReader, made: Sequence[Made]) -> tuple[str, list[str]]:
    """Count the steps that were done again after each start. Faults of one host must lose few."""
    again, wrong, done, done_at = [], [], 0, 0.0
    for course in notes.courses():
        loaded = next(one for one in course if one["what"] == "loaded")
        again.append(max(0, done - loaded["step"]))
        hosts = {one.host for one in made if done_at - LATE_S < one.at < loaded["at"]}
        if again[-1] > MOST_LOST and len(hosts) < 2:
            wrong.append(f"{again[-1]} steps were done again at {loaded['at']:.0f}, for a fault of {hosts}")
        steps = [one for one in course if one["what"] == "step"]
        if steps:
            done, done_at = steps[-1]["step"], steps[-1]["at"]
    late = sum(one > SNAPSHOT_EVERY for one in again)
    return (
        f"steps done again: {sorted(again)[len(again) // 2] if again else 0} in the median, "
        f"{max(again, default=0)} at most, {late} times more than {SNAPSHOT_EVERY}"
    ), wrong


def _time(notes: NoteReader, state: RunState, folder: Path) -> tuple[str, list[str]]:
    """Compare the steps that were kept, as rank 0 of each attempt noted them, with the report's goodput."""
    report = folder / "report.json"
    if not report.exists():
        return "no report", ["there is no report"]
    told = json.loads(report.read_text())
    useful, limit = 0.0, float("inf")
    for course in reversed(notes.courses()):
        began_at = 0.0
        for one in course:
            if one["what"] == "saved" or (one["what"] == "step begins" and not began_at):
                began_at = one["at"]
            elif one["what"] == "step":
                useful += one["at"] - began_at if one["step"] <= limit else 0.0
                began_at = one["at"]
        limit = min(limit, next(one["step"] for one in course if one["what"] == "loaded"))
    total, spent_s = state.at - state.began_at, told["spent_s"]
    true, said = useful / total, told["goodput"]
    # What a step waits for a snapshot is told as saving, and stands in the steps that the ranks noted.
    most = said + spent_s["save"] / total
    wrong = []
    if not said - SAME_GOODPUT <= true <= most + SAME_GOODPUT:
        wrong = [
            f"goodput {said:.4f} is told, {most:.4f} with saving; {true:.4f} is true, saves to disk apart"
        ]
    spent = ", ".join(f"{name} {seconds:.0f}" for name, seconds in spent_s.items())
    return f"goodput {said:.3f} as told, {true:.3f} as noted, of {total:.0f} s ({spent})", wrong


def _growth(samples: Sequence[Sample]) -> tuple[str, list[str]]:
    """Compare the first quarter of the run with the last."""
    quarter = max(1, len(samples) // 4)
    words, wrong = [], []
    for name in Sample._fields:
        first, last = (
            sorted(getattr(one, name) for one in part)[quarter // 2]
            for part in (samples[1 : quarter + 1] or samples[:1], samples[-quarter:])
        )
        words.append(f"{name} {first:.0f} -> {last:.0f}")
        if last > 1.2 * first + 10:
            wrong.append(f"{name} grow: {first:.0f} in the first quarter, {last:.0f} in the last")
    return "medians of the first and the last quarter: " + ", ".join(words), wrong
