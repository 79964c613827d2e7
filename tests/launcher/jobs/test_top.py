"""`dslaunch top` and `--watch` on real jobs, in a real terminal."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dslaunch.launcher.registry.holder import Process
from tests.launcher.detached_job import Terminal, job, tell, wait_for_state
from tests.launcher.local_job import poll

pytestmark = pytest.mark.slow

# Tells numbers as docs/design/events.md says, until the file `go` is there.
TRAIN = """
import json, os, sys, time
rank, step, fd = int(os.environ["RANK"]), 0, -1
print("hello from", rank, flush=True)
while fd < 0:
    try:
        fd = os.open(os.environ["DSLAUNCH_METRICS_PIPE"], os.O_WRONLY | os.O_NONBLOCK)
    except OSError:  # its reader is not there yet
        time.sleep(0.01)
while not os.path.exists("go"):
    step += 1
    comm = 0.01 if rank else 0.06
    row = {"step": step, "steps": 1, "step_s": 0.1, "forward_s": 0.09 - comm, "comm_s": comm, "loss": 7.5}
    os.write(fd, f"{rank} {json.dumps(row)}\\n".encode())
    time.sleep(0.1)
sys.exit(int(os.environ["END"]) if rank else 0)
"""
IN_ALTERNATE = "\x1b[?1049h"
LEFT_ALTERNATE = "\x1b[?1049l"
SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
COLORS = re.compile(r"\x1b\[[0-9;]*\b(3[0-7]|4[0-7]|[34]8;)")


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    for record in (tmp_path / "state").rglob("job.json"):
        with contextlib.suppress(ProcessLookupError), Process(record.parent) as process:
            process.signal(signal.SIGKILL)


@pytest.fixture
def terminal(tmp_path: Path) -> Callable[..., Screen]:
    """A command of dslaunch in a terminal of 80 x 24."""
    (tmp_path / "train.py").write_text(TRAIN)

    def made(*words: str, **env: str) -> Screen:
        return Screen(
            tmp_path,
            [sys.executable, "-m", "dslaunch", *words],
            **{"COLUMNS": "80", "LINES": "24", "TERM": "xterm-256color", "END": "0", **env},
        )

    return made


class Screen(Terminal):
    """Knows what the terminal was like before."""

    def __init__(self, folder: Path, words: list[str], **env: str) -> None:
        super().__init__(folder, words, **env)
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self._kept = os.dup(self._fd)
        self._before = termios.tcgetattr(self._fd)

    def assert_clean(self) -> None:
        """The screen was left, the cursor is there, lines are read and echoed as before."""
        text = self.read()
        assert text.rfind(LEFT_ALTERNATE) > text.rfind(IN_ALTERNATE) >= 0
        assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l")
        assert termios.tcgetattr(self._kept) == self._before
        os.close(self._kept)


def test_a_watched_job_ends_the_screen_with_its_verdict(
    terminal: Callable[..., Screen], tmp_path: Path
) -> None:
    screen = terminal("--watch", "--num_gpus=2", "train.py", END="5")
    screen.wait_for("steps/s")
    assert COLORS.search(screen.read())
    screen.type("q")
    screen.wait_for("train runs. What now?")
    screen.type("g")
    once = tell(tmp_path, "top")
    assert once.code == 0, once
    assert re.search(r"^step \d+   9\.\d+ steps/s|^step \d+   10 steps/s", once.out, re.MULTILINE), once
    assert re.search(r"^    1 localhost training .* 0\.1\d\ds f", once.out, re.MULTILINE), once
    assert "\x1b" not in once.out
    (tmp_path / "go").touch()
    assert screen.wait() == 5
    screen.assert_clean()
    last = " ".join(SEQUENCE.sub("", screen.read().rpartition(LEFT_ALTERNATE)[2]).split())
    assert "localhost:0 | hello from 0" in last
    assert "dslaunch: train ended with exit code 5: rank 1 on localhost" in last
    assert "Traceback" not in screen.read()


def test_a_watched_job_goes_on_when_one_leaves_it(terminal: Callable[..., Screen], tmp_path: Path) -> None:
    screen = terminal("--watch", "--num_gpus=1", "train.py")
    screen.wait_for("steps/s")
    screen.type("\x03")
    screen.wait_for("What now?")
    screen.type("d")
    assert screen.wait() == 0
    screen.assert_clean()
    assert screen.read().rstrip().endswith("train")
    assert job(tmp_path, "train")["state"] == "running"
    for number in (signal.SIGTERM, signal.SIGHUP):
        screen = terminal("top", NO_COLOR="1")
        screen.wait_for("help")
        os.kill(screen.pid, number)
        assert screen.wait() == 128 + number
        screen.assert_clean()
        assert not COLORS.search(screen.read())
    screen = terminal("top", "train")
    screen.wait_for("help")
    screen.type("x")
    screen.wait_for("Stop train?")
    screen.type("y")
    wait_for_state(tmp_path, "train", "ended")
    screen.wait_for("ended")
    screen.type("q")
    assert screen.wait() == 0


@pytest.mark.exhaustive
def test_a_terminal_that_is_closed_ends_the_screen_and_not_the_job(
    terminal: Callable[..., Screen], tmp_path: Path
) -> None:
    screen = terminal("--watch", "--num_gpus=1", "train.py")
    screen.wait_for("steps/s")
    os.close(screen._kept)
    screen.hang_up()
    assert job(tmp_path, "train")["state"] == "running"


def test_a_job_in_the_foreground_is_watched_from_another_terminal(
    terminal: Callable[..., Screen], tmp_path: Path
) -> None:
    one = terminal("--num_gpus=1", "train.py")
    one.wait_for("hello from 0")
    poll(lambda: "training" in tell(tmp_path, "top").out, "numbers came")
    screen = terminal("top")
    screen.wait_for("training")
    screen.type("l")
    screen.wait_for("runs in the foreground, and shows its output in /dev/pts/")
    (tmp_path / "go").touch()
    assert one.wait() == 0
    screen.wait_for("ended with exit code 0")
    screen.type("q")
    assert screen.wait() == 0
    screen.assert_clean()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("top",), "dslaunch: no job runs here; dslaunch top JOB takes one that has ended, too\n"),
        (("top", "nosuch"), "dslaunch: no job 'nosuch' is known here; see `dslaunch jobs`\n"),
        (
            ("--watch", "train.py"),
            "dslaunch: --watch cannot show the job: standard output is no terminal; leave it out, or start "
            "the job with --detach\n",
        ),
        (
            ("--watch", "--detach", "train.py"),
            "dslaunch: --watch and --detach exclude each other: one shows the job until it ends, and the "
            "other returns when it runs; leave out one of them\n",
        ),
        (
            ("--watch", "--no_ssh", "-H", "a,b", "train.py"),
            "dslaunch: --watch cannot show a job with --no_ssh, of which each part knows its own node only; "
            "leave it out\n",
        ),
        (
            ("--watch", "--launcher=slurm", "train.py"),
            "dslaunch: --watch cannot show a job with --launcher=slurm, which starts the ranks itself and "
            "tells nothing of them; leave it out\n",
        ),
    ],
)
def test_what_cannot_be_watched_is_said(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    told = tell(tmp_path, *words)
    assert (told.code, told.out, told.err) == (2, "", said)


def test_without_textual_there_is_one_error_and_a_frame(
    terminal: Callable[..., Screen], tmp_path: Path
) -> None:
    """A package that is not installed, as `find_spec` sees it."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['textual'] = None\n")
    screen = terminal("--watch", "--num_gpus=1", "train.py", PYTHONPATH=str(tmp_path))
    assert screen.wait() == 2
    assert re.sub(r"\s+", " ", screen.read()).strip() == (
        "dslaunch: --watch draws with the package textual, which is not installed here; install it: "
        "pip install '.[watch]' in a clone of dslaunch, or start the job with --detach"
    )


def test_the_launcher_imports_no_textual(tmp_path: Path) -> None:
    """Nor does a frame as text."""
    (tmp_path / "look.py").write_text(
        "import json, sys\n"
        "from dslaunch.launcher.command_line import cli, top, watch\n"
        "from dslaunch.launcher.run import run_job\n"
        "print(json.dumps([one for one in ('textual', 'rich', 'torch') if one in sys.modules]))\n"
    )
    done = subprocess.run(
        [sys.executable, "look.py"], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert json.loads(done.stdout) == []
