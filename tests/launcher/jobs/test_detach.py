"""Jobs that outlive the command, the terminal and the login that started them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from dslaunch.launcher.registry.holder import Process
from tests.exhaustive import few
from tests.launcher.detached_job import (
    Terminal,
    environment,
    job,
    jobs,
    name_of,
    tell,
    wait_for_line,
    wait_for_state,
)
from tests.launcher.local_job import WORKER, Job, Start, poll
from tests.small_disk import small_disk_at

pytestmark = pytest.mark.slow

WAIT = "say('up', rank)\nwait()"


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: Path) -> Iterator[None]:
    """Also if a test fails: a detached job outlives it."""
    yield
    for record in (tmp_path / "state").rglob("job.json"):
        with contextlib.suppress(ProcessLookupError), Process(record.parent) as process:
            process.signal(signal.SIGKILL)


@pytest.fixture
def detach(start: Start, tmp_path: Path) -> Callable[..., Job]:
    """Starts a job with --detach; its records are in tmp_path/state."""

    def started(worker: str, *words: str, **given: Any) -> Job:
        env = {"XDG_STATE_HOME": str(tmp_path / "state"), **given.pop("env", {})}
        return start(worker, "--detach", *words, env=env, **given)

    return started


def test_a_job_that_fails_before_it_has_started_is_an_error_of_the_command(
    detach: Callable[..., Job], tmp_path: Path
) -> None:
    started = detach("", "-H", "nosuch")
    assert started.wait() == 2
    assert started.out == ""
    assert started.err.startswith("dslaunch: nosuch: this hostfile cannot be read")
    assert started.err.count("\n") == 1
    started.assert_nothing_is_left()
    assert jobs(tmp_path) == []


def test_a_folder_that_was_deleted_is_an_error_of_the_command(start_words: Start, tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    shell = 'cd gone; rmdir ../gone; exec "$@"'
    env = {"XDG_STATE_HOME": str(tmp_path / "state")}
    started = start_words("--detach", "/nosuch.py", shell=shell, env=env)
    assert started.wait() == 2
    assert started.err == "dslaunch: the folder you are in was deleted; change to one that exists\n"


def test_a_program_that_is_not_there_is_an_error_of_the_command(start_words: Start, tmp_path: Path) -> None:
    started = start_words("--detach", "nosuch.py", env={"XDG_STATE_HOME": str(tmp_path / "state")})
    assert started.wait() == 2
    assert "no script nosuch.py in" in started.err
    assert started.out == ""
    assert jobs(tmp_path) == []


def test_attach_ends_with_the_exit_code_and_the_words_of_the_job(
    detach: Callable[..., Job], tmp_path: Path
) -> None:
    started = detach(
        """
        say('up', rank)
        while not os.path.exists('go'): time.sleep(0.01)
        sys.stderr.write('bad\\n')
        sys.exit(7)
        """
    )
    name = name_of(started)
    assert name == "train"
    assert "dslaunch: job train runs: `dslaunch logs -f train` shows it" in started.err
    assert "up 0" not in started.out + started.err  # what ranks write is for `logs`
    assert job(tmp_path, name)["state"] == "running"
    wait_for_line(tmp_path, name, "localhost:0 | up 0")
    (tmp_path / "go").touch()
    told = tell(tmp_path, "attach", name)
    assert told.code == 7
    assert told.out == "localhost:0 | up 0\n"
    assert "localhost:0 | bad\n" in told.err
    assert "localhost (local rank 0" in told.err
    assert "exited with code 7; it failed first" in told.err
    found = wait_for_state(tmp_path, name, "ended")
    assert found["exit_code"] == 7
    assert found["verdict"].endswith("exited with code 7")
    assert detach(WAIT, "--name=train-2").wait() == 0
    for command in ("stacks", "stop"):
        assert f"; train-2 runs: dslaunch {command} train-2" in tell(tmp_path, command, name).err


@pytest.mark.parametrize("columns", few([80, 200], lambda columns: columns == 80))
def test_the_journal_is_shown_as_the_console_would_have_shown_it(
    detach: Callable[..., Job], start: Start, tmp_path: Path, columns: int
) -> None:
    """On a terminal: colors, prefixes, line breaks; compared with the same job in the foreground."""
    worker = """
        say('one', '\\x1b[31mred\\x1b[0m', 'x' * 100)
        os.write(2, 'gr\\u00fc\\u00dfe \\udcff|\\n'.encode('utf-8', 'surrogateescape'))
        sys.exit(3)
        """
    name = name_of(detach(worker, "--quiet"))
    wait_for_state(tmp_path, name, "ended")
    shown = Terminal.dslaunch(tmp_path, "logs", name, COLUMNS=str(columns))
    assert shown.wait() == 0
    live = Terminal.dslaunch(tmp_path, "--quiet", "train.py", COLUMNS=str(columns))
    assert live.wait() == 3

    def without_pids(text: str) -> list[str]:
        words = (
            " ".join("N" if word.rstrip("),").isdigit() else word for word in line.split(" "))
            for line in text.splitlines()
        )
        return sorted(" ".join(words).split())

    assert without_pids(shown.read()) == without_pids(live.read())
    assert "\x1b[36mlocalhost:0 |\x1b[0m one \x1b[31mred" in shown.read()


def test_the_options_for_output_are_those_of_the_journal(detach: Callable[..., Job], tmp_path: Path) -> None:
    name = name_of(
        detach(
            "say('same')\nsay('own', rank)", "--num_gpus=3", "--tee=0,2", "--prefix=<{rank}>", "--timestamps"
        )
    )
    wait_for_state(tmp_path, name, "ended")
    lines = tell(tmp_path, "logs", name).out.splitlines()
    assert sorted(line.split(" ", 1)[1] for line in lines) == [
        "<0> own 0",
        "<0> same",
        "<2> own 2",
        "<2> same",
    ]
    assert all(line[4] == "-" and line[10] == "T" for line in lines)
    told = tell(tmp_path, "logs", name, "--rank", "2")
    assert [line.split(" ", 1)[1] for line in told.out.splitlines()] == ["<2> same", "<2> own 2"]
    assert told.err == ""


def test_a_rank_that_the_job_does_not_show_is_refused_by_name(
    detach: Callable[..., Job], tmp_path: Path
) -> None:
    name = name_of(detach(WAIT, "--num_gpus=2", "--tee=0"))
    told = tell(tmp_path, "logs", name, "--rank=0-1")
    assert told.code == 2
    assert "--rank: train does not show what rank 1 writes" in told.err
    assert "start the job with --log_dir to keep it" in told.err
    told = tell(tmp_path, "logs", name, "--rank=2")
    assert (told.code, told.err) == (2, "dslaunch: --rank: there is no rank 2; train has 0 to 1\n")
    told = tell(tmp_path, "logs", name, "--rank=x")
    what = "'x' is not a rank; write ranks and ranges such as 0,4-7, or all, or none"
    assert (told.code, told.err) == (2, f"dslaunch: --rank: {what}\n")
    kept = name_of(detach(WAIT, "--num_gpus=2", "--tee=0", "--log_dir=logs", "--name=kept"))
    told = tell(tmp_path, "logs", kept, "--rank=1")
    assert "attempt_0/rank001.stdout.log" in told.err
    (path,) = [word.rstrip(",") for word in told.err.split() if word.rstrip(",").endswith("stdout.log")]
    poll(lambda: Path(path).read_text() == "up 1\n", path)


def test_stop_ends_a_job_whose_process_stands_still(detach: Callable[..., Job], tmp_path: Path) -> None:
    name = name_of(detach(WAIT))
    os.kill(job(tmp_path, name)["pid"], signal.SIGSTOP)
    assert tell(tmp_path, "stop", name).code == 0
    assert job(tmp_path, name)["exit_code"] == 143


def test_stop_tells_of_a_job_that_takes_long_to_end(detach: Callable[..., Job], tmp_path: Path) -> None:
    name = name_of(
        detach(
            """
            signal.signal(signal.SIGTERM, lambda *_: (time.sleep(2.2), say('saved'), sys.exit(0)))
            say('up')
            wait()
            """
        )
    )
    wait_for_line(tmp_path, name, "up")
    told = tell(tmp_path, "stop", name)
    assert told.code == 0
    assert told.err.startswith("dslaunch: train is stopping, for 2.")
    assert told.err.endswith("dslaunch: train ended with exit code 143\n")
    assert tell(tmp_path, "logs", name).out.splitlines()[-1] == "localhost:0 | saved"
    again = tell(tmp_path, "stop", name)
    assert (again.code, again.err) == (0, "dslaunch: train ended with exit code 143 before\n")


def test_one_who_follows_detaches_by_ctrl_c_and_is_told_when_the_launcher_is_killed(
    detach: Callable[..., Job], tmp_path: Path
) -> None:
    """Without a terminal, in which Ctrl-C would ask."""
    started = detach(WAIT)
    name = name_of(started)

    def attached() -> subprocess.Popen[str]:
        follower = subprocess.Popen(
            [sys.executable, "-m", "dslaunch", "attach", name],
            cwd=tmp_path,
            env=environment(tmp_path),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert follower.stdout is not None
        assert follower.stdout.readline() == "localhost:0 | up 0\n"
        return follower

    first = attached()
    first.send_signal(signal.SIGINT)
    _, err = first.communicate(timeout=20)
    assert first.returncode == 130
    assert "dslaunch: train goes on; `dslaunch attach train." in err
    assert job(tmp_path, name)["state"] == "running"

    second = attached()
    pid = job(tmp_path, name)["pid"]
    os.kill(pid, signal.SIGKILL)
    _, err = second.communicate(timeout=20)
    assert second.returncode == 137
    assert f"train is lost: its dslaunch (pid {pid}) was killed" in err
    assert job(tmp_path, name)["state"] == "lost"
    started.assert_nothing_is_left()


def test_a_hostfile_on_standard_input_is_read_by_a_detached_job(start_words: Start, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WORKER + "say(sys.stdin.read() == '')\nwait()")
    started = start_words(
        *("--detach", "-H", "-", "train.py"),
        shell='printf "localhost slots=2\\n" | "$@"',
        env={"XDG_STATE_HOME": str(tmp_path / "state")},
    )
    name = name_of(started)
    wait_for_line(tmp_path, name, "localhost:1 | True")


def test_stop_now_kills_also_after_a_stop_in_order(detach: Callable[..., Job], tmp_path: Path) -> None:
    started = detach("signal.signal(signal.SIGTERM, lambda *_: say('no'))\nsay('up')\nwait()")
    name = name_of(started)
    wait_for_line(tmp_path, name, "up")
    waiting = subprocess.Popen(
        [sys.executable, "-m", "dslaunch", "stop", name],
        cwd=tmp_path,
        env=environment(tmp_path),
        stderr=subprocess.PIPE,
    )
    wait_for_state(tmp_path, name, "stopping")
    told = tell(tmp_path, "stop", "--now", name)
    assert told.code == 0, told
    _, err = waiting.communicate(timeout=10)
    *before, last = err.decode().splitlines()
    assert (waiting.returncode, last) == (0, "dslaunch: train ended with exit code 143")
    assert all(line.startswith("dslaunch: train is stopping, for ") for line in before), "after two seconds"
    started.assert_nothing_is_left()
    assert wait_for_state(tmp_path, name, "ended")["exit_code"] == 143


def test_stacks_of_a_detached_job_are_shown_by_the_command(
    detach: Callable[..., Job], tmp_path: Path
) -> None:
    name = name_of(detach("def here(): wait()\nsay('up')\nhere()", "--num_gpus=2"))
    wait_for_line(tmp_path, name, "localhost:1 | up")
    told = tell(tmp_path, "stacks")  # the only job that runs
    assert told.code == 0, told
    assert "what 2 ranks do" in told.err
    assert " in here\n" in told.err
    assert "up" not in told.out
    assert job(tmp_path, name)["state"] == "running"


def test_the_terminal_is_closed_and_the_job_goes_on(start: Start, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WORKER + WAIT)
    (tmp_path / "home").mkdir()
    marked = {"DSLAUNCH_TEST_JOB": "terminal"}
    terminal = Terminal(
        tmp_path,
        ["/bin/sh", "-c", f"{sys.executable} -m dslaunch --detach train.py; trap 'echo heard' INT; cat; cat"],
        **marked,
    )
    try:
        terminal.wait_for("job train runs")
        wait_for_line(tmp_path, "train", "up 0")
        terminal.type("\x03")  # for what is in the terminal, and the job is not
        terminal.wait_for("heard")
        terminal.hang_up()
        os.kill(job(tmp_path, "train")["pid"], signal.SIGHUP)
        tell(tmp_path, "stacks", "train")  # by the time this is answered the others have been heard
        assert job(tmp_path, "train")["state"] == "running"
    finally:
        told = tell(tmp_path, "stop", "train")
    assert told.code == 0, told


def test_the_terminal_is_closed_while_the_job_starts(start: Start, tmp_path: Path) -> None:
    """The worker is held up until the command in front is gone."""
    (tmp_path / "train.py").write_text(WORKER + WAIT)
    (tmp_path / "home").mkdir()
    (tmp_path / "wait.sh").write_text("while [ ! -e go ]; do sleep 0.02; done\n")
    terminal = Terminal.dslaunch(tmp_path, "--detach", "--venv_script=wait.sh", "train.py")
    poll(lambda: [one["state"] for one in jobs(tmp_path)] == ["starting"], "the start")
    terminal.hang_up()
    (tmp_path / "go").touch()
    wait_for_line(tmp_path, "train", "up 0")
    assert tell(tmp_path, "stop", "train").code == 0


def test_ctrl_c_while_the_job_starts_ends_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WORKER + WAIT)
    (tmp_path / "home").mkdir()
    (tmp_path / "wait.sh").write_text("while [ ! -e go ]; do sleep 0.02; done\n")
    terminal = Terminal.dslaunch(tmp_path, "--detach", "--venv_script=wait.sh", "train.py")
    poll(lambda: [one["state"] for one in jobs(tmp_path)] == ["starting"], "the start")
    terminal.type("\x03")
    assert terminal.wait() == 130
    assert ": nothing was started" in terminal.read()
    poll(lambda: jobs(tmp_path) == [], "the process behind it to take its record away")


def test_ctrl_c_as_soon_as_the_job_is_seen_ends_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WORKER + WAIT)
    (tmp_path / "home").mkdir()
    (tmp_path / "wait.sh").write_text("while [ ! -e go ]; do sleep 0.02; done\n")
    (tmp_path / "front.py").write_text(
        "import os, signal, time\n"
        "from pathlib import Path\n"
        "from dslaunch.launcher.command_line.main import run\n"
        "from dslaunch.launcher.registry import detached\n"
        "class Replay(detached.Replay):\n"
        "    def __init__(self, *given):\n"
        "        while not [*Path('state').rglob('job.json')]:\n"
        "            time.sleep(0.01)\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        super().__init__(*given)\n"
        "detached.Replay = Replay\n"
        "run()\n"
    )
    words = [sys.executable, "front.py", "--detach", "--venv_script=wait.sh", "train.py"]
    terminal = Terminal(tmp_path, words)
    assert terminal.wait() == 130
    assert ": nothing was started" in terminal.read()
    poll(lambda: jobs(tmp_path) == [], "the process behind it to take its record away")


def test_stop_while_the_hosts_are_looked_at_says_how_the_job_ended(tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    (tmp_path / "train.py").write_text(WORKER + WAIT)
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "torch.py").write_text(
        f"import time\nopen({str(asked)!r}, 'w').close()\ntime.sleep(60)\n"
    )
    path = str(tmp_path / "slow")
    with ThreadPoolExecutor() as threads:
        started = threads.submit(tell, tmp_path, "--detach", "--check", "train.py", PYTHONPATH=path)
        poll(asked.exists, "the question about PyTorch")
        told = tell(tmp_path, "stop", "train")
    assert told.code == 0
    assert "exit code 0" not in told.err
    assert started.result().code == 128 + signal.SIGTERM
    assert "SIGTERM (15): nothing was started" in started.result().err
    assert jobs(tmp_path) == []


def test_attach_asks_at_ctrl_c(detach: Callable[..., Job], tmp_path: Path) -> None:
    started = detach(
        """
        signal.signal(signal.SIGUSR1, lambda *_: say('heard'))
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        say('up')
        wait()
        """
    )
    name = name_of(started)
    terminal = Terminal.dslaunch(tmp_path, "attach", name)
    terminal.wait_for("up")
    terminal.type("\x03")
    terminal.wait_for("d detach, s stop, k kill now, g go on? ")
    terminal.type("what\n")
    terminal.wait_for("go on? ", times=2)
    terminal.type("g\n")
    os.kill(job(tmp_path, name)["pid"], signal.SIGUSR1)
    terminal.wait_for("heard")
    terminal.type("\x03")
    terminal.wait_for("go on? ", times=3)
    terminal.type("d\n")
    assert terminal.wait() == 0
    assert "train goes on" in terminal.read()
    assert job(tmp_path, name)["state"] == "running"

    again = Terminal.dslaunch(tmp_path, "attach", name)
    again.wait_for("heard")
    again.type("\x03")
    again.wait_for("go on? ")
    again.type("\x03")  # the safe answer
    assert again.wait() == 0
    assert job(tmp_path, name)["state"] == "running"

    last = Terminal.dslaunch(tmp_path, "attach", name)
    last.wait_for("heard")
    last.type("\x03")
    last.wait_for("go on? ")
    last.type("s\n")
    last.wait_for("SIGTERM (15): stopping 1 worker")
    last.type("\x03")
    last.wait_for("go on? ", times=2)
    last.type("k\n")
    assert last.wait() == 143
    started.assert_nothing_is_left()


def test_eight_jobs_at_once_are_listed_right(start_words: Start, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WORKER + "time.sleep(0)\nwait()")
    num_jobs = 8
    command = f"{sys.executable} -m dslaunch --quiet --detach train.py"
    shell = f"for i in $(seq {num_jobs}); do {command} & done; wait"
    env = {"XDG_STATE_HOME": str(tmp_path / "state")}
    started = start_words("--version", shell=shell, env=env)
    assert started.wait() == 0
    names = sorted(started.out.split())
    assert names == sorted(["train", *(f"train-{number}" for number in range(2, num_jobs + 1))])
    found = jobs(tmp_path)
    assert sorted(one["name"] for one in found) == names
    assert {one["state"] for one in found} == {"running"}
    assert len({one["pid"] for one in found}) == num_jobs
    table = tell(tmp_path, "jobs").out.splitlines()
    assert len(table) == 1 + num_jobs
    assert all(line.split()[1] == "running" for line in table[1:])


def test_one_name_for_several_is_a_table_with_exact_names(detach: Callable[..., Job], tmp_path: Path) -> None:
    for _ in range(2):
        assert detach(WAIT, "--name=twin").wait() == 0
    first, second = (one["id"] for one in jobs(tmp_path))
    assert first != second
    told = tell(tmp_path, "stop", "twin")
    assert told.code == 2
    lines = told.err.splitlines()
    assert lines[0].split() == ["exact", "name", "state", "started", "host", "pid"]
    assert [line.split()[0] for line in lines[1:3]] == [first, second]
    assert lines[3] == f"dslaunch: 2 jobs are called twin: write the exact name of one, e.g. {second}"
    assert [line.split()[0] for line in tell(tmp_path, "jobs").out.splitlines()[1:]] == [first, second]
    assert tell(tmp_path, "stop", first).code == 0
    assert tell(tmp_path, "stop", "twin").code == 0  # one of them is left


def test_a_job_in_the_foreground_is_listed_asked_and_stopped(start: Start, tmp_path: Path) -> None:
    started = start(WAIT, "--name=here", env={"XDG_STATE_HOME": str(tmp_path / "state")})
    started.wait_for("up 0")
    found = wait_for_state(tmp_path, "here", "running")
    assert (found["pid"], found["is_detached"]) == (started.process.pid, False)
    for command in ("logs", "attach"):
        told = tell(tmp_path, command, "here")
        assert told.code == 2
        assert f"runs in the foreground, and shows its output in {tmp_path}/stdout (pid" in told.err
    told = tell(tmp_path, "stacks", "here")
    assert (told.code, told.err) == (0, "")
    started.wait_for_err("what the one rank does")
    assert tell(tmp_path, "stop", "here").code == 0
    assert started.wait() == 143
    assert jobs(tmp_path) == []


@pytest.mark.parametrize("is_detached", [False, True])
def test_a_third_interrupt_leaves_no_job_that_looks_lost(
    is_detached: bool, start: Start, detach: Callable[..., Job], tmp_path: Path
) -> None:
    begin = detach if is_detached else start
    started = begin(WAIT, "--name=here", env={"XDG_STATE_HOME": str(tmp_path / "state")})
    if is_detached:
        name_of(started)
    else:
        started.wait_for("up 0")
    process = psutil.Process(wait_for_state(tmp_path, "here", "running")["pid"])
    (keeper,) = process.children()
    (agent,) = keeper.children()
    for one in (keeper, agent):  # so that the job cannot end before the third
        one.suspend()
    process.send_signal(signal.SIGINT)
    wait_for_state(tmp_path, "here", "stopping")
    process.send_signal(signal.SIGINT)
    if is_detached:
        poll(lambda: "killing all workers now" in tell(tmp_path, "logs", "here").err, "the second")
    else:
        started.wait_for_err("killing all workers now")
    process.send_signal(signal.SIGINT)
    if is_detached:
        ended = wait_for_state(tmp_path, "here", "ended")
        assert ended["exit_code"] == 130
        assert ended["verdict"].startswith("its dslaunch was told a third time to end")
    else:
        assert started.wait() == 130
        assert jobs(tmp_path) == []
    for one in (agent, keeper):
        one.resume()
    started.assert_nothing_is_left()


def test_a_restarted_job_keeps_one_record(detach: Callable[..., Job], tmp_path: Path) -> None:
    worker = """
        attempt = os.environ['TORCHELASTIC_RESTART_COUNT']
        say('attempt', attempt)
        if attempt == '0': sys.exit(1)
        wait()
        """
    name = name_of(detach(worker, "--max_restarts=2", "--min_uptime=0"))
    wait_for_line(tmp_path, name, "attempt 1")
    found = wait_for_state(tmp_path, name, "running")
    assert found["attempt"] == 1
    assert "running, attempt 2" in tell(tmp_path, "jobs").out
    assert tell(tmp_path, "stop", name).code == 0


def test_nothing_of_a_job_can_be_read_by_others_and_no_value_of_the_environment_is_kept(
    detach: Callable[..., Job], tmp_path: Path
) -> None:
    name_of(detach("say('x')\nwait()", env={"SECRET": "canary-7431"}))
    state = tmp_path / "state"
    for path in (state, *state.rglob("*")):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), (path, oct(mode))
        if path.is_file():
            assert b"canary-7431" not in path.read_bytes()


def test_a_folder_that_others_may_enter_is_refused_with_what_to_do(
    start: Start, detach: Callable[..., Job], tmp_path: Path
) -> None:
    folder = tmp_path / "state" / "dslaunch"
    folder.mkdir(parents=True)
    folder.chmod(0o755)
    started = detach(WAIT)
    assert started.wait() == 2
    refusal = f"{folder} is open to other users (mode 755), and jobs are private; write: chmod 700 {folder}"
    assert started.err == f"dslaunch: {refusal}\n"
    assert tell(tmp_path, "jobs").err == f"dslaunch: {refusal}\n"
    in_front = start("say('ran')", env={"XDG_STATE_HOME": str(tmp_path / "state")})
    assert in_front.wait() == 0  # a job in the foreground is only warned of
    assert f"dslaunch: warning: `dslaunch jobs` will not show this job: {refusal}\n" in in_front.err


@pytest.mark.skipif(os.getuid() != 0, reason="another user can be made by root only")
def test_two_users_do_not_see_each_other(detach: Callable[..., Job], tmp_path: Path) -> None:
    name_of(detach(WAIT))
    for path in (tmp_path, *tmp_path.parents):  # so that it is the records that keep others out
        if not path.stat().st_mode & 0o077:
            path.chmod(0o755)
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    os.chown(theirs, 12345, 12345)

    def as_other(state: Path, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [
                *["setpriv", "--reuid=12345", "--regid=12345", "--clear-groups"],
                sys.executable,
                "-m",
                "dslaunch",
                *words,
            ],
            cwd=theirs,
            env=environment(tmp_path) | {"XDG_STATE_HOME": str(state), "HOME": str(theirs)},
            capture_output=True,
            text=True,
            check=False,
        )

    own = as_other(theirs, "jobs", "--json")
    assert (own.returncode, own.stdout) == (0, "[]\n"), own.stderr
    assert as_other(theirs, "stop", "train").returncode == 2
    foreign = as_other(tmp_path / "state", "jobs")
    assert foreign.returncode == 2
    assert "Permission denied" in foreign.stderr
    assert job(tmp_path, "train")["state"] == "running"


def test_no_pipe_is_held_open_by_a_detached_job(tmp_path: Path) -> None:
    """What reads the output of the command, such as ssh or $(...), ends with the command."""
    (tmp_path / "train.py").write_text(WORKER + WAIT)
    (tmp_path / "home").mkdir()
    shell = f"exec 7>&1; exec {sys.executable} -m dslaunch --detach train.py"
    ended = subprocess.run(
        ["/bin/sh", "-c", shell], cwd=tmp_path, env=environment(tmp_path), capture_output=True, timeout=20
    )
    assert (ended.returncode, ended.stdout) == (0, b"train\n")
    assert tell(tmp_path, "stop", "train").code == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    with small_disk_at(tmp_path / "state", "size=256k,mode=700") as folder:
        yield folder


def test_a_full_disk_costs_output_and_not_the_job(
    small_disk: Path, detach: Callable[..., Job], tmp_path: Path
) -> None:
    worker = """
        for i in range(3000): say('line', i, 'x' * 200)
        open('written', 'w').close()
        while not os.path.exists('go'): time.sleep(0.01)
        say('last')
        """
    name = name_of(detach(worker))
    poll((tmp_path / "written").exists, "all lines written")
    poll(lambda: "No space left on device" in job(tmp_path, name)["problem"], "the problem told")
    assert "not kept" in tell(tmp_path, "jobs").out
    subprocess.run(["mount", "-o", "remount,size=4m", small_disk], check=True)
    (tmp_path / "go").touch()
    found = wait_for_state(tmp_path, name, "ended")
    assert found["exit_code"] == 0
    told = tell(tmp_path, "logs", name)
    assert told.out.splitlines()[-1] == "localhost:0 | last"
    shown = told.out.count("localhost:0 | line ")
    assert shown < 3000  # none, if the first lines came together and were too many for the disk
    lost = [line for line in told.err.splitlines() if "could not be kept here" in line]
    assert sum(int(line.split()[2]) for line in lost) == 3000 - shown
    assert (
        json.loads((small_disk / "dslaunch" / "jobs" / found["id"] / "job.json").read_text())["exit_code"]
        == 0
    )
