"""What the ranks of a running job do: asked for by a signal, a command or a silence, and shown together."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from dslaunch.launcher.controller.stacks import TIMEOUT_S, Block, StackWatch
from dslaunch.launcher.node.workers import stack_dump, worker_hook
from dslaunch.launcher.wire.frames import Stacks
from tests.lab import Lab
from tests.launcher.command import Command, poll as poll_command
from tests.launcher.local_job import WORKER, Job, poll

# When to ask.


def test_a_silence_is_asked_about_once() -> None:
    watch = StackWatch(10.0)
    assert watch.silence_to_ask_about(109.0, started_at=100.0) == 0
    assert watch.silence_to_ask_about(111.0, started_at=100.0) == 11.0
    assert watch.silence_to_ask_about(150.0, started_at=100.0) == 0
    watch.last_output_at = 160.0
    assert watch.silence_to_ask_about(169.0, started_at=100.0) == 0
    assert watch.silence_to_ask_about(172.0, started_at=100.0) == 12.0


@pytest.mark.parametrize("limit_s", [None, 0.0])
def test_without_a_limit_no_silence_is_too_long(limit_s: float | None) -> None:
    assert StackWatch(limit_s).silence_to_ask_about(1e9, started_at=1.0) == 0


# What is shown.

PLACES = {0: "w0, pid 10", 1: "w0, pid 11", 2: "w1, pid 20", 3: "w1, pid 21"}
WAIT = 'Thread 0x00007f{} (most recent call first):\n  File "a.py", line 1 in wait\n'
WORK = 'Current thread 0x00007f00 (most recent call first):\n  File "a.py", line 9 in work\n'


def test_equal_stacks_are_shown_once_and_who_has_none_comes_first() -> None:
    watch = StackWatch(None)
    assert watch.ask("SIGQUIT (3)", PLACES, now=5.0)
    assert not watch.ask("SIGQUIT (3)", PLACES, now=5.0), "one question at a time"
    watch.take(Stacks(0, "sleeping", WAIT.format("01"), ""))
    watch.take(Stacks(2, "running", WORK, ""))
    watch.take(Stacks(3, "running", WAIT.format("02"), ""))
    assert watch.blocks(6.0, ended=set()) == []
    watch.take(Stacks(1, "stopped", "", "it is stopped"))
    assert watch.stopped == {1}
    assert watch.blocks(6.0, ended=set()) == [
        Block("SIGQUIT (3): what 4 ranks do"),
        Block("rank 1 (w0, pid 11) has no stack: it is stopped"),
        Block(
            "ranks 0,3, running or sleeping:",
            ("Thread (most recent call first):", '  File "a.py", line 1 in wait'),
        ),
        Block(
            "rank 2 (w1, pid 20), running:",
            ("Current thread (most recent call first):", '  File "a.py", line 9 in work'),
        ),
    ]
    assert watch.blocks(7.0, ended=set()) == [], "shown once"
    assert watch.ask("again", PLACES, now=8.0)


def test_places_stand_beside_their_ranks() -> None:
    """What a rank says itself goes before what is known here."""
    watch = StackWatch(None, place_of=lambda rank: f"stage {rank // 2} of 2, dp {rank % 2}")
    watch.ask("why", PLACES, now=5.0)
    watch.take(Stacks(0, "sleeping", WORK, "", "stage 0 of 2, dp 0, ep 1"))
    watch.take(Stacks(1, "stopped", "", "it is stopped"))
    watch.take(Stacks(2, "sleeping", WORK, ""))
    assert [one.title for one in watch.blocks(6.0, ended={3})[1:]] == [
        "rank 3 (stage 1 of 2, dp 1) did not answer: ended, or the host is busy",
        "rank 1 (stage 0 of 2, dp 1; w0, pid 11) has no stack: it is stopped",
        "rank 0 (stage 0 of 2, dp 0, ep 1), rank 2 (stage 1 of 2, dp 0), sleeping:",
    ]


def test_of_many_ranks_what_their_places_have_in_common_is_said() -> None:
    watch = StackWatch(None, place_of=lambda rank: f"stage 1 of 4, dp {rank}")
    watch.ask("why", dict.fromkeys(range(64), "w0, pid 1"), now=5.0)
    for rank in range(64):
        watch.take(Stacks(rank, "sleeping", WORK, ""))
    assert [one.title for one in watch.blocks(6.0, ended=set())[1:]] == [
        "ranks 0-63 (stage 1 of 4), sleeping:"
    ]


def test_who_does_not_answer_is_named_when_the_time_is_up_or_all_others_ended() -> None:
    for now, ended in ((5.1 + TIMEOUT_S, set[int]()), (5.1, {2, 3})):
        watch = StackWatch(None)
        watch.ask("why", PLACES, now=5.0)
        watch.take(Stacks(0, "sleeping", WORK, ""))
        assert watch.blocks(5.1, ended=set()) == []
        watch.take(Stacks(1, "sleeping", WORK, ""))
        assert watch.blocks(now, ended=ended)[:2] == [
            Block("why: what 4 ranks do"),
            Block("ranks 2-3 did not answer: ended, or the host is busy"),
        ]


def test_nobody_is_asked_when_nobody_runs() -> None:
    assert not StackWatch(None).ask("why", {}, now=1.0)
    watch = StackWatch(None)
    watch.take(Stacks(0, "sleeping", WORK, ""))
    assert watch.blocks(1.0, ended=set()) == []


# What the program sees of it: nothing.

SHOW = """
import json, multiprocessing, os, pickle, sys
class Mine: pass
def name_of(thing): return type(thing).__module__, __name__, sys.path, os.environ.get("PYTHONPATH")
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        spawned = pool.apply(name_of, (Mine(),))
    print(json.dumps([
        sys.argv, sys.path, sorted(sys.modules), sys.orig_argv, __name__, __file__, repr(__spec__),
        sorted(os.listdir("/proc/self/fd"))[:4],
        {key: value for key, value in os.environ.items() if "ERROR_FILE" not in key and key != "_"}, spawned,
        getattr(sys.modules.get("sitecustomize"), "__file__", None), len(pickle.dumps(Mine())),
    ]))
"""


def seen_by_a_program(folder: Path, *, has_hook: bool, python_path: str | None) -> list[object]:
    (folder / "show.py").write_text(SHOW)
    env = {name: value for name, value in os.environb.items() if not name.startswith(b"PYTHON")}
    if python_path is not None:
        env[b"PYTHONPATH"] = python_path.encode()
    if has_hook:
        hook = folder / "hook"
        worker_hook.install_hook(str(hook), worker_hook.hook_text(has_milestones=True))
        worker_hook.add_hook(env, folder=str(hook))
        worker_hook.ask_for(env, stacks_file=str(folder / "stacks"), watched="all")
    done = subprocess.run(
        [sys.executable, "-u", "show.py", "--local_rank=0"],
        cwd=folder,
        env=env,
        capture_output=True,
        check=True,
    )
    found: list[object] = json.loads(done.stdout)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("has_own", [False, True])
def test_a_program_does_not_see_that_it_can_be_asked(has_own: bool, tmp_path: Path) -> None:
    """Neither its arguments, modules, paths, files and variables nor what it spawns and pickles change."""
    (tmp_path / "site").mkdir()
    if has_own:
        (tmp_path / "site" / "sitecustomize.py").write_text("import os; os.environ['OWN'] = 'ran'")
    path = str(tmp_path / "site")
    plain = seen_by_a_program(tmp_path, has_hook=False, python_path=path)
    asked = seen_by_a_program(tmp_path, has_hook=True, python_path=path)
    hidden = {"faulthandler", "fcntl", "importlib", "importlib.machinery", "importlib.util", "sitecustomize"}
    assert isinstance(plain[2], list)
    assert isinstance(asked[2], list)
    assert set(asked[2]) - set(plain[2]) <= hidden | {
        "importlib._abc",
        "contextlib",
        "collections",
        "warnings",
    }
    plain[2] = asked[2] = None
    if not has_own:
        plain[10] = asked[10] = None
    assert asked == plain
    assert ("OWN" in dict(plain[8])) == has_own  # type: ignore[call-overload]


@pytest.mark.slow
def test_a_program_without_pythonpath_still_has_none(tmp_path: Path) -> None:
    plain = seen_by_a_program(tmp_path, has_hook=False, python_path=None)
    asked = seen_by_a_program(tmp_path, has_hook=True, python_path=None)
    assert (asked[1], asked[8], asked[9]) == (plain[1], plain[8], plain[9])


def test_only_a_process_that_expects_a_signal_gets_it() -> None:
    before = signal.signal(signal.SIGUSR2, lambda number, frame: None)
    try:
        assert stack_dump.catches(os.getpid(), signal.SIGUSR2)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        assert not stack_dump.catches(os.getpid(), signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert not stack_dump.catches(2**30, signal.SIGUSR2)


# Jobs.

HANG = """
import pathlib, threading
def all_reduce():
    while not os.path.exists('go'): time.sleep(0.3)  # all but always found here
def save():
    lock = threading.Lock()
    threading.Timer(0, lambda: (all_reduce(), lock.release())).start()
    lock.acquire()
    lock.acquire()
say('ready')
if rank == 1: os.kill(os.getpid(), signal.SIGSTOP)
if rank == 2: save()
all_reduce()
say('done')
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def start_one(worker: str, *words: str, shell: str = 'exec "$@"') -> Job:
        (tmp_path / "train.py").write_text(WORKER + textwrap.dedent(worker))
        jobs.append(Job(tmp_path, [*words, "train.py"], shell=shell))
        return jobs[-1]

    yield start_one
    for job in jobs:
        job.end()


def let_go(job: Job) -> None:
    """Continue what stopped, and let all ranks end."""
    for process in psutil.Process(job.process.pid).children(recursive=True):
        if process.status() == psutil.STATUS_STOPPED:
            process.resume()
    (job.folder / "go").touch()


@pytest.mark.slow
def test_a_hang_shows_who_waits_where_and_who_is_stopped(start: Callable[..., Job]) -> None:
    job = start(HANG, "--num_gpus=4", "--stack_on_hang=1")
    job.wait_for_err("ranks 0,3, ")
    said = job.err[job.err.index("dslaunch: no output for") :]
    assert said.startswith("dslaunch: no output for 1 s: what 4 ranks do\n")
    assert "dslaunch: rank 1 (localhost, pid " in said
    assert " has no stack: it is stopped and answers nothing; `kill -CONT " in said
    poll(lambda: " in all_reduce\n" in job.err and " in save\n" in job.err, "both stacks")
    said = job.err[job.err.index("dslaunch: no output for") :]
    rank_2 = said[said.index("dslaunch: rank 2 (localhost, pid ") :]
    assert " in save\n" in rank_2
    let_go(job)
    assert job.wait() == 0, job.err
    assert job.err.count("no output for") == 1
    assert sum(job.lines(rank)[-1] == "done" for rank in range(4)) == 4


@pytest.mark.slow
def test_stacks_are_shown_when_asked_for_and_the_job_goes_on(start: Callable[..., Job]) -> None:
    """By the command, also if a shell started the job in the background with SIGQUIT ignored."""
    job = start(HANG, "--num_gpus=1", shell='trap "" QUIT; exec "$@"')
    job.wait_for("ready")
    command = [sys.executable, "-m", "dslaunch", "stacks", str(job.process.pid)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=job.folder)
    assert done.stdout.startswith(f"dslaunch: process {job.process.pid} was asked")
    job.wait_for_err(" in all_reduce\n")
    assert "dslaunch: SIGQUIT (3): what the one rank does\n" in job.err
    let_go(job)
    assert job.wait() == 0


@pytest.mark.slow
def test_a_place_that_a_rank_has_told_is_shown_and_else_that_of_the_mesh(start: Callable[..., Job]) -> None:
    told = "if rank == 1: open(os.environ['DSLAUNCH_PLACE_FILE'], 'w').write('stage 1 of 2, ep 0')\n"
    job = start(told + HANG.replace("if rank == 1", "if rank == 3"), "--num_gpus=4", "--mesh=pp=2")
    job.wait_for("ready", times=4)
    job.signal(signal.SIGQUIT)
    job.wait_for_err("dslaunch: rank 3 (stage 1 of 2, dp 1; localhost, pid ")
    job.wait_for_err("dslaunch: rank 0 (stage 0 of 2, dp 0), rank 1 (stage 1 of 2, ep 0), sleeping:")
    let_go(job)
    assert job.wait() == 0


RUN = "#!/bin/sh\necho ready\nwhile [ ! -e go ]; do sleep 0.01; done\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("has_py_spy", "said"),
    [
        (False, "has no stack: it runs no Python that can be asked; the kernel says it is "),
        (True, "    Thread 7 (idle): dump --subprocesses --pid "),
    ],
)
def test_a_program_that_is_not_python_is_not_harmed(has_py_spy: bool, said: str, tmp_path: Path) -> None:
    programs = {"run": RUN, "py-spy": '#!/bin/sh\necho "Thread 7 (idle): $*"\n'}
    for name in programs if has_py_spy else ["run"]:
        (tmp_path / name).write_text(programs[name])
        (tmp_path / name).chmod(0o755)
    (tmp_path / ".deepspeed_env").write_text(f"PATH={tmp_path}:$PATH\n")
    job = Job(tmp_path, ["--no_python", "./run"])
    try:
        job.wait_for("ready")
        job.signal(signal.SIGQUIT)
        job.wait_for_err(said)
        (tmp_path / "go").touch()
        assert job.wait() == 0
    finally:
        job.end()


@pytest.mark.slow
@pytest.mark.parametrize("pid", ["self", "1", "1073741824"])
def test_only_a_launcher_can_be_asked(pid: str) -> None:
    words = ["stacks", str(os.getpid()) if pid == "self" else pid]
    done = subprocess.run(
        [sys.executable, "-m", "dslaunch", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "no dslaunch that runs a job has this process id here" in done.stderr


@pytest.mark.slow
def test_stacks_come_from_all_hosts(lab: Lab) -> None:
    folder = lab.shared / "stacks"
    folder.mkdir()
    (folder / "train.py").write_text(WORKER + HANG)
    (folder / "hosts").write_text("node1 slots=2\nnode2 slots=2\n")
    command = Command(lab.head, folder, "-H", "hosts", "--stack_on_hang=1", "--mesh=pp=2", "train.py")
    poll_command(lambda: " in save\n" in command.err, "the stacks", command)
    assert re.search(
        r"rank 1 \(stage 0 of 2, dp 1; node1, pid \d+\) has no stack: it is stopped and answers nothing; ",
        command.err,
    )
    assert "dslaunch: rank 0 (stage 0 of 2, dp 0), rank 3 (stage 1 of 2, dp 1), " in command.err
    assert "dslaunch: rank 2 (stage 1 of 2, dp 0; node2, pid " in command.err
    command.process.send_signal(signal.SIGTERM)
    assert command.wait() == 143
    assert lab.wait_until_clean(15.0) == []
