"""Times commands that start workers: each on its own, the tools taking turns,
so that noise hits all the same.
"""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from benchmarks.launch_peers import Command, Job
from tests.lab import Host

TIMEOUT_S = 180.0
# Each program ends with a file that tells its time; all hosts have the clock of this machine.
STAMP = '#!/bin/sh\ndate +%s.%N > "stamp-$(hostname)"\n'
FIRST_ALL_REDUCE = """\
import time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
one = torch.ones(1)
dist.all_reduce(one)
if one.item() != dist.get_world_size():
    raise AssertionError(f"{one} of {dist.get_world_size()} ranks")
with open(f"stamp-{dist.get_rank()}", "w") as file:
    file.write(str(time.time()))
dist.destroy_process_group()
"""


class Time(NamedTuple):
    """Time of one command, or the medians of some."""

    wall_s: float  # time until the last worker was there
    cpu_s: float  # CPU time of the command and all that it started on its own machine


class CommandFailed(Exception):
    """A command did not do what it is timed for; the message says why."""


def time_of_workers(host: Host, command: Callable[[Job], Command], job: Job) -> Time:
    """Run a job from `host`; the time until its last worker wrote its stamp.

    Errors: CommandFailed if not every worker did.
    """
    shutil.rmtree(job.folder, ignore_errors=True)
    job.folder.mkdir()
    for name, text in (("stamp.sh", STAMP), ("first.py", FIRST_ALL_REDUCE)):
        (job.folder / name).write_text(text)
        (job.folder / name).chmod(0o755)
    words, env = command(job)
    log = job.folder / "log"
    with log.open("wb") as out:
        began = time.time()
        process = host.popen(
            words,
            cwd=job.folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        cpu_s = _wait(process)
    stamps = [float(path.read_text()) for path in job.folder.glob("stamp-*")]
    if process.returncode or len(stamps) != job.num_workers:
        last = log.read_text(errors="replace").strip().splitlines()[-1:] or ["it printed nothing"]
        raise CommandFailed(
            f"{len(stamps)} of {job.num_workers} workers ran, exit status {process.returncode}: "
            f"{last[0].strip()[:200]}"
        )
    return Time(max(stamps) - began, cpu_s)


def time_of_command(command: Command) -> Time:
    """Run a command on this machine to its end.

    Errors: CommandFailed if its exit status is not 0.
    """
    began = time.perf_counter()
    process = subprocess.Popen(
        command.words,
        env={**os.environ, **command.env},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    cpu_s = _wait(process)
    if process.returncode:
        raise CommandFailed(f"exit status {process.returncode}")
    return Time(time.perf_counter() - began, cpu_s)


def _wait(process: subprocess.Popen[bytes]) -> float:
    """Until the command ends; the CPU seconds of it and of the children that it waited for.

    Errors: CommandFailed after TIMEOUT_S; its process group is killed then
    """
    is_late = threading.Event()

    def kill() -> None:
        is_late.set()
        os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(TIMEOUT_S, kill)
    timer.start()
    try:
        _, status, usage = os.wait4(process.pid, 0)  # Popen.wait says nothing of CPU time
    finally:
        timer.cancel()
    process.returncode = os.waitstatus_to_exitcode(status)
    if is_late.is_set():
        raise CommandFailed(f"did not end within {TIMEOUT_S:g} s")
    return usage.ru_utime + usage.ru_stime


def take_turns(
    tools: Mapping[str, Callable[[], Time]],
    *,
    num_runs: int,
    num_warm_ups: int,
    leave_out: Callable[[str], None],
) -> dict[str, Time]:
    """The medians of each tool. The first one is ours; another that fails is left out.

    Errors: CommandFailed if the first one failed.
    """
    times: dict[str, list[Time]] = {name: [] for name in tools}
    for run in range(num_warm_ups + num_runs):
        for place, (name, measure) in enumerate(tools.items()):
            if name not in times:
                continue
            try:
                took = measure()
            except CommandFailed as failure:
                if place == 0:
                    raise
                leave_out(f"{name}: {failure}")
                del times[name]
                continue
            if run >= num_warm_ups:
                times[name].append(took)
    return {
        name: Time(statistics.median(one.wall_s for one in of), statistics.median(one.cpu_s for one in of))
        for name, of in times.items()
    }
