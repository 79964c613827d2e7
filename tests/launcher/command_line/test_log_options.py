"""The options on what becomes of the ranks' output: how they are read,
and whole jobs with them on this machine.
"""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dslaunch.launcher.command_line.cli import dslaunch
from dslaunch.launcher.errors import LaunchError
from dslaunch.launcher.options.logs import LogOptions
from dslaunch.launcher.options.option import given_in, read, refuse
from tests.launcher.local_job import AT_ONCE_S, Job, Start, assert_short, poll

PIPE_AS_DISK = f'python=$1; shift 3; exec "$python" {(Path(__file__).parents[1] / "pipe_as_disk.py")} "$@"'


def read_words(*words: str) -> LogOptions:
    return read(LogOptions, dslaunch.make_context("dslaunch", [*words, "train.py"]).params)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", LogOptions()),
        ("--log_dir d", LogOptions(log_dir="d")),
        ("--tee 0,2-3", LogOptions(ranks=(range(0, 1), range(2, 4)))),
        ("--ranks 1", LogOptions(ranks=(range(1, 2),))),
        ("--tee none", LogOptions(ranks=())),
        ("--prefix=", LogOptions(prefix="")),
        ("--prefix {rank}>", LogOptions(prefix="{rank}>")),
        ("--timestamps --fold", LogOptions(has_timestamps=True, is_folding=True)),
        ("--fold --prefix=", LogOptions(is_folding=True, prefix="")),
        ("--enable_each_rank_log d", LogOptions(each_rank_dir="d")),
        ("--enable_each_rank_log=None", LogOptions()),
        ("--enable_each_rank_log d --tee 0 --fold",
         LogOptions(each_rank_dir="d", ranks=(range(1),), is_folding=True)),
    ],
)  # fmt: skip
def test_the_options_and_what_they_mean(words: str, expected: LogOptions) -> None:
    assert read_words(*words.split()) == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--fold --prefix x",
            "--fold and --prefix exclude each other: a folded line has a prefix of its own; ",
        ),
        (
            "--tee none --fold",
            "--fold has no effect, because no rank is shown; leave it out, or show some with --tee",
        ),
        ("--tee none --prefix=", "--prefix has no effect, because no rank is shown"),
        ("--enable_each_rank_log d --timestamps", "--timestamps has no effect, because no rank is shown"),
    ],
)
def test_an_option_without_effect_is_refused(words: str, message: str) -> None:
    with pytest.raises(LaunchError, match="^" + re.escape(message)):
        read_words(*words.split())


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (LogOptions(), [0, 1, 2, 3]),
        (LogOptions(log_dir="d"), [0, 1, 2, 3]),
        (LogOptions(log_dir="d", ranks=()), []),
        (LogOptions(ranks=(range(1, 3),)), [1, 2]),
        (LogOptions(each_rank_dir="d"), []),
        (LogOptions(each_rank_dir="d", ranks=(range(1),)), [0]),
    ],
)
def test_which_ranks_are_shown(options: LogOptions, shown: list[int]) -> None:
    assert [rank for rank in range(4) if options.shows(rank)] == shown


def test_ranks_that_the_job_does_not_have_are_refused() -> None:
    read_words("--tee=0,2-3").check(4)
    read_words("--tee=all").check(4)
    with pytest.raises(LaunchError, match=r"^--tee: there is no rank 4; this job has ranks 0 to 3$"):
        read_words("--tee=0,2-4").check(4)


def test_a_launcher_that_prints_by_itself_takes_none_of_them() -> None:
    refuse(given_in(LogOptions()), "this")
    for words in (
        "--log_dir d",
        "--tee 0",
        "--prefix=",
        "--timestamps",
        "--fold",
        "--fold_failures no",
        "--enable_each_rank_log d",
    ):
        with pytest.raises(
            LaunchError, match=rf"^{re.split('[ =]', words)[0]} has no effect with this; leave it out$"
        ):
            refuse(given_in(read_words(*words.split())), "this")


# Whole jobs.

NUM_LINES = 2000


def run_folder(job: Job) -> Path:
    return (job.folder / "logs" / "latest").resolve(strict=True)


WRITE = f"""
for number in range({NUM_LINES}):
    for stream in (1, 2):
        size = 70_000 if number in (7, 1900) else number % 50
        line = b'%d %d %d ' % (rank, stream, number) + b'x\\xff\\xc3\\xa9'[:1 + number % 4] * size + b'\\n'
        os.write(stream, line)
        with open(f'wrote{{rank}}.{{stream}}', 'ab') as file: file.write(line)
"""


@pytest.mark.slow
def test_files_equal_what_the_workers_wrote_byte_for_byte(start: Start, tmp_path: Path) -> None:
    job = start(WRITE, "--num_gpus=4", "--log_dir=logs")
    assert job.wait() == 0
    folder = run_folder(job)
    for rank in range(4):
        for stream, name, shown in ((1, "stdout", tmp_path / "stdout"), (2, "stderr", tmp_path / "stderr")):
            wrote = (tmp_path / f"wrote{rank}.{stream}").read_bytes()
            assert (folder / f"attempt_0/rank{rank:03}.{name}.log").read_bytes() == wrote
            prefix = b"localhost:%d | " % rank
            lines = [line for line in shown.read_bytes().split(b"\n") if line.startswith(prefix)]
            assert b"".join(line.removeprefix(prefix) + b"\n" for line in lines) == wrote
    assert json.loads((folder / "report.json").read_text())["exit_code"] == 0
    assert sorted(one.name for one in folder.iterdir()) == ["attempt_0", "events.jsonl", "report.json"]


@pytest.mark.slow
def test_what_is_shown_can_be_chosen_and_the_files_have_all(start: Start) -> None:
    job = start("say('out of', rank)", "--num_gpus=3", "--log_dir=logs", "--tee=0,2", "--report=end.json")
    assert job.wait() == 0
    assert sorted(job.out.splitlines()) == ["localhost:0 | out of 0", "localhost:2 | out of 2"]
    folder = run_folder(job)
    assert (folder / "attempt_0/rank001.stdout.log").read_text() == "out of 1\n"
    assert (folder / "report.json").read_bytes() == (job.folder / "end.json").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [["--ranks=0"], ["--tee=none", "--log_dir=logs"], ["--enable_each_rank_log=logs"]]
)
def test_the_last_lines_of_who_failed_first_are_told_though_it_is_not_shown(
    words: list[str], start: Start
) -> None:
    job = start("if rank == 1: raise ValueError('the reason')\nwait()", "--num_gpus=2", *words)
    assert job.wait() == 1
    assert job.out == ""
    assert "localhost:1 |" not in job.err
    assert "    ValueError: the reason\n" in job.err


@pytest.mark.slow
def test_one_file_for_each_rank_and_nothing_on_the_console_as_with_deepspeed(start: Start) -> None:
    job = start("say('out'); sys.stderr.write('err\\n')", "--num_gpus=2", "--enable_each_rank_log=new/logs")
    assert job.wait() == 0
    assert job.out == ""
    assert "err" not in job.err
    files = sorted((job.folder / "new/logs").iterdir())
    assert [re.sub(r"^20\d{12}_", "", one.name) for one in files] == ["rank0.log", "rank1.log"]
    assert [sorted(one.read_text().splitlines()) for one in files] == [["err", "out"]] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--enable_each_rank_log=train.py"], "--enable_each_rank_log: train.py is a file; give a folder"),
        (["--log_dir=train.py/logs"], "--log_dir: cannot make train.py/logs: Not a directory; "),
        (["--tee=0-1"], "--tee: there is no rank 1; this job has ranks 0 to 0"),
        (
            ["--prefix={hots}"],
            "--prefix: there is no field {hots}; the fields are {host} {rank}",
        ),
    ],
)
def test_a_mistake_is_one_line_and_nothing_starts(words: list[str], message: str, start: Start) -> None:
    job = start("open('started', 'w')", *words)
    assert job.wait() == 2
    assert job.err.startswith(f"dslaunch: {message}")
    assert job.err.count("\n") == 1
    assert not (job.folder / "started").exists()


@pytest.mark.slow
def test_a_dry_run_makes_no_folder(start: Start) -> None:
    job = start("", "--dry_run", "--log_dir=logs")
    assert job.wait() == 0
    assert not (job.folder / "logs").exists()


@pytest.mark.slow
def test_prefixes_and_times(start: Start) -> None:
    job = start(
        "say('out'); sys.stderr.write('err\\n')",
        "--num_gpus=2",
        "--prefix=[{host} {node_rank}.{local_rank} {rank:02} {stream}]",
        "--timestamps",
    )
    assert job.wait() == 0
    time_of_day = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}"
    for rank in range(2):
        assert re.search(rf"^{time_of_day} \[localhost 0\.{rank} 0{rank} stdout\] out$", job.out, re.M)
        assert re.search(rf"^{time_of_day} \[localhost 0\.{rank} 0{rank} stderr\] err$", job.err, re.M)
    began = time.strptime(job.out[:19], "%Y-%m-%dT%H:%M:%S")
    assert abs(time.time() - time.mktime(began)) < 60


@pytest.mark.slow
def test_lines_that_several_ranks_write_are_shown_once(start: Start) -> None:
    job = start(
        """
        import pathlib
        for number in range(10):  # on a busy machine not all of them are folded
            pathlib.Path(f'here{rank}.{number}').touch()
            while not all(os.path.exists(f'here{one}.{number}') for one in range(4)): time.sleep(0.001)
            if rank < 3: say('the same')
        say('of', rank)
        """,
        "--num_gpus=4",
        "--fold",
    )
    assert job.wait() == 0
    lines = job.out.splitlines()
    assert "localhost:0-2 | the same" in lines
    assert {f"localhost:{rank} | of {rank}" for rank in range(4)} < set(lines)


@pytest.mark.slow
def test_nothing_is_lost_when_lines_are_folded(start: Start) -> None:
    job = start(
        f"for number in range({NUM_LINES}): say(number if number % 3 else 'the same')\n"
        "sys.exit(5 * (rank == 3))",
        "--num_gpus=4",
        "--fold",
    )
    assert job.wait() == 5
    written: dict[int, list[str]] = {rank: [] for rank in range(4)}
    for line in job.out.splitlines():
        who, _, text = line.partition(" | ")
        for part in who.removeprefix("localhost:").split(","):
            first, _, last = part.partition("-")
            for rank in range(int(first), int(last or first) + 1):
                written[rank].append(text)
    expected = [str(number) if number % 3 else "the same" for number in range(NUM_LINES)]
    assert written[3] == expected
    for rank in range(3):  # stopped, perhaps before the end
        assert written[rank] == expected[: len(written[rank])]


@pytest.mark.slow
def test_a_failure_does_not_wait_for_lines_that_may_be_folded(start: Start) -> None:
    """The worker's words stand in front of the verdict."""
    job = start("print('my last words', file=sys.stderr); sys.exit(3)", "--fold")
    assert job.wait() == 3
    assert job.err.index("localhost:0 | my last words") < job.err.index("it failed first")


@pytest.mark.slow
def test_a_log_file_that_cannot_be_written_ends_the_job_with_one_line(start: Start) -> None:
    """A limit on the size of files stands for a full disk: the same error comes from the same call."""
    job = start(
        "while True: say('x' * 1000)",
        "--num_gpus=2",
        "--log_dir=logs",
        "--tee=none",
        shell='ulimit -f 100; exec "$@"',
    )
    assert job.wait() == 2
    (line,) = [line for line in job.err.splitlines() if "cannot write" in line and "stopping" not in line]
    assert re.fullmatch(
        r"dslaunch: cannot write to logs/[-\d]+/attempt_0/rank00[01].stdout.log: File too large; "
        "free some space, or give --log_dir another folder",
        line,
    )
    job.assert_nothing_is_left()


@pytest.mark.slow
def test_output_that_cannot_be_written_is_a_failure_though_all_ranks_ended_well(start: Start) -> None:
    job = start("say('hello')", shell='exec "$@" >/dev/full')
    assert job.wait() == 2
    assert job.err.splitlines()[-1].startswith("dslaunch: cannot write to stdout: No space left on device")


@pytest.mark.slow
def test_a_slow_disk_slows_the_workers_and_loses_nothing(start: Start, tmp_path: Path) -> None:
    """The log file is a pipe that is not read for a while."""
    num_lines = 5000
    (tmp_path / "logs").mkdir()
    job = start(
        f"""
        progress = os.open('progress', os.O_CREAT | os.O_WRONLY)
        while not os.path.exists('go'): time.sleep(0.001)
        for number in range({num_lines}):
            os.write(1, b'%06d ' % number + b'x' * 2000 + b'\\n')
            os.pwrite(progress, b'%06d' % number, 0)
        """,
        "--log_dir=logs",
        "--tee=none",
        shell=PIPE_AS_DISK,
    )
    poll((tmp_path / "progress").exists, "the start of the worker")
    path = run_folder(job) / "attempt_0" / "rank000.stdout.log"
    path.unlink()
    os.mkfifo(path)
    read = os.open(path, os.O_RDWR)  # so that opening does not wait
    (tmp_path / "go").touch()
    last, since = "", time.monotonic()
    while time.monotonic() - since < 1.0:
        now = (tmp_path / "progress").read_text()
        last, since = (last, since) if now == last else (now, time.monotonic())
    assert 0 < int(last) < num_lines - 1
    received = bytearray()
    while received.count(b"\n") < num_lines:
        received += os.read(read, 1 << 16)
    assert job.wait() == 0
    os.close(read)
    assert received == b"".join(b"%06d " % number + b"x" * 2000 + b"\n" for number in range(num_lines))


def unread(job: Job) -> int:
    """Put a pipe that is not read in the place of rank 0's log file; returns its reading end."""
    poll(lambda: (job.folder / "logs" / "latest").exists() and (job.folder / "ready").exists(), "the worker")
    path = run_folder(job) / "attempt_0" / "rank000.stdout.log"
    path.unlink()
    os.mkfifo(path)
    return os.open(path, os.O_RDWR)  # so that opening does not wait


FLOOD = """
os.set_blocking(1, False)
failed_at = None
open('ready', 'w').close()
while not os.path.exists('go'): time.sleep(0.001)
while True:
    try:
        os.write(1, b'x' * 4095 + b'\\n')
        failed_at = None
    except BlockingIOError:
        failed_at = failed_at or time.monotonic()
        if time.monotonic() - failed_at > 0.5: open('full', 'w').close()
        time.sleep(0.001)
"""


@pytest.mark.slow
def test_a_second_interrupt_gives_up_a_disk_that_does_not_answer(start: Start, tmp_path: Path) -> None:
    job = start(FLOOD, "--log_dir=logs", "--tee=none", shell=PIPE_AS_DISK)
    read = unread(job)
    (tmp_path / "go").touch()
    poll((tmp_path / "full").exists, "a pipe that stays full")
    job.signal(signal.SIGINT)
    job.wait_for_err("stopping 1 worker")
    job.signal(signal.SIGINT)
    assert job.wait(AT_ONCE_S) == 130
    assert_short(job)
    os.close(read)


@pytest.mark.slow
def test_an_interrupt_ends_a_job_whose_output_nobody_takes(start: Start, tmp_path: Path) -> None:
    """The worker's end can only be told when a reader takes what it wrote before."""
    read, write = os.pipe()
    job = start(FLOOD, stdout=write)
    os.close(write)
    (tmp_path / "go").touch()
    poll((tmp_path / "full").exists, "a pipe that stays full")
    job.signal(signal.SIGINT)
    assert job.wait(AT_ONCE_S) == 130
    assert_short(job)
    os.close(read)


@pytest.mark.slow
def test_a_job_is_not_over_before_its_files_are_written(start: Start, tmp_path: Path) -> None:
    job = start(
        """
        open('ready', 'w').close()
        while not os.path.exists('go'): time.sleep(0.001)
        for _ in range(200): say('x' * 1000)
        """,
        "--log_dir=logs",
        shell=PIPE_AS_DISK,
    )
    read = unread(job)
    (tmp_path / "go").touch()
    job.wait_for_err("writing what is left of the log files; Ctrl-C gives that up")
    assert len(job.lines(0)) == 200
    job.signal(signal.SIGINT)
    assert job.wait(AT_ONCE_S) == 130
    assert_short(job)
    os.close(read)


@pytest.mark.slow
def test_each_attempt_has_its_files(start: Start) -> None:
    job = start(
        "say('attempt', os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': sys.exit(1)",
        "--max_restarts=1",
        "--min_uptime=0",
        "--log_dir=logs",
    )
    assert job.wait() == 0
    folder = run_folder(job)
    assert [(folder / f"attempt_{n}/rank000.stdout.log").read_text() for n in (0, 1)] == [
        "attempt 0\n",
        "attempt 1\n",
    ]


# On a terminal.


class Screen:
    """A terminal that a job writes to, and all that it got."""

    def __init__(self) -> None:
        self.master, self.slave = pty.openpty()
        self.data = b""

    def read_until(self, is_there: Callable[[bytes], object], what: str) -> None:
        deadline = time.monotonic() + 30
        while not is_there(self.data):
            assert time.monotonic() < deadline, f"waited for {what} in {self.data!r}"
            if select.select([self.master], [], [], 0.05)[0]:
                self.data += os.read(self.master, 1 << 16)

    def left(self) -> bytes:
        """What stays there: without the lines that were erased."""
        return re.sub(rb"[^\n]*\r\x1b\[K", b"", self.data)

    def close(self) -> None:
        os.close(self.master)
        os.close(self.slave)


def preparing(start: Start, folder: Path, screen: Screen, venv_script: str) -> Job:
    """A job with its stderr on this screen, whose line shows that it waits for this script."""
    (folder / "venv.sh").write_text(f"{venv_script}\n")
    to_screen = f'exec "$@" 2>{os.ttyname(screen.slave)}'
    job = start("", "--venv_script=venv.sh", shell=to_screen, env={"NO_COLOR": "1"})
    screen.read_until(lambda data: b"host prepared" in data, "the line")
    return job


@pytest.mark.slow
def test_the_start_is_one_line_that_vanishes(start: Start, tmp_path: Path) -> None:
    screen = Screen()
    (tmp_path / "venv.sh").write_text("while [ ! -e go ]; do sleep 0.01; done\n")
    job = start(
        "say('hello')",
        "--num_gpus=2",
        "--venv_script=venv.sh",
        shell=f'exec "$@" >{os.ttyname(screen.slave)} 2>&1',
        env={"NO_COLOR": "1"},
    )
    line = b"\r\x1b[Kdslaunch: 0 of 1 host prepared, waiting for localhost ("
    screen.read_until(lambda data: data.count(line) >= 2, "two states of the line")
    assert b"\n" not in screen.data
    (tmp_path / "go").touch()
    screen.read_until(lambda data: data.count(b"hello\r\n") == 2, "the workers' words")
    assert job.wait() == 0
    left = screen.left()
    assert b"prepared" not in left
    assert b"\x1b" not in left
    assert {b"localhost:0 | hello", b"localhost:1 | hello"} < set(left.split(b"\r\n"))
    screen.close()


@pytest.mark.slow
def test_a_failure_at_the_start_erases_the_line(start: Start, tmp_path: Path) -> None:
    screen = Screen()
    job = preparing(start, tmp_path, screen, "while [ ! -e go ]; do sleep 0.01; done; exit 4")
    (tmp_path / "go").touch()
    screen.read_until(lambda data: data.endswith(b"stderr\r\n"), "the reason")
    assert job.wait() == 3
    left = screen.left()
    assert left.decode().split("\r\n") == [  # 80 columns
        "dslaunch: localhost: --venv_script=venv.sh ended with 4: it wrote nothing to",
        "    stderr",
        "",
    ]
    screen.close()


@pytest.mark.slow
def test_an_interrupt_at_the_start_erases_the_line(start: Start, tmp_path: Path) -> None:
    screen = Screen()
    job = preparing(start, tmp_path, screen, "while :; do sleep 0.01; done")
    job.signal(signal.SIGINT)
    last = b"\r\x1b[Kdslaunch: SIGINT (2): nothing was started\r\n"
    screen.read_until(lambda data: data.endswith(last), "the last line, in the place of the one before")
    assert job.wait() == 130
    screen.close()


@pytest.mark.slow
def test_in_a_pipe_there_are_no_codes(start: Start, tmp_path: Path) -> None:
    (tmp_path / "venv.sh").write_text("sleep 2.3\n")
    job = start("say('hello')", "--venv_script=venv.sh")
    assert job.wait() == 0
    assert "dslaunch: 0 of 1 host prepared, waiting for localhost (2 s)\n" in job.err
    assert "\x1b" not in job.err
