"""Whole jobs on this machine: `python -m dslaunch` in a child process, real workers, and nothing left at the end."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

pytestmark = pytest.mark.slow

TIMEOUT_S = 30.0
SMALL_GRACE = "--kill_grace=0.2"
LIBC_SIGNALS = 3 << 31  # 32 and 33, which the C library keeps to itself: whoever ignores them was started so
MARK = "DSLAUNCH_TEST_JOB"  # inherited by every process of a job, so its survivors can be found
ROOT = Path(__file__).parents[2]
FORGOTTEN = ("CUDA_", "DS_ENV", "OMP_", "PYTHON", "NCCL", "LC_", "LANG", "DSLAUNCH", "NO_COLOR", "COV_CORE")

WORKER = """
import os, signal, subprocess, sys, time
rank = int(os.environ.get('RANK', 0))

def say(*words):
    os.write(1, ' '.join(map(str, words)).encode() + b'\\n')

def wait():
    while True: signal.pause()

def escape():
    '''Leave a process in a session of its own, with other parents, that ends with SIGKILL only.'''
    read, write = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            os.write(write, b'.')
            wait()
        os._exit(0)
    os.wait()
    os.read(read, 1)
"""


def poll(is_so: Callable[[], Any], what: str, timeout_s: float = TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout_s:g} s for {what}")
        time.sleep(0.005)


class Job:
    """A `dslaunch` command in `folder`. Its stdout and stderr go to files there, unless said otherwise."""

    def __init__(
        self,
        folder: Path,
        words: Sequence[str | bytes],
        *,
        env: Mapping[str, str] | None = None,
        shell: str = 'exec "$@"',
        stdout: int | None = None,
    ) -> None:
        self.folder = folder
        self._mark = f"{MARK}={uuid.uuid4()}".encode()
        base = {name: value for name, value in os.environ.items() if not name.startswith(FORGOTTEN)}
        home = folder / "home"
        home.mkdir(exist_ok=True)
        base.update(HOME=str(home), PYTHONDONTWRITEBYTECODE="1", **(env or {}))
        name, _, value = self._mark.decode().partition("=")
        self._out, self._err = folder / "stdout", folder / "stderr"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                ["/bin/sh", "-c", shell, "sh", sys.executable, "-m", "dslaunch", *words],
                cwd=folder,
                env={**base, name: value},
                stdin=subprocess.DEVNULL,
                stdout=out if stdout is None else stdout,
                stderr=err,
                start_new_session=True,
            )

    @property
    def out(self) -> str:
        return self._out.read_text("utf-8", "surrogateescape")

    @property
    def err(self) -> str:
        return self._err.read_text("utf-8", "surrogateescape")

    def wait(self, timeout_s: float = TIMEOUT_S) -> int:
        """The exit code as a shell gives it."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"did not end within {timeout_s:g} s\n{self.out}\n{self.err}") from None
        return code if code >= 0 else 128 - code

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait_for(self, text: str, *, times: int = 1) -> None:
        """Until stdout shows the text so many times."""
        poll(lambda: self.out.count(text) >= times, f"{text!r} x {times} in\n{self.out}\n{self.err}")

    def wait_for_err(self, text: str) -> None:
        poll(lambda: text in self.err, f"{text!r} in\n{self.err}")

    def lines(self, rank: int) -> list[str]:
        prefix = f"localhost:{rank} | "
        return [line.removeprefix(prefix) for line in self.out.split("\n") if line.startswith(prefix)]

    def survivors(self) -> list[int]:
        """Every process of this job that runs, the launcher included."""
        found = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if self._mark in Path(f"/proc/{name}/environ").read_bytes():
                    found.append(int(name))
        return found

    def keeper(self) -> psutil.Process:
        (child,) = psutil.Process(self.process.pid).children()
        return child

    def agent(self) -> psutil.Process:
        (child,) = self.keeper().children()
        return child

    def assert_nothing_is_left(self, timeout_s: float = TIMEOUT_S) -> None:
        poll(lambda: not self.survivors(), f"the end of {self.survivors()}\n{self.err}", timeout_s)

    def end(self) -> None:
        for _ in range(1000):
            left = self.survivors()
            if not left:
                break
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.process.wait()


Start = Callable[..., Job]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a job of this worker text; the words are the options before the script and, after '--', its own."""
    jobs: list[Job] = []

    def start_one(worker: str, *words: str, **given: Any) -> Job:
        (tmp_path / "train.py").write_text(WORKER + textwrap.dedent(worker))
        place = words.index("--") if "--" in words else len(words)
        jobs.append(Job(tmp_path, [*words[:place], "train.py", *words[place + 1 :]], **given))
        return jobs[-1]

    yield start_one
    for job in jobs:
        job.end()


@pytest.fixture
def start_words(tmp_path: Path) -> Iterator[Start]:
    """Starts a job of exactly these words."""
    jobs: list[Job] = []

    def start_one(*words: str, **given: Any) -> Job:
        jobs.append(Job(tmp_path, words, **given))
        return jobs[-1]

    yield start_one
    for job in jobs:
        job.end()


def assert_short(job: Job) -> None:
    """What went wrong is said in sentences."""
    assert "Traceback" not in job.err
    assert "Exception" not in job.err


# How a job ends.


@pytest.mark.parametrize(
    ("worker", "code"),
    [
        ("", 0),
        ("sys.exit(3)", 3),
        ("sys.exit(255)", 255),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137),
        ("os.kill(os.getpid(), signal.SIGTERM)", 143),
        ("os.abort()", 134),
        ("raise ValueError", 1),
    ],
)
def test_the_exit_code_is_that_of_the_worker(worker: str, code: int, start: Start) -> None:
    job = start(worker)
    assert job.wait() == code
    job.assert_nothing_is_left()


def test_the_first_failure_stops_all_and_is_named_with_its_last_lines(start: Start) -> None:
    job = start(
        """
        if rank == 1:
            for number in range(30): say('line', number)
            raise ValueError('the reason')
        wait()
        """,
        "--num_gpus=4",
    )
    assert job.wait() == 1
    pid = re.search(r"pid (\d+)", job.err)
    assert pid is not None
    who = f"rank 1 on localhost (local rank 1, pid {pid[1]}) exited with code 1"
    lines = job.err.splitlines()
    lines = lines[lines.index(f"dslaunch: {who}; it failed first") :]
    assert lines[1] == "dslaunch: traceback of rank 1:"
    assert lines[2] == "    Traceback (most recent call last):"
    assert lines[-1] == "    ValueError: the reason"
    assert f"{who}: stopping 3 other workers (SIGTERM, and SIGKILL after 30 s)" in job.err
    assert "also failed" not in job.err
    job.assert_nothing_is_left()


def test_who_failed_first_is_told_from_who_failed_next(start: Start) -> None:
    job = start(
        """
        with open(f'writing{rank}', 'w') as file: file.write(str(os.getpid()))
        os.rename(f'writing{rank}', f'pid{rank}')
        if rank < 2:
            while not os.path.exists(f'pid{rank + 1}'): time.sleep(0.001)
            while os.path.exists('/proc/' + open(f'pid{rank + 1}').read()): time.sleep(0.001)
        sys.exit(10 + rank)
        """,
        "--num_gpus=3",
    )
    assert job.wait() == 12
    assert "rank 2 on localhost (local rank 2" in job.err.partition("it failed first")[0].splitlines()[-1]


def test_a_killed_worker_is_named_with_its_signal(start: Start) -> None:
    job = start("os.kill(os.getpid(), signal.SIGKILL)", "--quiet")
    assert job.wait() == 137
    assert re.fullmatch(
        r"dslaunch: rank 0 on localhost \(local rank 0, pid \d+\) was killed by SIGKILL \(9\); it failed first\n"
        r"dslaunch: evidence: [^\n]*SIGKILL[^\n]*\n",
        job.err,
    )


def test_a_good_end_says_nothing_with_quiet(start: Start) -> None:
    job = start("say('hello')", "--quiet", "--num_gpus=2")
    assert job.wait() == 0
    assert sorted(job.out.splitlines()) == ["localhost:0 | hello", "localhost:1 | hello"]
    assert job.err == ""


def test_the_timings_are_said_in_the_order_of_time(start: Start) -> None:
    job = start("say('hello')", "--timings")
    assert job.wait() == 0
    (line,) = [line for line in job.err.splitlines() if "timings" in line]
    found = re.findall(r"([a-z ]+) ([0-9.]+) s", line.partition("timings: ")[2].replace(",", ""))
    assert [name.strip() for name, _ in found] == [
        "connected",
        "agent",
        "prepared",
        "started",
        "first output",
        "ended",
    ]
    assert [float(seconds) for _, seconds in found] == sorted(float(seconds) for _, seconds in found)


def test_the_report_is_a_file(start: Start, tmp_path: Path) -> None:
    job = start("sys.exit(7 * rank)", "--num_gpus=2", "--report=end.json")
    assert job.wait() == 7
    report = json.loads((tmp_path / "end.json").read_text())
    assert report["exit_code"] == 7
    assert report["culprit"]["rank"] == 1
    assert list(report["phases_s"]) == ["connected", "agent", "prepared", "started"]


def test_a_report_that_cannot_be_written_is_one_line(start: Start) -> None:
    job = start("", "--report=no/such/folder")
    assert job.wait() == 2
    assert job.err.splitlines()[-1].startswith("dslaunch: --report=no/such/folder: cannot be written: ")
    assert_short(job)


# Interrupts.


def test_one_interrupt_lets_the_workers_finish_what_they_do_at_sigterm(start: Start) -> None:
    job = start(
        """
        def save(number, frame):
            say('saving')
            time.sleep(0.05)
            say('saved')
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        say('ready')
        wait()
        """,
        "--num_gpus=2",
    )
    job.wait_for("ready", times=2)
    job.signal(signal.SIGINT)
    assert job.wait() == 130
    assert (job.lines(0), job.lines(1)) == (["ready", "saving", "saved"],) * 2
    assert (
        "SIGINT (2): stopping 2 workers (SIGTERM, and SIGKILL after 30 s; Ctrl-C again kills them now)"
        in job.err
    )
    assert "failed" not in job.err
    job.assert_nothing_is_left()


def test_a_second_interrupt_kills_at_once(start: Start) -> None:
    job = start(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); escape(); say('ready'); wait()", "--num_gpus=2"
    )
    job.wait_for("ready", times=2)
    job.signal(signal.SIGINT)
    job.wait_for_err("stopping 2 workers")
    job.signal(signal.SIGINT)
    assert job.wait(10) == 130
    assert "killing all workers now" in job.err
    job.assert_nothing_is_left()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_other_signals_to_the_launcher_end_the_job_too(number: int, code: int, start: Start) -> None:
    job = start("escape(); say('ready'); wait()", "--num_gpus=2", SMALL_GRACE)
    job.wait_for("ready", times=2)
    job.signal(number)
    assert job.wait() == code
    job.assert_nothing_is_left()


def test_with_nohup_a_hang_up_changes_nothing(start: Start) -> None:
    job = start(
        """
        import pathlib
        say('ready')
        while not pathlib.Path('go').exists(): time.sleep(0.005)
        """,
        shell='trap "" HUP; exec "$@"',
    )
    job.wait_for("ready")
    job.signal(signal.SIGHUP)
    (job.folder / "go").touch()
    assert job.wait() == 0


def test_an_interrupt_before_the_workers_start(start: Start, tmp_path: Path) -> None:
    (tmp_path / "venv.sh").write_text("touch sourcing; exec sleep 1000\n")
    job = start("say('started')", "--venv_script=venv.sh")
    poll((tmp_path / "sourcing").exists, "the venv script")
    job.signal(signal.SIGINT)
    assert job.wait(10) == 130
    assert job.out == ""
    job.assert_nothing_is_left()


# Nothing is left, whoever dies.


@pytest.mark.parametrize("victim", ["launcher", "keeper", "agent"])
def test_nothing_is_left_when_a_process_of_ours_is_killed(victim: str, start: Start) -> None:
    job = start(
        "escape(); signal.signal(signal.SIGTERM, signal.SIG_IGN); say('ready'); wait()",
        "--num_gpus=2",
        SMALL_GRACE,
    )
    job.wait_for("ready", times=2)
    assert len(job.survivors()) == 7
    process = {"launcher": lambda: psutil.Process(job.process.pid), "keeper": job.keeper, "agent": job.agent}[
        victim
    ]()
    process.kill()
    job.assert_nothing_is_left(10)
    assert job.wait() == (137 if victim in ("launcher", "keeper") else 3)
    assert_short(job)


def test_workers_end_when_both_processes_above_them_are_killed(start: Start) -> None:
    job = start("signal.signal(signal.SIGTERM, signal.SIG_IGN); say('ready'); wait()", "--num_gpus=2")
    job.wait_for("ready", times=2)
    keeper, agent = job.keeper(), job.agent()
    keeper.suspend()
    agent.kill()
    keeper.kill()
    job.assert_nothing_is_left(10)
    assert job.wait() == 3


@pytest.mark.parametrize("victim", ["keeper", "agent"])
def test_a_job_whose_agent_was_ended_did_not_end_well(victim: str, start: Start) -> None:
    """Also if every worker exits with 0 at SIGTERM."""
    job = start("signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0)); say('ready'); wait()")
    job.wait_for("ready")
    (job.keeper if victim == "keeper" else job.agent)().send_signal(signal.SIGTERM)
    assert job.wait() == 3
    assert "localhost: the agent ended: it got SIGTERM" in job.err
    job.assert_nothing_is_left()


def test_what_outlives_its_worker_is_ended_and_said(start: Start) -> None:
    job = start("escape(); subprocess.Popen(['sleep', '1000']); say('ready')", "--num_gpus=2")
    assert job.wait() == 0
    assert "warning: localhost: ended 4 processes that outlived their worker" in job.err
    assert not job.survivors()


def test_what_outlives_its_worker_may_write_without_end(start: Start) -> None:
    job = start("subprocess.Popen(['yes'], preexec_fn=os.setsid); say('ready')")
    assert job.wait() == 0
    assert not job.survivors()


def test_a_worker_that_ignores_sigterm_is_killed_after_the_grace(start: Start) -> None:
    job = start(
        """
        if rank == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            open('deaf', 'w').close()
            wait()
        while not os.path.exists('deaf'): time.sleep(0.001)
        sys.exit(5)
        """,
        "--num_gpus=2",
        SMALL_GRACE,
    )
    assert job.wait(10) == 5
    assert not job.survivors()


def test_a_stopped_worker_still_gets_its_sigterm(start: Start) -> None:
    job = start(
        """
        def save(number, frame):
            say('saved')
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        say('ready', os.getpid())
        wait()
        """
    )
    job.wait_for("ready")
    worker = psutil.Process(int(job.lines(0)[0].split()[1]))
    worker.suspend()
    poll(lambda: worker.status() == psutil.STATUS_STOPPED, "the stop")
    job.signal(signal.SIGINT)
    assert job.wait(10) == 130
    assert job.lines(0)[1:] == ["saved"]


def test_a_lost_launcher_is_noticed_by_its_silence(start: Start) -> None:
    """A stopped launcher sends no pings, and its pipe does not end."""
    job = start("say('ready'); wait()", "--heartbeat=1", SMALL_GRACE)
    job.wait_for("ready")
    psutil.Process(job.process.pid).suspend()
    poll(lambda: job.survivors() == [job.process.pid], "the end of the workers")
    psutil.Process(job.process.pid).resume()
    assert job.wait() == 3


def test_two_jobs_do_not_touch_each_other(start: Start, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "train.py").write_text(WORKER + "say('ready'); wait()")
    other = Job(tmp_path / "other", ["train.py"])
    try:
        other.wait_for("ready")
        job = start("say('ready'); wait()")
        job.wait_for("ready")
        assert len(other.survivors()) == 4
        job.process.kill()
        job.assert_nothing_is_left()
        assert len(other.survivors()) == 4
    finally:
        other.end()


# What is run.


def test_a_script_that_is_missing_is_a_mistake(start_words: Start) -> None:
    job = start_words("trian.py")
    assert job.wait() == 2
    assert job.err == f"dslaunch: localhost: no script trian.py in {job.folder}\n"


def test_a_program_that_cannot_be_run(start_words: Start, tmp_path: Path) -> None:
    (tmp_path / "program").write_text("no")
    job = start_words("--no_python", "./program")
    assert job.wait() == 127
    assert "dslaunch: cannot run ./program: Permission denied" in job.err


def test_a_program_that_is_missing(start_words: Start) -> None:
    job = start_words("--no_python", "no-such-program")
    assert job.wait() == 127
    assert "dslaunch: cannot run no-such-program: No such file or directory" in job.err


def test_a_variable_that_the_kernel_does_not_take(start: Start, tmp_path: Path) -> None:
    (tmp_path / ".deepspeed_env").write_text(f"LONG={'x' * 200_000}\n")
    job = start("")
    assert job.wait() == 127
    assert "Argument list too long" in job.err


def test_a_module_is_run(start_words: Start, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text(
        "import sys; print(__name__, __package__, sys.argv[1:])"
    )
    job = start_words("--module", "package", "-x", "y")
    assert job.wait() == 0
    assert job.out == "localhost:0 | __main__ package ['--local_rank=0', '-x', 'y']\n"


def test_a_program_is_run_as_it_is(start_words: Start, tmp_path: Path) -> None:
    (tmp_path / "run").write_text('#!/bin/sh\nprintf "%s|" "$@"; echo\n')
    (tmp_path / "run").chmod(0o755)
    job = start_words("--no_python", "--no_local_rank", "--", "./run", "a b", "", "*")
    assert job.wait() == 0
    assert job.out == "localhost:0 | a b||*|\n"


def test_a_program_is_found_in_the_path_of_the_workers(start_words: Start, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "tool").write_text("#!/bin/sh\necho found\n")
    (tmp_path / "bin" / "tool").chmod(0o755)
    (tmp_path / ".deepspeed_env").write_text(f"PATH={tmp_path}/bin:$PATH\n")
    job = start_words("--no_python", "tool")
    assert job.wait() == 0
    assert job.out == "localhost:0 | found\n"


def test_a_worker_starts_as_from_a_shell(start_words: Start) -> None:
    """No signal ignored or blocked, no open file but the three, a session of its own, an empty stdin."""
    script = "grep -E '^Sig(Ign|Blk)' /proc/self/status; ls /proc/self/fd; ps -o pid=,pgid=,sid= -p $$; echo $$; cat"
    job = start_words("--no_python", "--no_local_rank", "sh", "-c", script)
    assert job.wait() == 0
    blocked, ignored, *fds, ids, pid = job.lines(0)
    assert blocked == "SigBlk:\t0000000000000000"
    assert int(ignored.removeprefix("SigIgn:\t"), 16) & ~LIBC_SIGNALS == 0
    assert fds == ["0", "1", "2", "3"]  # 3 is that of ls
    assert ids.split() == [pid] * 3


# The environment of the ranks.

SHOW = """
names = ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_SIZE', 'LOCAL_WORLD_SIZE', 'CROSS_RANK', 'CROSS_SIZE')
names += ('MASTER_ADDR', 'OMP_NUM_THREADS', 'CUDA_VISIBLE_DEVICES')
say(*(os.environ.get(name, '-') for name in names), *sys.argv[1:])
"""


@pytest.mark.skipif(os.path.exists("/dev/nvidia0"), reason="the machine has a GPU")
def test_each_rank_gets_its_place(start: Start) -> None:
    job = start(SHOW, "--num_gpus=3", "--", "-x", env={"OMP_NUM_THREADS": "5"})
    assert job.wait() == 0
    assert [job.lines(rank) for rank in range(3)] == [
        [f"{rank} {rank} 3 3 3 0 1 127.0.0.1 5 - --local_rank={rank} -x"] for rank in range(3)
    ]


def test_the_master_may_be_given(start: Start) -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    job = start(
        "say(os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'])",
        "--master_addr=node7",
        f"--master_port={port}",
    )
    assert job.wait() == 0
    assert job.lines(0) == [f"node7 {port}"]


def test_a_busy_default_port_moves_and_says_so(start: Start) -> None:
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # then somebody else keeps it busy
            stack.enter_context(socket.create_server(("", 29500)))
        job = start("say(os.environ['MASTER_PORT'])", "--num_gpus=2")
        assert job.wait() == 0
    (port,) = {*job.lines(0), *job.lines(1)}
    assert port != "29500"
    assert f"port 29500 is in use here, so MASTER_PORT={port}" in job.err


def test_a_busy_port_that_was_asked_for_is_refused(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        job = start("say('started')", f"--master_port={port}")
        assert job.wait() == 3
    assert job.err == (
        f"dslaunch: localhost: --master_port={port} is in use here; choose another, or leave the option out if you gave it\n"
    )
    assert job.out == ""


def test_environment_files_of_the_home_and_the_folder(start: Start, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".deepspeed_env").write_text("A=home\nB=home\nMY_PATH=/home:$HIS_PATH\n")
    (tmp_path / ".deepspeed_env").write_text(
        '# mine\n\nexport B=here\nC="two words"\nMY_PATH=/here:${MY_PATH}\nD=$(id)\n'
    )
    job = start(
        "say(*(repr(os.environ[name]) for name in ('A', 'B', 'C', 'D', 'MY_PATH')))", env={"HIS_PATH": "/his"}
    )
    assert job.wait() == 0
    assert job.lines(0) == ["'home' 'here' 'two words' '$(id)' '/here:/home:/his'"]


def test_ds_env_file_names_the_file(start: Start, tmp_path: Path) -> None:
    (tmp_path / ".deepspeed_env").write_text("A=default\n")
    (tmp_path / "job.env").write_text("A=chosen\n")
    job = start("say(os.environ['A'])", env={"DS_ENV_FILE": "job.env"})
    assert job.wait() == 0
    assert job.lines(0) == ["chosen"]


def test_a_mistake_in_an_environment_file_is_one_line(start: Start, tmp_path: Path) -> None:
    (tmp_path / ".deepspeed_env").write_text("A=1\nno equals sign\n")
    job = start("say('started')")
    assert job.wait() == 2
    assert job.err.startswith(f"dslaunch: {tmp_path}/.deepspeed_env:2: ")
    assert job.err.count("\n") == 1


def test_a_rank_s_own_variables_win(start: Start, tmp_path: Path) -> None:
    (tmp_path / ".deepspeed_env").write_text("RANK=9\nMASTER_ADDR=else\n")
    job = start("say(os.environ['RANK'], os.environ['MASTER_ADDR'])")
    assert job.wait() == 0
    assert job.lines(0) == ["0 127.0.0.1"]


def test_a_venv_script_changes_what_the_workers_find(start: Start, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text(
        f'#!/bin/sh\nexport OTHER=python\nexec {shlex.quote(sys.executable)} "$@"\n'
    )
    (tmp_path / "bin" / "python").chmod(0o755)
    (tmp_path / "venv.sh").write_text(
        "echo noise; echo more noise >&2; export ADDED=yes; PATH=$PWD/bin:$PATH\n"
    )
    job = start("say(os.environ['ADDED'], os.environ['OTHER'])", "--venv_script=venv.sh", "--num_gpus=2")
    assert job.wait() == 0
    assert (job.lines(0), job.lines(1)) == (["yes python"],) * 2
    assert "noise" not in job.out + job.err


def test_a_venv_script_that_fails_is_quoted(start: Start, tmp_path: Path) -> None:
    (tmp_path / "venv.sh").write_text("echo no module loaded >&2; exit 4\n")
    job = start("say('started')", "--venv_script=venv.sh")
    assert job.wait() == 3
    assert job.err == "dslaunch: localhost: --venv_script=venv.sh ended with 4: no module loaded\n"
    assert job.out == ""


# Exactly these bytes.

any_bytes = st.binary(max_size=40).map(lambda data: data.replace(b"\0", b""))


def exact(folder: Path, words: list[bytes], values: list[bytes], env: Mapping[str, str]) -> None:
    """These arguments and these values of an environment file arrive as they are."""
    (folder / "train.py").write_text(
        "import os\n"
        "os.makedirs('got', exist_ok=True)\n"
        "for name in ('cmdline', 'environ'):\n"
        "    with open('/proc/self/' + name, 'rb') as file, open('got/' + name, 'wb') as copy:\n"
        "        copy.write(file.read())\n"
    )
    lines = [b"V%d=%s\n" % (place, quoted(value)) for place, value in enumerate(values)]
    (folder / ".deepspeed_env").write_bytes(b"".join(lines))
    job = Job(folder, ["--no_local_rank", "train.py", *words], env=env)
    try:
        assert job.wait() == 0, job.err
    finally:
        job.end()
    got = (folder / "got" / "cmdline").read_bytes().split(b"\0")
    assert got[got.index(b"train.py") + 1 : -1] == words
    environ = dict(
        pair.split(b"=", 1) for pair in (folder / "got" / "environ").read_bytes().split(b"\0") if pair
    )
    assert [environ[b"V%d" % place] for place in range(len(values))] == values
    for name, value in env.items():
        if not name.startswith(("PYTHON", "LC_", "LOCPATH")):
            assert environ[os.fsencode(name)] == os.fsencode(value)


def quoted(value: bytes) -> bytes:
    return b"'" + value.replace(b"'", b"'\"'\"'") + b"'"


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    words=st.lists(any_bytes, max_size=30).filter(lambda words: words[:1] != [b"--"]),
    values=st.lists(any_bytes, max_size=30),
    shell_value=any_bytes,
)
def test_arguments_and_values_arrive_byte_for_byte(
    words: list[bytes], values: list[bytes], shell_value: bytes, tmp_path: Path
) -> None:
    exact(
        tmp_path, words, values, {"NCCL_ODD": os.fsdecode(shell_value), "OTHER_ODD": os.fsdecode(shell_value)}
    )


ALL_BYTES = bytes(range(1, 256))
UTF8 = "caf\u00e9 \u2192 \U0001f600".encode()


def locale_of(name: str, folder: Path) -> dict[str, str]:
    """The variables of a locale; one that is not UTF-8 is made in `folder`."""
    if name == "C":
        return {"LC_ALL": "C"}
    if name == "C without UTF-8":
        return {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    if shutil.which("localedef") is None:
        pytest.skip("no localedef here")
    path = folder / "locale" / "en_US.ISO-8859-1"
    path.parent.mkdir()
    made = subprocess.run(
        ["localedef", "-i", "en_US", "-f", "ISO-8859-1", path], capture_output=True, check=False
    )
    if not path.exists():
        pytest.skip(f"localedef: {made.stderr!r}")
    return {"LOCPATH": str(path.parent), "LC_ALL": "en_US.ISO-8859-1", "PYTHONUTF8": "0"}


@pytest.mark.parametrize("name", ["C", "C without UTF-8", "Latin-1"])
def test_bytes_arrive_in_every_locale(name: str, tmp_path: Path) -> None:
    env = {**locale_of(name, tmp_path), "NCCL_ODD": os.fsdecode(ALL_BYTES), "NCCL_UTF8": os.fsdecode(UTF8)}
    exact(tmp_path, [ALL_BYTES, UTF8], [ALL_BYTES, UTF8], env)


@pytest.mark.parametrize("name", ["C", "C without UTF-8", "Latin-1"])
def test_output_passes_in_every_locale(name: str, start: Start, tmp_path: Path) -> None:
    job = start(
        f"os.write(1, {UTF8!r} + b' \\xff\\n'); sys.stdout = None; sys.exit(3)", env=locale_of(name, tmp_path)
    )
    assert job.wait() == 3
    assert (tmp_path / "stdout").read_bytes() == b"localhost:0 | " + UTF8 + b" \xff\n"
    assert b"    " + UTF8 + b" \xff\n" in (tmp_path / "stderr").read_bytes()


@pytest.mark.parametrize("name", ["C", "C without UTF-8", "Latin-1"])
def test_a_dry_run_prints_in_every_locale(name: str, start: Start, tmp_path: Path) -> None:
    job = start("", "--dry_run", "--", UTF8.decode(), env=locale_of(name, tmp_path))
    assert job.wait() == 0, job.err


def test_the_environment_is_that_of_the_launcher_and_nothing_more(start: Start, tmp_path: Path) -> None:
    """Python sets LC_CTYPE in its own environment in the C locale; the workers must not see that."""
    job = start("open('environ', 'wb').write(open('/proc/self/environ', 'rb').read())", "--num_gpus=1")
    assert job.wait() == 0
    names = {
        pair.split(b"=")[0].decode() for pair in (tmp_path / "environ").read_bytes().split(b"\0") if pair
    }
    mine = {name for name in os.environ if not name.startswith(FORGOTTEN)} | {"PYTHONDONTWRITEBYTECODE", MARK}
    added = {
        "CROSS_RANK", "CROSS_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
        "PYTHONPATH", "RANK", "TORCHELASTIC_ERROR_FILE", "WORLD_SIZE",
    }  # fmt: skip
    assert names - {"PWD", "OLDPWD", "SHLVL", "_", "CUDA_VISIBLE_DEVICES"} == (mine | added) - {
        "PWD",
        "OLDPWD",
        "SHLVL",
        "_",
    }


def test_no_value_is_on_a_command_line(start: Start, tmp_path: Path) -> None:
    secret = "s3cret-" + uuid.uuid4().hex
    (tmp_path / ".deepspeed_env").write_text(f"MY_TOKEN={secret}\n")
    (tmp_path / "venv.sh").write_text("touch sourcing; while [ ! -e go ]; do sleep 0.01; done\n")
    job = start(
        "say(len(os.environ['MY_TOKEN'])); wait()", "--venv_script=venv.sh", env={"NCCL_SECRET": secret}
    )
    seen: set[str] = set()

    def look() -> None:
        for pid in job.survivors():
            with contextlib.suppress(OSError):
                seen.add(Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace"))

    def is_sourcing() -> bool:
        look()
        return (tmp_path / "sourcing").exists()

    poll(is_sourcing, "the venv script")
    (tmp_path / "go").touch()
    job.wait_for(str(len(secret)))
    look()
    assert any("train.py" in line for line in seen)
    assert not [line for line in seen if secret in line]


# Output.

NUM_LINES = 2000


def test_lines_of_many_ranks_come_whole_and_in_order(start: Start) -> None:
    job = start(
        f"""
        for number in range({NUM_LINES}):
            for stream in (1, 2):
                size = 70_000 if number in (7, 1900) else number % 50
                os.write(stream, b'%d %d %d ' % (rank, stream, number) + b'x' * size + b'\\n')
        """,
        "--num_gpus=16",
    )
    assert job.wait() == 0
    for stream, text in ((1, job.out), (2, job.err)):
        numbers = [0] * 16
        for line in text.splitlines():
            if line.startswith("dslaunch: "):
                continue
            prefix, _, body = line.partition(" | ")
            rank, number = int(prefix.removeprefix("localhost:")), int(body.split(" ")[2])
            size = 70_000 if number in (7, 1900) else number % 50
            assert body == f"{rank} {stream} {number} " + "x" * size
            assert number == numbers[rank]
            numbers[rank] += 1
        assert numbers == [NUM_LINES] * 16


def test_a_line_without_an_end_and_progress_bars(start: Start) -> None:
    job = start(
        """
        os.write(1, b'whole\\nfirst half, ')
        os.write(1, b'second half\\r\\n')
        for percent in range(0, 101): os.write(1, b'\\r%3d%%' % percent)
        os.write(1, b'\\nthe last words')
        """
    )
    assert job.wait() == 0
    lines = [line for line in job.lines(0) if "%" not in line or "100%" in line]
    assert lines == ["whole", "first half, second half", "100%", "the last words"]


LINE = b"x" * 1000 + b"\n"
NUM_LONG_LINES = 20_000


def test_a_reader_that_is_slow_loses_nothing_and_slows_the_workers(start: Start, tmp_path: Path) -> None:
    """Nobody reads our stdout for three heartbeats, so the worker waits; then all of it is read."""
    read, write = os.pipe()
    job = start(
        f"""
        progress = os.open('progress', os.O_CREAT | os.O_WRONLY)
        for number in range({NUM_LONG_LINES}):
            os.write(1, b'%06d ' % number + {LINE!r})
            if rank == 0: os.pwrite(progress, b'%06d' % number, 0)
        """,
        "--num_gpus=2",
        "--heartbeat=1",
        stdout=write,
    )
    os.close(write)
    progress = tmp_path / "progress"
    try:
        poll(lambda: progress.exists() and progress.read_text(), "the first line")
        began, last = time.monotonic(), ""

        def has_waited() -> bool:
            nonlocal began, last
            now = progress.read_text()
            if now != last:
                began, last = time.monotonic(), now
            return time.monotonic() - began > 3.0

        poll(has_waited, "the worker to wait for three seconds")
        assert int(last) < NUM_LONG_LINES / 2
        assert job.process.poll() is None
        processes = [psutil.Process(job.process.pid), job.keeper(), job.agent()]
        assert sum(process.memory_info().rss for process in processes) < 150 << 20
        with open(read, "rb", closefd=False) as file:
            lines = file.read().splitlines()
    finally:
        os.close(read)
    assert job.wait() == 0
    for rank in range(2):
        prefix = b"localhost:%d | " % rank
        mine = [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]
        assert mine == [b"%06d %s" % (number, LINE[:-1]) for number in range(NUM_LONG_LINES)]


def test_who_failed_first_is_told_also_when_nobody_reads(start: Start, tmp_path: Path) -> None:
    """Rank 2 fills everything up to the worker's pipes, so that neither end can be reported when it happens."""
    read, write = os.pipe()
    job = start(
        """
        import pathlib
        def is_gone(rank): return os.path.exists(f'pid{rank}') and not os.path.exists('/proc/' + open(f'pid{rank}').read())
        pathlib.Path(f'writing{rank}').write_text(str(os.getpid()))
        os.rename(f'writing{rank}', f'pid{rank}')
        if rank == 0:
            while not is_gone(1): time.sleep(0.001)
            os._exit(10)
        if rank == 1:
            while not os.path.exists('full'): time.sleep(0.001)
            say('last words')
            os._exit(11)
        os.set_blocking(1, False)
        failed_at = None
        while True:
            try:
                os.write(1, b'x' * 4095 + b'\\n')
                failed_at = None
            except BlockingIOError:
                failed_at = failed_at or time.monotonic()
                if time.monotonic() - failed_at > 0.5: pathlib.Path('full').touch()
                time.sleep(0.001)
        """,
        "--num_gpus=3",
        stdout=write,
    )
    os.close(write)
    poll((tmp_path / "pid0").exists, "rank 0")
    pid = (tmp_path / "pid0").read_text()
    poll(lambda: not os.path.exists(f"/proc/{pid}"), "the end of ranks 1 and 0")
    with open(read, "rb") as file:
        assert b"localhost:1 | last words\n" in file.read()
    assert job.wait() == 11
    assert "rank 1 on localhost" in job.err.partition("it failed first")[0].splitlines()[-1]


def test_one_interrupt_stops_the_job_also_while_nobody_reads(start: Start, tmp_path: Path) -> None:
    """As in a pager that waits for a key: what is still to be printed is given up after two seconds."""
    read, write = os.pipe()
    job = start(
        """
        import pathlib
        os.set_blocking(1, False)
        while True:
            try:
                os.write(1, b'x' * 4095 + b'\\n')
            except BlockingIOError:
                pathlib.Path('full').touch()
                time.sleep(0.001)
        """,
        stdout=write,
    )
    os.close(write)
    poll((tmp_path / "full").exists, "a pipe that is full")
    job.signal(signal.SIGINT)
    assert job.wait() == 130
    job.assert_nothing_is_left()
    os.close(read)


def test_a_reader_that_goes_away_ends_the_job(start: Start) -> None:
    read, write = os.pipe()
    job = start("for number in range(10**9): say('line', number)", "--num_gpus=2", stdout=write)
    os.close(write)
    assert os.read(read, 10) == b"localhost:"
    os.close(read)
    assert job.wait() == 141
    assert_short(job)
    job.assert_nothing_is_left()


def test_as_the_first_part_of_a_pipeline(start: Start) -> None:
    job = start("for number in range(10**9): say('line', number)", shell='"$@" | head -n 1')
    assert job.wait() == 0
    assert job.out == "localhost:0 | line 0\n"
    assert_short(job)
    job.assert_nothing_is_left()


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams_do_not_matter(closed: str, start: Start) -> None:
    job = start("say('hello'); open('done', 'w').close(); sys.exit(4)", shell=f'exec "$@" {closed}')
    assert job.wait() == 4
    assert (job.folder / "done").exists()
    assert_short(job)


def test_a_full_disk_ends_the_job_with_one_line(start: Start) -> None:
    job = start("say('hello'); wait()", shell='exec "$@" >/dev/full')
    assert job.wait() == 2
    assert job.err.splitlines()[-1].startswith("dslaunch: cannot write to stdout: No space left on device")
    assert_short(job)
    job.assert_nothing_is_left()


def test_the_console_command_is_the_module(start_words: Start, tmp_path: Path) -> None:
    command = shutil.which("dslaunch", path=str(Path(sys.executable).parent))
    if command is None:
        pytest.skip("not installed as a command")
    made = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
    module = subprocess.run(
        [sys.executable, "-m", "dslaunch", "--version"], capture_output=True, text=True, check=True
    )
    assert made.stdout == module.stdout
