"""What nothing catches of mistakes of users: a program ends by one line, a session of Python goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MISTAKE = """\
from dslaunch.runtime.errors import ConfigError, show_user_errors_in_one_line
show_user_errors_in_one_line()
raise ConfigError("lr=-1: must be above 0")
"""


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [(["-"], 2, ""), (["-i", "-q"], 0, "still here\n"), (["-m", "code", "-q"], 0, "still here\n")],
)
def test_a_mistake_is_one_line_and_leaves_a_session_alive(words: list[str], code: int, said: str) -> None:
    done = subprocess.run(
        [sys.executable, *words],
        input=f"{MISTAKE}\nprint('still here')\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code
    assert done.stdout.replace(">>> ", "").strip("\n") == said.strip("\n")
    lines = done.stderr.replace(">>> ", "").splitlines()
    assert [line for line in lines if "lr=" in line] == ["dslaunch: lr=-1: must be above 0"]
    assert "Traceback" not in done.stderr


def test_a_script_before_a_session_leaves_it_alive() -> None:
    done = subprocess.run(
        [sys.executable, "-i", "-q", "-c", MISTAKE],
        input="print('still here')\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "still here\n")
    assert "dslaunch: lr=-1: must be above 0" in done.stderr
    assert "Traceback" not in done.stderr


ENDS = """\
import atexit, gc, sys
atexit.register(lambda: print("collected" if gc.get_freeze_count() == 0 else "left"))
from dslaunch.runtime.errors import show_user_errors_in_one_line
show_user_errors_in_one_line()
class Keeper:
    def __init__(self):
        self.own, self.file = self, open(sys.argv[1], "w")
        self.file.write("all of it")
keeper = Keeper()
"""


@pytest.mark.parametrize(("end", "code", "garbage"), [("1 / 0", 1, "left"), ("sys.exit(3)", 3, "collected")])
def test_after_an_error_no_garbage_is_searched_for_and_files_are_written_all_the_same(
    tmp_path: Path, end: str, code: int, garbage: str
) -> None:
    file = tmp_path / "written"
    done = subprocess.run(
        [sys.executable, "-c", ENDS + end, str(file)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (code, f"{garbage}\n"), done.stderr
    assert file.read_text() == "all of it"
