"""Jobs whose workers run in containers: namespaces of their own, and a container of podman."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from tests.launcher.boxes import UNSHARE, Podman, PodmanMissing, podman, why_no_unshare
from tests.launcher.local_job import AT_ONCE_S, Job, Start, assert_short, poll

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_no_unshare()), reason=f"no namespaces here: {why_no_unshare()}"),
]

WHERE = "say('in', os.readlink('/proc/self/ns/pid'))\n"


class Box(NamedTuple):
    """A way into a container."""

    prefix: str
    podman: Podman | None = None


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Podman]:
    """A container of podman that runs while the tests of this file do."""
    folder = tmp_path_factory.mktemp("podman") / "podman"
    try:
        with podman(folder, "-v", f"{tmp_path_factory.getbasetemp()}:{tmp_path_factory.getbasetemp()}") as one:
            yield one
    except PodmanMissing as missing:
        pytest.skip(f"podman runs no container here: {missing}")


@pytest.fixture(params=["unshare", pytest.param("podman", marks=pytest.mark.exhaustive)])
def box(request: pytest.FixtureRequest) -> Box:
    if request.param == "unshare":
        return Box(UNSHARE)
    one: Podman = request.getfixturevalue("running")
    return Box(one.prefix, one)


def inside(job: Job) -> list[psutil.Process]:
    """Keeper and agent, in this order."""
    found = []
    for pid in job.survivors():
        process = psutil.Process(pid)
        words = process.cmdline()
        if words[1:5] == ["-I", "-S", "-u", "-c"] and "dslaunch is here" in words[5]:
            found.append(process)
    found.sort(key=lambda one: one.create_time())
    return found


def client(job: Job) -> psutil.Process:
    """What the launcher started: the program that the prefix begins with."""
    (child,) = psutil.Process(job.process.pid).children()
    return child


@pytest.mark.parametrize(
    ("worker", "code", "how"),
    [
        ("", 0, ""),
        ("sys.exit(3)", 3, "exited with code 3"),
        ("sys.exit(125)", 125, "exited with code 125"),
        ("sys.exit(127)", 127, "exited with code 127"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "was killed by SIGSEGV (11)"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "was killed by SIGKILL (9)"),
    ],
)
def test_the_end_of_a_worker_inside_is_told_as_that_of_any(
    worker: str, code: int, how: str, start: Start, box: Box
) -> None:
    job = start(WHERE + worker, "--num_gpus=2", f"--exec_prefix={box.prefix}")
    assert job.wait() == code
    assert how in job.err
    namespaces = {line for rank in (0, 1) for line in job.lines(rank)}
    assert namespaces
    assert f"in {os.readlink('/proc/self/ns/pid')}" not in namespaces
    job.assert_nothing_is_left()
    assert_short(job)


def test_sigterm_reaches_the_workers_inside_which_save(start: Start, box: Box) -> None:
    job = start(
        """
        def save(number, frame):
            say('saved')
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        say('ready')
        wait()
        """,
        "--num_gpus=2",
        f"--exec_prefix={box.prefix}",
    )
    job.wait_for("ready", times=2)
    job.signal(signal.SIGTERM)
    assert job.wait(AT_ONCE_S) == 143
    assert job.out.count("saved") == 2
    job.assert_nothing_is_left()


def test_other_signals_reach_them_too(start: Start, box: Box) -> None:
    job = start(
        """
        signal.signal(signal.SIGUSR1, lambda *_: (say('got it'), os._exit(0)))
        say('ready')
        wait()
        """,
        f"--exec_prefix={box.prefix}",
    )
    job.wait_for("ready")
    job.signal(signal.SIGUSR1)
    assert job.wait(AT_ONCE_S) == 0
    assert "got it" in job.out


def test_what_ignores_sigterm_inside_is_killed_after_the_grace(start: Start, box: Box) -> None:
    job = start(
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        escape()
        say('ready')
        if rank == 1: sys.exit(5)
        wait()
        """,
        "--num_gpus=2",
        "--kill_grace=0.5",
        f"--exec_prefix={box.prefix}",
    )
    assert job.wait(AT_ONCE_S) == 5
    job.assert_nothing_is_left()


@pytest.mark.parametrize("victim", ["launcher", "client", "keeper", "agent"])
def test_whichever_process_is_killed_nothing_is_left(victim: str, start: Start, box: Box) -> None:
    job = start(
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        escape()
        say('ready')
        wait()
        """,
        "--num_gpus=2",
        "--kill_grace=0.5",
        "--heartbeat=2",
        f"--exec_prefix={box.prefix}",
    )
    job.wait_for("ready", times=2)
    keeper, agent = inside(job)
    of = {"launcher": job.process.pid, "client": client(job).pid, "keeper": keeper.pid, "agent": agent.pid}
    os.kill(of[victim], signal.SIGKILL)
    if victim == "client" and box.podman is None:  # unshare holds nothing up: its pipes are the agent's
        poll(lambda: not psutil.pid_exists(of["client"]) or client_is_dead(of["client"]), "the client's end")
        job.signal(signal.SIGTERM)
    code = job.wait(AT_ONCE_S)
    job.assert_nothing_is_left()
    if victim in ("keeper", "agent") or (victim == "client" and box.podman is not None):
        assert code == 3
        assert "was the container stopped?" in job.err or "the agent ended" in job.err
    assert "Traceback" not in job.err


def client_is_dead(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_variables_and_arguments_arrive_exactly_and_are_on_no_command_line(start: Start, box: Box) -> None:
    arguments = ["an  argument", "b'\"\\ $HOME \n", "\N{GREEK SMALL LETTER PI}"]
    job = start(
        """
        import json
        print(json.dumps([os.environ['NCCL_SECRET'], sys.argv[2:]]), flush=True)
        wait()
        """,
        f"--exec_prefix={box.prefix}",
        "--",
        *arguments,
        env={"NCCL_SECRET": "s3cr3t $x 'y"},
    )
    job.wait_for("s3cr3t")
    (line,) = job.lines(0)
    assert json.loads(line) == ["s3cr3t $x 'y", arguments]
    lines = [
        (Path("/proc") / name / "cmdline").read_bytes()
        for name in filter(str.isdigit, os.listdir("/proc"))
        if (Path("/proc") / name / "cmdline").exists()
    ]
    assert not [one for one in lines if b"s3cr3t" in one]
    words = [one for one in lines if b"an  argument" in one]
    assert len(words) == 2  # of the launcher and of the worker


def test_every_line_arrives_also_the_last_without_its_end(start: Start, box: Box) -> None:
    job = start(
        """
        sys.stdout.write(''.join(f'line {number}\\n' for number in range(100_000)))
        sys.stdout.write('the end')
        sys.stderr.write('{"code": 0, "signal": 9}')
        """,
        f"--exec_prefix={box.prefix}",
        "--quiet",
    )
    assert job.wait(60) == 0
    assert job.lines(0) == [*(f"line {number}" for number in range(100_000)), "the end"]
    assert '{"code": 0, "signal": 9}' in job.err


@pytest.mark.parametrize(
    ("prefix", "said"),
    [
        ("no-such-program -x", "cannot run no-such-program, the first word of exec_prefix: No such file"),
        ("true", "true ended with status 0 before an agent ran behind it and said nothing"),
        ("sh -c 'echo refused >&2; exit 125'", "ended with status 125 before an agent ran behind it, and its "
         "last words are 'refused'"),
        ("unshare -p -f", "/proc there is not that of its processes: mount it"),
        ("sh -c '\"$@\" </dev/null' sh", "no input comes through it"),
        ("script -qec 'sh -c \"tty; sleep 0.1\"'", "ended with status"),
        (f"{UNSHARE} sh -c 'mount -t tmpfs none /tmp; exec \"$@\"' sh", "inside"),
    ],
)  # fmt: skip
def test_a_prefix_that_leads_nowhere_is_said_before_anything_runs(
    prefix: str, said: str, start: Start
) -> None:
    job = start("say('ran')", f"--exec_prefix={prefix}")
    code = job.wait(AT_ONCE_S)
    if "tmpfs" in prefix and "/tmp" not in str(job.folder):
        pytest.skip("the job's folder is not below /tmp here")
    assert code == 3, job.err
    assert said in job.err
    assert "ran" not in job.out
    job.assert_nothing_is_left()
    assert_short(job)
