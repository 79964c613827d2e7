"""`dslaunch drill`: one run of a job, in which faults are made, and the way back from each is measured.

The job runs in a process of its own and writes its events into a file, which the drill reads. For each fault
the drill waits until the job has trained for some steps, makes the fault on the host of the highest rank, and
waits for the next step.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import click

from ...shared.table import table
from ..backends.choose import direct_connect
from ..errors import EXIT_HOST, LaunchError
from ..fleet.each_host import EachHost, describe_failures
from ..fleet.host_output import HostOutput
from ..inputs.selection import Selected
from ..job.plan import NodePlan, Plan
from ..job.restart import Attempt
from ..options import Options
from ..options.mesh import MeshOptions
from ..options.option import refuse
from ..options.process import ProcessOptions
from ..options.restart import RestartOptions
from ..options.roles import RoleOptions
from ..options.snapshots import SnapshotOptions
from ..options.trace import TraceOptions
from ..output.console import Console
from ..run_state.event_reader import EventReader
from ..run_state.goodput import describe, share_of
from ..run_state.rank_state import RankState
from ..run_state.recovery import STAGES, Recovery
from ..run_state.run_state import RunState
from ..telemetry.summary import course_of
from ..wording import count
from .make_plan import choose_attempt, make_plan
from .run_job import run

POLL_S = 0.05
DEFAULT_STEPS, DEFAULT_LIMIT_S = 10, 300.0
END_MARGIN_S = 30.0  # for the job to end after the last fault, with the workers' grace
SHELL_S = 10.0  # for a fault of a rank here
_PR_SET_PDEATHSIG = 1


class Fault(NamedTuple):
    """`shell` makes it on a host, where $1 is the process id of a rank. `undo` takes it back once the attempt
    has ended, with the words that `shell` has printed as $1. `why_not` says why the fault cannot be made.
    """

    about: str
    shell: str = ""
    undo: str = ""
    is_of_host: bool = False
    why_not: str = ""


# The agent of rank $1, its keeper, which would let it run on, and all that the agent has started.
_AGENT = (
    'parent() { sed -n "s/^PPid:[[:space:]]*//p" /proc/$1/status; }; agent=$(parent $1) && '
    'keeper=$(parent $agent) && test "$keeper" -gt 1 && '
)
_ALL = '$keeper $agent $(grep -l "^PPid:[[:space:]]*$agent$" /proc/[0-9]*/status 2>/dev/null | cut -d/ -f3)'
FAULTS = {
    "rank-raises": Fault("a rank gets a KeyboardInterrupt", "kill -INT $1"),
    "rank-killed": Fault("a rank is killed", "kill -KILL $1"),
    "rank-hangs": Fault("a rank is stopped, so that the others wait for it", "kill -STOP $1"),
    "host-killed": Fault(
        "the agent of a host is killed, and its ranks with it", f"{_AGENT} kill -KILL {_ALL}", is_of_host=True
    ),
    "host-frozen": Fault(
        "the agent of a host and its ranks are stopped, and the host falls silent",
        f"{_AGENT} kill -STOP {_ALL}; echo $keeper $agent",
        undo="kill -CONT $1",
        is_of_host=True,
    ),
    "cable-cut": Fault(
        "nothing gets through to a host",
        is_of_host=True,
        why_not="it would cut the way by which it is taken back; host-frozen is the same silence",
    ),
}
USUAL = ("rank-raises", "rank-killed", "host-killed")  # without --fault; that of a host where there are some


class DrillEnded(LaunchError):
    """The job has ended by itself, or has not come back in time."""


@dataclass(slots=True)
class DrilledFault:
    """One fault, where it was made, and the way back; `why` says why there was none."""

    name: str
    rank: int
    host: str
    recovery: Recovery | None = None
    why: str = ""

    def as_data(self) -> dict[str, Any]:
        found = {} if self.recovery is None else self.recovery.as_data()
        return {
            "fault": self.name,
            "rank": self.rank,
            "host": self.host,
            "why_not": self.why or None,
            **found,
        }


@dataclass(slots=True)
class DrillResult:
    """All faults, and the state of the job after them."""

    faults: list[DrilledFault] = field(default_factory=list)
    state: RunState = field(default_factory=RunState)

    @property
    def is_well(self) -> bool:
        return all(one.recovery is not None for one in self.faults)

    def as_data(self) -> dict[str, Any]:
        course = course_of(self.state)
        del course["recoveries"]
        return {"faults": [one.as_data() for one in self.faults], **course}

    def lines(self, columns: int | None) -> list[str]:
        """Return the table, and what the time was spent on."""
        ways = [one.recovery for one in self.faults if one.recovery is not None]
        known = [one for one in STAGES if any(one.title in way.stages_s for way in ways)]
        rows = []
        for one in self.faults:
            way = one.recovery
            stages = {} if way is None else way.stages_s
            again = "" if way is None or way.steps_again is None else str(way.steps_again)
            rows.append(
                [
                    one.name,
                    f"rank {one.rank} on {one.host}",
                    *(_seconds(stages.get(stage.title)) for stage in known),
                    _seconds(None if way is None else way.total_s),
                    again,
                ]
            )
        head = ("fault", "of", *(one.title for one in known), "in all", "steps again")
        lines = table(rows, head=head, numbers=range(2, len(head)), columns=columns)
        lines += [f"{one.name}: {one.why}" for one in self.faults if one.why]
        if share_of(self.state.spent_s) is not None:
            lines += ["", f"{describe(self.state.spent_s)}; docs/launch/drill.md says what makes it less"]
        return lines


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillRequest:
    """`steps` are trained before each fault; `faults` is empty for the usual ones."""

    faults: tuple[str, ...] = ()
    steps: int = DEFAULT_STEPS
    limit_s: float = DEFAULT_LIMIT_S
    is_verbose: bool = False
    say: Callable[[str], object]


def drill(options: Options, request: DrillRequest) -> DrillResult:
    """Run the job and make the faults.

    Errors: LaunchError for a job that cannot be drilled, and for one that has ended before a fault
    """
    _check(options)
    console = Console(log_level="warning")
    attempt = choose_attempt(options, console)
    console.drain()
    nodes = {node.host.name: node for node in make_plan(options, attempt).nodes}
    faults = request.faults or USUAL[: 2 if _far(nodes.values()) is None else 3]
    _check_faults(faults, nodes.values())
    restart = options.restart._replace(
        max_restarts=max(options.restart.max_restarts, len(faults)), min_uptime_s=0.0
    )
    with tempfile.TemporaryDirectory(prefix="dslaunch-drill-") as name:
        folder = Path(name)
        events = options.metrics._replace(events=str(folder / "events"))
        job = options._replace(restart=restart, metrics=events)
        hosts = {one.host.name: one for one in (*attempt.hosts, *attempt.spares)}
        with _running(job, folder, is_verbose=request.is_verbose) as pid:
            made = _Drill(options, request, hosts, folder, pid)
            return made.run(faults, set(hosts) - {name for name, node in nodes.items() if node.is_local})


def _check(options: Options) -> None:
    """Errors: LaunchError for jobs in which no fault can be made"""
    launcher = options.backend.launcher
    if launcher.starts_itself:
        refuse(("dslaunch drill",), f"--launcher={launcher.name}, which starts no job again")
    for name, is_given in (
        ("--no_ssh", options.rendezvous.no_ssh),
        ("--events", options.metrics.events is not None),
        ("--metrics_interval=0", not options.metrics.interval_s),
        ("--exec_prefix", bool(options.exec_prefix)),
    ):
        if is_given:
            raise LaunchError(f"dslaunch drill and {name} exclude each other; leave it out")


def _far(nodes: Iterable[NodePlan]) -> NodePlan | None:
    """Return a host that is not this machine."""
    return next((one for one in nodes if not one.is_local), None)


def _check_faults(faults: Sequence[str], nodes: Collection[NodePlan]) -> None:
    """Errors: LaunchError, by name, for a fault that cannot be made here"""
    for name in faults:
        fault = FAULTS[name]
        if fault.why_not:
            raise LaunchError(f"--fault {name}: cannot be made: {fault.why_not}")
        if fault.is_of_host and _far(nodes) is None:
            raise LaunchError(
                f"--fault {name}: all ranks run on this machine, whose loss would be that of dslaunch, too; "
                "drill a job with another host, or leave it out"
            )


@contextmanager
def _running(options: Options, folder: Path, *, is_verbose: bool) -> Iterator[int]:
    """Run the job in a process of its own; end it, in order, after the work inside."""
    pid = os.fork()
    if pid == 0:
        _run_here(options, folder, is_verbose=is_verbose)
    try:
        yield pid
    finally:
        until = time.monotonic() + options.kill_grace_s + END_MARGIN_S
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        while _is_running(pid) and time.monotonic() < until:
            time.sleep(POLL_S)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _run_here(options: Options, folder: Path, *, is_verbose: bool) -> NoReturn:
    """Be the process of the job, which ends with the drill."""
    code = EXIT_HOST
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        with (folder / "output").open("wb", buffering=0) as output:
            try:
                code = run(options, output=None if is_verbose else output)
            except LaunchError as error:
                output.write(f"dslaunch: {error}\n".encode())
                code = error.exit_code
    except (KeyboardInterrupt, SystemExit, click.exceptions.Exit):
        code = 130
    finally:
        os._exit(code)


def _is_running(pid: int) -> bool:
    with suppress(ChildProcessError):
        return os.waitpid(pid, os.WNOHANG)[0] == 0
    return False


class _Drill:
    def __init__(
        self, options: Options, request: DrillRequest, hosts: dict[str, Selected], folder: Path, pid: int
    ) -> None:
        self._options, self._request, self._hosts = options, request, hosts
        self._folder, self._pid = folder, pid
        self._result = DrillResult()
        self._reader = EventReader(folder / "events")

    @property
    def _state(self) -> RunState:
        return self._result.state

    def run(self, faults: Sequence[str], far: set[str]) -> DrillResult:
        """Make one fault after the other."""
        for place, name in enumerate(faults):
            self._wait(self._has_trained, f"{count(self._request.steps, 'step')} after the start")
            number = self._state.num_attempts
            rank = self._victim(far if FAULTS[name].is_of_host else set(self._hosts))
            one = DrilledFault(name, rank.rank, rank.host)
            self._result.faults.append(one)
            self._request.say(f"drill: {name}, {place + 1} of {len(faults)}: rank {rank.rank} on {rank.host}")
            told = self._on_host(rank.host, FAULTS[name].shell, str(rank.pid))
            at = time.time()
            try:
                if FAULTS[name].undo:
                    self._wait(partial(self._has_ended, number), "the end of the attempt")
                    self._on_host(rank.host, FAULTS[name].undo, told)
                self._wait(partial(self._is_back, number), "a step after the fault")
            except DrillEnded as error:
                one.why = str(error)
                return self._result
            self._wait(self._has_told, "the numbers of a step")
            one.recovery = _since(at, self._state.recoveries[-1])
        return self._result

    def _victim(self, hosts: set[str]) -> RankState:
        running = [one for one in self._state.ranks.values() if one.pid and one.host in hosts]
        return max(running, key=lambda one: one.rank)

    def _has_trained(self) -> bool:
        attempt = self._state.attempt
        if attempt is None or attempt.verdict is not None or attempt.last_step is None:
            return False
        return attempt.last_step - (attempt.resumed_step or 0) >= self._request.steps

    def _has_ended(self, number: int) -> bool:
        return self._state.num_attempts > number or self._state.attempts[number - 1].verdict is not None

    def _is_back(self, number: int) -> bool:
        ways = self._state.recoveries
        return self._state.num_attempts > number and bool(ways) and ways[-1].total_s is not None

    def _has_told(self) -> bool:
        attempt = self._state.attempt
        return attempt is not None and attempt.last_step is not None

    def _wait(self, is_so: Callable[[], bool], what: str) -> None:
        """Wait until that is so. Errors: DrillEnded"""
        until = time.monotonic() + self._request.limit_s
        while time.monotonic() < until:
            is_running = _is_running(self._pid)
            for event in self._reader.events():
                self._state.take(event)
            if is_so():
                return
            if not is_running:
                raise DrillEnded(f"the job has ended before {what}: {self._last_words()}", exit_code=1)
            time.sleep(POLL_S)
        hint = "" if self._state.has_numbers else "; its program tells of no steps"
        raise DrillEnded(f"{what} did not come within {self._request.limit_s:g} s{hint}", exit_code=1)

    def _last_words(self) -> str:
        verdict = None if self._state.attempt is None else self._state.attempt.verdict
        if verdict is not None and verdict.exit_code:
            return "; ".join(filter(None, (verdict.text, verdict.decision)))
        lines = (self._folder / "output").read_text("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else "its last lines are above"

    def _on_host(self, name: str, shell: str, pid: str) -> str:
        """Run it on the host; return what it prints. Errors: LaunchError if it fails"""
        words = ("-c", shell, "sh", pid)
        job = self._options._replace(
            program="sh",
            arguments=words,
            is_module=False,
            no_python=True,
            no_local_rank=True,
            mesh=MeshOptions(),
            process=ProcessOptions(gives_stdin=False),
            restart=RestartOptions(),
            roles=RoleOptions(),
            snapshots=SnapshotOptions(),
            trace=TraceOptions(),
        )
        selected = self._hosts[name]._replace(devices=("0",))
        plan = make_plan(job, Attempt(hosts=(selected,), run_id=""))
        if plan.nodes[0].is_local:
            shell_words = ["/bin/sh", *words]
            done = subprocess.run(shell_words, capture_output=True, text=True, check=False, timeout=SHELL_S)
            told, code = done.stdout, done.returncode
        else:
            told, code = _by_agent(job, plan)
        if code:
            why = f": {told}" if told else ""
            raise LaunchError(f"the fault could not be made on {name}: `{shell}` ended with code {code}{why}")
        return told


def _by_agent(job: Options, plan: Plan) -> tuple[str, int]:
    heard: list[bytes] = []

    def put(stream: int, data: bytes, on_done: Callable[[], None] | None = None) -> None:
        heard.append(data)
        if on_done is not None:
            on_done()

    console = Console(log_level="warning")
    output = HostOutput(list(plan.host_names), put, is_folding=True)
    ended = EachHost(
        plan,
        connect=direct_connect(job, plan.nodes, say=console.say),
        console=console,
        output=output,
        fails_fast=False,
    ).run()
    output.finish()
    console.drain()
    told = b"".join(heard).decode("utf-8", "replace") or "; ".join(describe_failures(ended, plan))
    return told.removeprefix(f"{plan.host_names[0]}: ").strip(), ended.exit_code


def _since(at: float, way: Recovery) -> Recovery:
    """Return the same, from the moment at which the fault was made: a hang is known only at its end."""
    earlier = max(0.0, way.fault_at - at)
    moments = tuple((moment, seconds + earlier) for moment, seconds in way.moments)
    return way._replace(fault_at=way.fault_at - earlier, moments=moments)
