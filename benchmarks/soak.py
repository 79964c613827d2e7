"""Random faults in a row in one job, on hosts of this machine: what is lost, left, and told of them.

Run: python benchmarks/soak.py --faults 20 --seed 1          (as root: it makes the hosts on this machine)

Each fault is of a random kind, on a random host, at a random occasion: in a step, a save, a snapshot, the way
back from another fault, a change of hosts, or together with one on another host. Then the job's report and
events are compared with what this program did, and what the ranks noted. Exits with 1 if they disagree.

Files, each importing only those before it: soak_worker -> soak_judge -> this one.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.guide_section import arguments, conditions, publish
from benchmarks.launch_peers import DSLAUNCH
from benchmarks.soak_judge import SNAPSHOT_EVERY, Made, NoteReader, Sample, judge, sampled
from dslaunch.launcher.run.drill_job import FAULTS
from dslaunch.launcher.run_state.event_reader import EventReader
from dslaunch.launcher.run_state.run_state import RunState
from tests.lab import Host, Lab

NUM_HOSTS = 4
SILENCE_S, HANG_S = 6.0, 5.0
MOST_STEPS = 60  # before a fault
PATIENCE_S = 15.0  # until hosts are back
WAIT_S = 150.0  # from a fault to training again
WORKER = str(Path(__file__).with_name("soak_worker.py"))
KINDS = ("rank-raises", "rank-killed", "rank-hangs", "host-killed", "host-frozen", "host-dies", "cable-cut")
OF_RANK = KINDS[:3]
OCCASIONS = ("step", "save", "snapshot", "restart", "resize", "two")
DELAYS_S = {"step": 2.0, "save": 0.06, "snapshot": 0.15, "restart": 2.5, "resize": 3.0, "two": 2.0}
MORE = ("--max_restarts=9999", "--min_uptime=0", "--kill_grace=5", "--no_local_rank")
LIMITS = f"--hang_limit=start=40,load=20,step={HANG_S:g},save=20"


class Stuck(Exception):
    """The job did not come back, or has ended; the message says after what."""


class Soak:
    """One job on all nodes of a lab, and what is done to it."""

    def __init__(self, lab: Lab, seed: int) -> None:
        self.lab, self.random = lab, random.Random(seed)
        self.folder = lab.shared / "soak"
        self.folder.mkdir()
        self.state, self.made, self.samples = RunState(), list[Made](), list[Sample]()
        self.reader, self.notes = EventReader(self.folder / "events"), NoteReader(self.folder)
        self._num_steps = SNAPSHOT_EVERY + 2  # to train before the next fault
        self.rebooted: list[Made] = []
        self._num_hosts, self._patient_until = NUM_HOSTS, 0.0  # that are waited for, and how long
        self._due: list[tuple[float, Callable[[], object]]] = []
        self._absent_since: dict[str, float] = {}
        (self.folder / "hosts").write_text("".join(f"{node.name} slots=1\n" for node in lab.nodes))
        hosts = ("-H", "hosts", f"--num_nodes=1:{len(lab.nodes)}", "--notice_file=/root/notice")
        told = ("--events=events", "--report=report.json", f"--heartbeat={SILENCE_S:g}", LIMITS)
        words = [DSLAUNCH, *hosts, *told, *MORE, f"--snapshot_every={SNAPSHOT_EVERY}", WORKER]
        with (self.folder / "log").open("wb") as log:
            self.job = lab.head.popen(
                words, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def run(self, num_faults: int) -> None:
        """Make so many faults, then let the job end. Errors: Stuck"""
        began = time.monotonic()
        while len(self.made) < num_faults:
            self.wait(self._trains_on, "training before a fault")
            if not self._due:
                self.samples.append(sampled(self.lab))
            occasion = self.random.choice(OCCASIONS)
            self._num_steps = self.random.randint(SNAPSHOT_EVERY, MOST_STEPS)
            self._num_hosts = self.random.randint(1, NUM_HOSTS)
            self._patient_until = time.monotonic() + PATIENCE_S
            before = len(self.made)
            self._make(occasion)
            words = ", ".join(f"{one.kind} on {one.host}" for one in self.made[before:])
            print(f"{time.monotonic() - began:5.0f} s  {len(self.made)}: {occasion}: {words}", flush=True)
        self.wait(lambda: not self._due and self._trains_on(), "training at the end")
        self.samples.append(sampled(self.lab))
        (self.folder / "end").touch()
        try:
            self.job.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            raise Stuck("the job does not end") from None
        self.read()

    def read(self) -> None:
        """Read what ranks and launcher have written, and do what is due."""
        self.notes.read()
        for event in self.reader.events():
            self.state.take(event)
        now = time.monotonic()
        due, self._due = self._due, [one for one in self._due if one[0] > now]
        for at, act in due:
            if at <= now:
                act()

    def wait(self, is_so: Callable[[], bool], what: str, limit_s: float = WAIT_S) -> None:
        until = time.monotonic() + limit_s
        while True:
            self.read()
            if is_so():
                return
            if self.job.poll() is not None or time.monotonic() > until:
                last = (self.folder / "log").read_text(errors="replace").strip().splitlines()[-15:]
                raise Stuck(f"{what}: exit code {self.job.returncode}; the last lines:\n" + "\n".join(last))
            time.sleep(0.003)

    def _trains_on(self) -> bool:
        """Tell whether an attempt has trained for some steps; boot hosts that the job does not take back."""
        attempt = self.state.attempt
        if attempt is None or not attempt.running_at or attempt.verdict is not None:
            return False
        for node in self.lab.nodes:
            since = self._absent_since.setdefault(node.name, time.monotonic())
            if node.name in attempt.hosts or not node.is_running:
                self._absent_since[node.name] = time.monotonic()
            elif time.monotonic() - since > 15 and not self._due:
                self._absent_since[node.name] = time.monotonic()
                self.rebooted.append(Made("reboot", node.name, -1, "absence", time.time(), attempt.number))
                node.die()
                node.boot()
        if len(attempt.hosts) < self._num_hosts and time.monotonic() < self._patient_until:
            return False
        return self.notes.began_at > attempt.began_at and self.notes.steps_done > self._num_steps

    def _has_ended(self, number: int) -> bool:
        attempt = self.state.attempts[number]
        return attempt.verdict is not None or attempt is not self.state.attempt

    def _make(self, occasion: str) -> None:
        """Make one fault at that occasion, or two."""
        delay_s = self.random.random() * DELAYS_S[occasion]
        if occasion == "save":
            self._await("save begins")
        elif occasion == "snapshot":
            self._await("step", lambda step: step % SNAPSHOT_EVERY == 0)
        elif occasion == "resize":
            node = self.random.choice(self.lab.nodes)
            (node.home / "notice").touch()
            self._later(self.random.random() * 8, lambda: (node.home / "notice").unlink(missing_ok=True))
        elif occasion in ("restart", "two"):
            first = self._fault("step")
            if first is None:
                return
            if occasion == "two":
                delay_s = 0.0
            else:
                with suppress(Stuck):
                    self.wait(partial(self._has_ended, first.attempt), "the end of the attempt", 20.0)
        self._sleep(delay_s)
        for _ in range(20):
            if self._fault(occasion) is not None:
                return
            self._sleep(0.2)

    def _await(self, what: str, is_it: Callable[[int], bool] = lambda step: True) -> None:
        """Wait for the next note of that kind. One that does not come, as in a change of hosts, is let be."""
        seen = self.notes.counts[what]
        with suppress(Stuck):
            self.wait(lambda: self.notes.counts[what] > seen and is_it(self.notes.last[what]), what, 10.0)

    def _sleep(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.read()
            time.sleep(0.003)

    def _later(self, seconds: float, act: Callable[[], object]) -> None:
        self._due.append((time.monotonic() + seconds, act))

    def _fault(self, occasion: str) -> Made | None:
        """Make a fault of a random kind on a random host of the attempt; None if there is no such process.

        Two hosts at least are left, so that the job is never lost as a whole.
        """
        self.read()
        ranks = [one for one in self.state.ranks.values() if self.lab.host(one.host).condition() == "up"]
        kinds: Sequence[str] = KINDS if len(ranks) > 2 else OF_RANK
        if not any(one.pid for one in ranks):  # the way back is at a point before the workers
            kinds = [one for one in kinds if one not in FAULTS or FAULTS[one].why_not]
        else:
            ranks = [one for one in ranks if one.pid]
        if not ranks or not kinds:
            return None
        kind, rank = self.random.choice(kinds), self.random.choice(sorted(ranks, key=lambda one: one.rank))
        node = self.lab.host(rank.host)
        made = Made(kind, rank.host, rank.rank, occasion, time.time(), self.state.num_attempts - 1)
        if kind in FAULTS and not FAULTS[kind].why_not:
            done = node.run(["sh", "-c", FAULTS[kind].shell, "sh", str(rank.pid)])
            if done.returncode:
                return None
            if FAULTS[kind].undo:
                undo = ["sh", "-c", FAULTS[kind].undo.replace("$1", done.stdout.strip())]
                self._undo_later(node, lambda: node.run(undo))
        else:
            self._take_down(node, kind)
        self.made.append(made)
        return made

    def _undo_later(self, node: Host, undo: Callable[[], object]) -> None:
        """Undo a fault when the job has noticed it, unless the host is down from another one by then."""
        self._later(SILENCE_S + 3 + self.random.random() * 4, lambda: node.is_running and undo())

    def _take_down(self, node: Host, kind: str) -> None:
        if kind == "cable-cut":
            node.unplug()
            self._undo_later(node, node.plug)
        else:
            node.die()
            self._later(self.random.random() * 6, node.boot)


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--faults", type=int, default=200, help="how many (200)")
    parser.add_argument("--seed", type=int, default=1, help="of what is random (1)")
    parser.add_argument("--keep", type=Path, help="copy the run's folder to this place")
    args = parser.parse_args()
    reason = Lab.can_be_made()
    if reason is not None:
        print(f"no hosts can be made here: {reason}")
        return 0
    with Lab.up(NUM_HOSTS, name="soak") as lab:
        soak, stuck = Soak(lab, args.seed), ""
        try:
            soak.run(args.faults)
        except Stuck as error:
            stuck = str(error)
        left: list[Any] = lab.wait_until_clean() if not stuck else []
        lines, wrong = judge(
            soak.made, soak.rebooted, soak.state, soak.notes, soak.samples, soak.folder, left
        )
        if args.keep:
            shutil.copytree(soak.folder, args.keep, dirs_exist_ok=True)
    publish("make soak", f"{conditions()}; seed {args.seed}.\n\n" + "\n".join(lines), is_wanted=args.publish)
    for line in (*([f"stuck: {stuck}"] if stuck else []), *wrong):
        print(f"WRONG: {line}")
    return 1 if stuck or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
