"""Measures of the launch benchmark: the curve over the number of hosts,
and single measures that have a goal.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from benchmarks import launch_peers as peers
from benchmarks.launch_clock import Time, take_turns, time_of_command, time_of_workers
from benchmarks.launch_peers import Command, Job
from benchmarks.launch_results import Results, Target
from tests.lab import Lab

OURS = "dslaunch"
PHASES = ("connected", "agent", "prepared", "reached", "started")
TRIVIAL, TORCH = "./stamp.sh", "first.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Extent of the measurement."""

    counts: tuple[int, ...]  # numbers of hosts
    num_runs: int
    num_warm_ups: int
    num_local_workers: int  # workers on one host


Row = Mapping[str, Time]  # tool -> time


class Bench:
    """Measures everything once, on one lab; `report` gets a line for each measure.

    `without`: peers that are left out though they are there, by the name of their command.
    """

    def __init__(
        self, lab: Lab, size: Size, report: Callable[[str], None], *, without: frozenset[str] = frozenset()
    ) -> None:
        self._lab = lab
        self._size = size
        self._report = report
        self._began_at = time.monotonic()
        self._missing: list[str] = []
        self._without = without
        self._has_deepspeed = "deepspeed" not in without and not peers.why_no_deepspeed()

    def run(self) -> Results:
        tools = [tool for tool in peers.curve_tools() if self._is_there(tool)]
        targets = [self._help()]
        rows = {count: self._row(tools, count) for count in self._size.counts}
        targets += curve_targets(rows)
        targets += self._all_reduce_on_two_hosts()
        targets += self._all_reduce_on_one_host()
        return Results(
            counts=self._size.counts,
            curve={
                tool.name: tuple(_wall_s(rows[count], tool.name) for count in self._size.counts)
                for tool in tools
            },
            targets=tuple(targets),
            num_runs=self._size.num_runs,
            missing=tuple(dict.fromkeys(self._missing)),
            phases={count: self._phases(count) for count in self._size.counts},
        )

    def _is_there(self, tool: peers.Tool) -> bool:
        why = tool.why_missing or ("not asked for" if tool.name.split()[0] in self._without else "")
        if why:
            self._leave_out(f"{tool.name}: {why}")
        return not why

    def _leave_out(self, why: str) -> None:
        self._missing.append(why)
        self._say(f"left out: {why}")

    def _say(self, line: str) -> None:
        self._report(f"{time.monotonic() - self._began_at:5.0f} s  {line}")

    def _medians(self, what: str, tools: Mapping[str, Callable[[], Time]], *, is_warm: bool = False) -> Row:
        """Measure each tool in turns, and print the results."""
        times = take_turns(
            tools,
            num_runs=self._size.num_runs,
            num_warm_ups=0 if is_warm else self._size.num_warm_ups,
            leave_out=self._leave_out,
        )
        self._say(f"{what}: " + ", ".join(f"{name} {took.wall_s:.2f} s" for name, took in times.items()))
        return times

    def _job_times(self, what: str, job: Job, commands: Mapping[str, Callable[[Job], Command]]) -> Row:
        measures = {
            name: partial(time_of_workers, self._lab.head, command, job) for name, command in commands.items()
        }
        # Torch is in memory by then if DeepSpeed ran, and these jobs are the long ones.
        return self._medians(what, measures, is_warm=job.program == TORCH and self._has_deepspeed)

    # ---- the measures

    def _help(self) -> Target:
        commands = {OURS: Command([peers.DSLAUNCH, "--help"])}
        if self._has_deepspeed:
            commands["deepspeed"] = peers.deepspeed_command("--help")
        row = self._medians(
            "--help", {name: partial(time_of_command, command) for name, command in commands.items()}
        )
        theirs = _wall_s(row, "deepspeed")
        return Target(
            measure="`dslaunch --help`",
            ours=row[OURS].wall_s * 1e3,
            peer="deepspeed --help",
            theirs=theirs and theirs * 1e3,
            unit="ms",
            max_ratio=1 / 20,
            max_ours=100,
        )

    def _row(self, tools: list[peers.Tool], num_hosts: int) -> Row:
        job = self._job(num_hosts, TRIVIAL)
        commands = {tool.name: tool.command for tool in tools if num_hosts <= tool.max_hosts}
        return self._job_times(f"{num_hosts} hosts", job, commands)

    def _phases(self, num_hosts: int) -> dict[str, float]:
        """When each phase of a start had ended, of one more run."""
        job = self._job(num_hosts, TRIVIAL)
        time_of_workers(self._lab.head, peers.dslaunch_with_report, job)
        report = json.loads((job.folder / peers.REPORT).read_text())
        phases = {name: seconds for name, seconds in report["phases_s"].items() if name in PHASES}
        self._say(f"{num_hosts} hosts: " + ", ".join(f"{name} {at_s:.2f} s" for name, at_s in phases.items()))
        return phases

    def _all_reduce_on_two_hosts(self) -> list[Target]:
        commands = {OURS: peers.dslaunch}
        if "torchrun" not in self._without:
            commands["torchrun"] = peers.torchrun
        if self._has_deepspeed:
            commands["deepspeed + pdsh"] = peers.deepspeed
        row = self._job_times("first all_reduce on 2 hosts", self._job(2, TORCH), commands)
        measure = "2 hosts x 1 worker until the first all_reduce"
        peers_and_goals = (("deepspeed + pdsh", 1 / 2), ("torchrun", 1.0))
        return [_beside(row, measure, peer, max_ratio) for peer, max_ratio in peers_and_goals]

    def _all_reduce_on_one_host(self) -> list[Target]:
        num_workers = self._size.num_local_workers
        job = Job(
            hosts=(self._lab.head.name,),
            folder=self._lab.shared / "bench",
            program=TORCH,
            num_slots=num_workers,
        )
        preloaded = partial(peers.dslaunch_local, options=("--preload", "torch"))
        ours = {OURS: peers.dslaunch_local, f"{OURS} --preload torch": preloaded}
        theirs = {"deepspeed": peers.deepspeed_local} if self._has_deepspeed else {}
        row = self._job_times(f"first all_reduce of {num_workers} workers", job, {**ours, **theirs})
        measure = f"{num_workers} workers on one host until the first all_reduce"
        return [
            _beside(row, f"{measure}{name.removeprefix(OURS)}", "deepspeed", 1 / 3, ours=name)
            for name in ours
        ]

    def _job(self, num_hosts: int, program: str) -> Job:
        hosts = tuple(node.name for node in self._lab.nodes[:num_hosts])
        return Job(hosts=hosts, folder=self._lab.shared / "bench", program=program)


def curve_targets(rows: Mapping[int, Row]) -> list[Target]:
    """The goals that lie on the curve, of those numbers of hosts that were measured;
    the largest stands for CPU.
    """
    goals = (
        *((16, "deepspeed + pdsh", 0.1), (16, "pdsh", 0.6)),
        *((64, "pdsh", 0.4), (64, "paramiko: true", 1.25)),
    )
    targets = [
        _beside(rows[count], f"all workers started on {count} hosts", peer, max_ratio)
        for count, peer, max_ratio in goals
        if count in rows
    ]
    most = max(rows)
    theirs = rows[most].get("pdsh")
    targets.append(
        Target(
            measure=f"launcher CPU per host, {most} hosts",
            ours=rows[most][OURS].cpu_s / most * 1e3,
            peer="pdsh",
            theirs=theirs and theirs.cpu_s / most * 1e3,
            unit="ms",
            max_ours=15 if most == 64 else None,
        )
    )
    return targets


def _beside(row: Row, measure: str, peer: str, max_ratio: float, *, ours: str = OURS) -> Target:
    """Seconds of ours and of a peer."""
    of_ours, of_peer = _wall_s(row, ours), _wall_s(row, peer)
    return Target(measure=measure, ours=of_ours, peer=peer, theirs=of_peer, unit="s", max_ratio=max_ratio)


def _wall_s(row: Row, tool: str) -> float | None:
    return row[tool].wall_s if tool in row else None
