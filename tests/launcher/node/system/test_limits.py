"""What a host's limits do not allow is said in one line, before the start where it is known then."""

from __future__ import annotations

import errno
import os
import resource
import shutil
from pathlib import Path

import pytest

from dslaunch.launcher.node.system import limits
from dslaunch.launcher.node.system.limits import why_not_started, why_too_many
from tests.launcher.local_job import Start, assert_short

NUM_WORKERS = 60
# Another user, whom a limit of processes binds, and who may read our files all the same.
# Its number is one that no other run of the tests has at the time.
AS_ANOTHER = (
    f"setpriv --reuid {100_000 + os.getpid()} --clear-groups --inh-caps +dac_override "
    "--ambient-caps +dac_override"
)
RUNS_AS_ROOT = os.getuid() == 0 and None not in map(shutil.which, ("prlimit", "setpriv"))


@pytest.mark.slow
def test_more_workers_than_open_files_are_refused_before_the_start(start_words: Start) -> None:
    job = start_words(f"--num_gpus={NUM_WORKERS}", "--no_python", "true", shell='ulimit -n 64; exec "$@"')
    assert job.wait() == 3
    assert job.out == ""
    assert job.err.startswith(f"dslaunch: localhost: {NUM_WORKERS} workers here take about 1")
    assert "open files of one process, and the hard limit is 64; raise it (ulimit -Hn 1" in job.err
    assert job.err.count("\n") == 1


@pytest.mark.slow
def test_a_soft_limit_is_raised_for_the_agent_and_not_for_the_workers(
    start_words: Start, tmp_path: Path
) -> None:
    words = ["--no_local_rank", "--log_dir=logs", "--no_python", "sh", "-c", "ulimit -Sn; ulimit -Hn"]
    num_workers = 20
    job = start_words(f"--num_gpus={num_workers}", *words, shell='ulimit -Sn 48; exec "$@"')
    assert job.wait() == 0, job.err
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    expected = ["48", str(hard) if hard != resource.RLIM_INFINITY else "unlimited"]
    assert [job.lines(rank) for rank in range(num_workers)] == [expected] * num_workers
    files = list((tmp_path / "logs" / "latest" / "attempt_0").glob("*.stdout.log"))
    assert [file.read_text().split() for file in files] == [expected] * num_workers


def test_a_soft_limit_is_raised_for_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a few files of the agent, which has many of them open then."""
    raised: list[tuple[int, tuple[int, int]]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 5000))
    monkeypatch.setattr(resource, "setrlimit", lambda *given: raised.append(given))
    assert limits.raise_open_files(8, holds_snapshots=False) is None
    assert limits.raise_open_files(8, holds_snapshots=True) == (256, 5000)
    ((kind, (soft, hard)),) = raised
    assert (kind, hard) == (resource.RLIMIT_NOFILE, 5000)
    assert soft > 256 + 8 * 8  # two files of each worker in four generations


@pytest.mark.slow
@pytest.mark.skipif(not RUNS_AS_ROOT, reason="needs root and setpriv to become another user")
@pytest.mark.parametrize(
    ("most", "what"),
    [(1, "the threads and processes of dslaunch itself"), (5, "the agent"), (12, "rank ")],
)
def test_a_limit_of_processes_is_named_and_no_orphan_is_left(
    most: int, what: str, start_words: Start
) -> None:
    job = start_words(
        "--num_gpus=20", "--no_local_rank", "--no_python", "sleep", "60",
        shell=f'exec prlimit --nproc={most} {AS_ANOTHER} "$@"',
    )  # fmt: skip
    assert job.wait() == 3
    assert_short(job)
    last = job.err.splitlines()[-1]
    assert f"cannot start {what}" in last
    assert f"no more processes are allowed here (this user may have {most}, see ulimit -u;" in last
    job.assert_nothing_is_left()


def test_more_pythons_than_fit_into_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "read_text", {"/proc/meminfo": _meminfo(available_kib=900_000)}.__getitem__)
    monkeypatch.setattr(limits, "memory_groups", lambda: [])
    monkeypatch.setattr(limits, "_why_too_few_processes", lambda num_workers: "")
    assert why_too_many(100, is_python=True) == ""
    assert why_too_many(200, is_python=True) == (
        "200 workers here take at least 1600 MiB of memory, 8 MiB for each Python before it imports "
        "anything, and 879 MiB are free; start fewer workers here"
    )
    assert why_too_many(200, is_python=False) == ""


@pytest.mark.parametrize(
    ("limit", "pid_max", "why"),
    [
        (150, "32768", "200 workers are to run here, and this user may have 150 processes; raise the limit "),
        (-1, "150", "200 workers are to run here, and the kernel has 150 process ids (kernel.pid_max);"),
        (-1, "32768", ""),
    ],
)
def test_more_workers_than_processes_are_refused_before_the_start(
    limit: int, pid_max: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    allowed = {resource.RLIMIT_NPROC: (limit, -1), resource.RLIMIT_NOFILE: (-1, -1)}
    monkeypatch.setattr(resource, "getrlimit", allowed.__getitem__)
    monkeypatch.setattr(limits, "read_text", lambda path: pid_max)
    assert why_too_many(200, is_python=False).startswith(why)
    assert bool(why) == bool(why_too_many(200, is_python=False))


@pytest.mark.slow
def test_a_coordinator_that_may_open_too_few_files_says_so(start_words: Start, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    words = ["--no_ssh", "--node_rank=0", "--master_addr=127.0.0.1", "-H", "hosts", "t.py"]
    job = start_words(*words, shell='ulimit -n 50; exec "$@"')
    assert job.wait() == 2
    assert job.err == (
        "dslaunch: 2 hosts take about 52 open files, and this process may have 50; raise its limit "
        "(ulimit -n 52)\n"
    )


def test_memory_that_cannot_be_read_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "read_text", lambda path: "")
    assert why_too_many(200, is_python=True) == ""


@pytest.mark.parametrize(
    ("number", "why"),
    [
        (errno.EAGAIN, "no more processes are allowed here"),
        (errno.EMFILE, "a process may have"),
        (errno.ENFILE, "the whole machine has no open file left"),
        (errno.ENOMEM, "there is no memory left"),
    ],
)
def test_the_limit_that_was_met_is_named(number: int, why: str) -> None:
    assert why_not_started("rank 3", OSError(number, "no")).startswith(f"cannot start rank 3: {why}")


def test_other_errors_are_no_limits() -> None:
    assert why_not_started("rank 3", OSError(errno.EIO, "no")) == ""
    assert why_not_started("rank 3", RuntimeError("no")) == ""


def _meminfo(*, available_kib: int) -> str:
    return f"MemTotal: 99999999 kB\nMemAvailable: {available_kib} kB\nSwapFree: 0 kB\n"
