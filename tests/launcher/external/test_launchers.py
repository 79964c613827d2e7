"""The table of launchers: what is in it can be asked for, and a row more is all that a new one needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dslaunch.launcher.external.runner import EXTERNAL
from dslaunch.launcher.node.workers.worker_shim import ProcessIdentity
from dslaunch.launcher.options.backend import LAUNCHERS

NEW_ONE = """
import sys
from dslaunch.launcher.command_line.cli import main
from dslaunch.launcher.external.external import External
from dslaunch.launcher.external.runner import EXTERNAL
from dslaunch.launcher.options.backend import LAUNCHERS, Launcher

LAUNCHERS["forks"] = Launcher("forks", program="forks", starts_itself=True)
EXTERNAL["forks"] = External(
    find_program=lambda is_needed: "./forks",
    command=lambda start: ((start.program, str(start.num_ranks), *start.launcher_args, *start.words), None),
    says_who=(("FORKS_RANK",), ("FORKS_SIZE",), (), ()),
    settings=(("FORKS_CALM", "yes"),),
    tells_failures=lambda line: ("rank 1 went wrong", 7) if "went wrong" in line else None,
    how_to_restart="a friend start it again",
)
main()
"""
FORKS = """#!/bin/sh
size=$1 rank=0
shift 2
while [ $rank -lt $size ]; do
    FORKS_RANK=$rank FORKS_SIZE=$size "$@" || echo "rank $rank went wrong" >&2
    rank=$((rank + 1))
done
[ "$FORKS_CALM" = yes ] && ! grep -q . failed
"""
TRAIN = """
import os, sys
rank = os.environ["RANK"]
print(f"rank {rank} of {os.environ['WORLD_SIZE']}", flush=True)
if sys.argv[-1] == rank:
    open("failed", "w").write(rank)
    sys.exit(5)
"""


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """With a launcher more than there are."""
    for name, text in (("new_one.py", NEW_ONE), ("forks", FORKS), ("train.py", TRAIN)):
        (folder / name).write_text(text)
    (folder / "forks").chmod(0o755)
    (folder / "failed").touch()
    argv = [sys.executable, "new_one.py", "--launcher=forks", "--launcher_args=-", "--num_gpus=3", *words]
    return subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def test_each_launcher_that_starts_the_processes_has_a_row_that_says_how() -> None:
    assert EXTERNAL.keys() == {name for name, one in LAUNCHERS.items() if one.starts_itself}
    for name, external in EXTERNAL.items():
        assert LAUNCHERS[name].program in external.find_program(False)
        assert len(external.says_who) == len(ProcessIdentity._fields)


@pytest.mark.slow
def test_a_launcher_with_a_row_runs_a_job(tmp_path: Path) -> None:
    done = run(tmp_path, "train.py")
    assert (done.returncode, done.stdout) == (0, "rank 0 of 3\nrank 1 of 3\nrank 2 of 3\n"), done.stderr


@pytest.mark.slow
def test_what_its_row_says_of_failures_counts(tmp_path: Path) -> None:
    done = run(tmp_path, "train.py", "1")
    assert done.returncode == 7
    assert "forks: rank 1 went wrong; it failed first, and ./forks ended with exit code 1" in done.stderr


@pytest.mark.slow
def test_what_its_row_says_of_restarts_is_said(tmp_path: Path) -> None:
    done = run(tmp_path, "--max_restarts=1", "train.py")
    assert done.returncode == 2
    assert "and let a friend start it again, or use --launcher=ssh" in done.stderr
