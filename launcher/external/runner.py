"""Runs a job whose processes MPI or Slurm starts: one command on this machine, from start to exit code.

The command runs in a session of its own. The first INT, TERM or HUP is passed on to it; the second kills it
unless it ends within a moment, the third at once. When it has ended, none of its processes is left on this
machine. It gets TERM if this process is killed.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from ..controller.job_signals import ASKING, ENDING, PASSED_ON, received, unignored
from ..errors import EXIT_HOST, LaunchError
from ..job.master_address import LOOPBACK
from ..job.plan import Plan
from ..job.verdict import Failure, HostFailure, Verdict, signal_name, verdict_of
from ..node.system.process_tree import become_subreaper, die_with_parent, end_descendants, kill_descendants
from ..options import Options
from ..options.option import given_in
from ..output.console import Console
from . import mpirun, srun
from .external import HOSTFILE, External, TellsFailures
from .external_job import OwnedJob, payload, refuse_logins, start_command
from .lost_login import LostLogin
from .rank_start import RankStart

# Options that need processes started by dslaunch itself: records of them, and options for single ones.
_FOREIGN = (
    "ssh",
    "binding",
    "check",
    "elastic",
    "logs",
    "process",
    "rendezvous",
    "restart",
    "start",
    "trace",
)
_FOREIGN_NAMES = ("--force_multi", "--kill_grace", "--heartbeat")
# The launchers of options/backend.py that start the processes themselves.
EXTERNAL: Mapping[str, External] = {
    "openmpi": mpirun.OPENMPI,
    "mpich": mpirun.MPICH,
    "impi": mpirun.IMPI,
    "mvapich": mpirun.MVAPICH,
    "slurm": srun.SLURM,
}
DRAIN_S = 5.0
LOOK_EVERY_S = 1.0
MAX_UNWRITTEN = 256  # lines that wait to be written to the journal of a detached job
LAST_MOMENT_S = 2.0  # time from a second signal to the end by force


def plan_owned(options: Options, plan: Plan) -> tuple[Plan, OwnedJob]:
    """Return the plan with all decisions of this machine, and the command that carries it out.

    Errors: LaunchError for an option, host or plan that this back end cannot use.
    """
    launcher = options.backend.launcher
    _refuse_foreign_options(options)
    refuse_logins(plan, launcher.program)
    EXTERNAL[launcher.name].check(plan)
    name = plan.nodes[0].host.name
    address = plan.master.address or (LOOPBACK if len(plan.nodes) == 1 else name)
    plan = plan._replace(master=plan.master._replace(address=address, is_port_fixed=True))
    return plan, _command(options, plan)


def _command(options: Options, plan: Plan) -> OwnedJob:
    name = options.backend.launcher.name
    external = EXTERNAL[name]
    variables = payload(plan, name, external)
    start = RankStart(
        program=external.find_program(not options.dry_run),
        slots=tuple((node.host.name, len(node.ranks)) for node in plan.nodes),
        words=start_command(sys.executable),
        names=tuple(name for name, _ in variables),
        launcher_args=options.backend.launcher_args,
    )
    argv, hostfile = external.command(start)
    return OwnedJob(
        backend=name,
        argv=argv,
        hostfile=hostfile,
        payload=variables,
        external=external,
        num_hosts=len(plan.nodes),
    )


def _refuse_foreign_options(options: Options) -> None:
    """Refuse an option that has no effect here."""
    given = {subject: given_in(getattr(options, subject)) for subject in _FOREIGN}
    given[""] = tuple(name for name in given_in(options) if name in _FOREIGN_NAMES)
    for subject, names in given.items():  # name only the first such option
        if not names:
            continue
        launcher = options.backend.launcher.name
        instead = f", and let {EXTERNAL[launcher].how_to_restart}" if subject == "restart" else ""
        raise LaunchError(
            f"--launcher={launcher} starts and watches the processes itself, so what you gave of "
            f"{' and '.join(names)} has no effect; leave it out{instead}, or use --launcher=ssh"
        )


def run_owned(job: OwnedJob, console: Console) -> Verdict:
    """Run the command to its end.

    Errors: LaunchError if it cannot be started.
    """
    become_subreaper()  # processes that the command leaves behind become our children, and are found
    events: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    taken = (ASKING, *unignored((*ENDING, *PASSED_ON)))
    signals = received(taken, lambda number, _: events.put(number))
    with signals, tempfile.TemporaryDirectory(prefix="dslaunch-") as folder:
        path = str(Path(folder) / "hosts")
        if job.hostfile is not None:
            Path(path).write_text(job.hostfile)
        process = _start(job, path, console)
        words = _Words(process, job.external.tells_failures, console)
        console.started()
        interrupts, lost = _wait(process, events, job, console)
        end_descendants(console.say)
        words.drain()
    interrupted_by = interrupts[0] if interrupts else None
    has_failed = process.returncode != 0 and interrupted_by is None
    failures: list[Failure] = [_failure(job, process.returncode, words.first_failure)] if has_failed else []
    if lost and not interrupts:
        failures = [HostFailure(host=job.backend, message=lost, at_s=time.monotonic())]
    return verdict_of(failures, stopped_at=None, interrupted_by=interrupted_by, phases_s={})


def _failure(job: OwnedJob, code: int, first: tuple[str, int] | None) -> HostFailure:
    """Return how the command ended: how the rank that failed first ended, if the command tells that."""
    how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
    exit_code = 128 - code if code < 0 else code
    message = f"{job.argv[0]} {how}"
    if first is not None:
        message, exit_code = f"{first[0]}; it failed first, and {message}", first[1]
    return HostFailure(host=job.backend, message=message, at_s=time.monotonic(), exit_code=exit_code)


class _Words:
    """Passes the command's output on to ours, byte for byte, where it must be read to find failures; notes
    the first failure.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], tells_failures: TellsFailures | None, console: Console
    ) -> None:
        self._tells_failures = tells_failures
        self._console = console
        self.first_failure: tuple[str, int] | None = None
        self._unwritten = threading.BoundedSemaphore(MAX_UNWRITTEN)
        self._threads = [
            threading.Thread(target=self._pass_on, args=(number, pipe), name=name, daemon=True)
            for number, name, pipe in ((1, "stdout", process.stdout), (2, "stderr", process.stderr))
            if pipe is not None
        ]
        for one in self._threads:
            one.start()

    def drain(self) -> None:
        """Pass on the rest of the output after the command's end; do not wait for other processes that hold
        the pipe.
        """
        for one in self._threads:
            one.join(DRAIN_S)

    def _pass_on(self, number: int, pipe: IO[bytes]) -> None:
        for line in pipe:
            if number == 2 and self._tells_failures is not None and self.first_failure is None:
                self.first_failure = self._tells_failures(line.decode("utf-8", "replace"))
            if not self._console.has_streams:
                self._unwritten.acquire()
                self._console.put(number, line, self._unwritten.release)
                continue
            # If our stderr has no reader any more, go on reading, so that srun can end.
            with contextlib.suppress(OSError):
                view = memoryview(line)
                while view:
                    view = view[os.write(number, view) :]


def _start(job: OwnedJob, hostfile: str, console: Console) -> subprocess.Popen[bytes]:
    argv = [word.replace(HOSTFILE, hostfile) for word in job.argv]
    settings = {name: value.replace(HOSTFILE, hostfile) for name, value in job.external.settings}
    us = os.getpid()
    try:
        return subprocess.Popen(
            argv,
            env={**os.environ, **settings, **dict(job.payload)},
            stdin=subprocess.DEVNULL,
            stdout=None if console.has_streams else subprocess.PIPE,
            stderr=subprocess.PIPE if job.external.tells_failures or not console.has_streams else None,
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(us, signal.SIGTERM),
        )
    except (OSError, subprocess.SubprocessError) as error:
        size = sum(len(value) for _, value in job.payload)
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise LaunchError(
            f"{argv[0]} cannot be started: {why} (the job takes {size} bytes of environment)",
            exit_code=EXIT_HOST,
        ) from None


def _wait(
    process: subprocess.Popen[bytes], events: queue.SimpleQueue[int | None], job: OwnedJob, console: Console
) -> tuple[list[int], str]:
    """Wait for the command's end; return the signals that we got meanwhile, and why we ended the command, if
    we did.
    """

    def watch() -> None:
        process.wait()
        events.put(None)

    threading.Thread(target=watch, name="wait", daemon=True).start()
    interrupts: list[int] = []
    login, lost = LostLogin(process.pid, job.num_hosts), ""
    while True:
        try:
            number = events.get(timeout=LOOK_EVERY_S)
        except queue.Empty:
            if not lost and not interrupts and (lost := login.look()):
                process.terminate()
                if not _ends_soon(events):
                    kill_descendants(os.getpid())
            continue
        if number is None:
            return interrupts, lost
        if number not in ENDING:
            _pass_on(number, process, job, console)
            continue
        interrupts.append(number)
        if len(interrupts) == 1:
            passed_on = signal.SIGTERM if number == signal.SIGHUP else number
            hint = "; Ctrl-C again kills it" if number == signal.SIGINT else ""
            console.stopping()
            console.say(f"{signal_name(number)}: stopping {job.argv[0]}{hint}")
            process.send_signal(passed_on)
        else:
            console.say(f"killing {job.argv[0]} and all it started on this machine")
            # The first signal may still be on its way to the other machines: if srun is killed now, the
            # workers there go on.
            if len(interrupts) > 2 or not _ends_soon(events):
                kill_descendants(os.getpid())


def _pass_on(number: int, process: subprocess.Popen[bytes], job: OwnedJob, console: Console) -> None:
    """Pass a signal for the workers to the command that has started them."""
    if number == ASKING:
        program = job.argv[0]
        console.warn(
            f"{signal_name(number)}: {program} has started the ranks, and they cannot be asked from here"
        )
        return
    process.send_signal(number)
    console.say(f"{signal_name(number)}: passed on to {job.argv[0]}")


def _ends_soon(events: queue.SimpleQueue[int | None]) -> bool:
    """Tell whether the command ends by itself within LAST_MOMENT_S; leave other events in the queue."""
    try:
        event = events.get(timeout=LAST_MOMENT_S)
    except queue.Empty:
        return False
    events.put(event)
    return True
