"""A limit of open files that is too small for the hosts is told before anything is connected."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import resource, sys
from dslaunch.launcher.backends.open_files import ensure_open_files
soft, hard, num_hosts = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
ensure_open_files(num_hosts)
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("limits", "num_hosts", "after"),
    [((64, 256), 4, "64 256"), ((64, 256), 32, "112 256"), ((256, 256), 32, "256 256")],
)
def test_the_limit_is_raised_where_that_is_needed_and_allowed(
    limits: tuple[int, int], num_hosts: int, after: str
) -> None:
    words = [sys.executable, "-c", PROGRAM, *map(str, limits), str(num_hosts)]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip() == after


def test_a_job_on_this_machine_speaks_of_no_hosts() -> None:
    words = [sys.executable, "-c", PROGRAM, "40", "40", "0"]
    run = subprocess.run(words, capture_output=True, text=True, check=False)
    assert run.stderr.splitlines()[-1].endswith(
        "LaunchError: dslaunch itself takes about 48 open files, and this process may have 40; raise its "
        "limit (ulimit -n 48)"
    )


def test_a_job_that_may_open_too_few_files_says_how_many_it_takes(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("node[1-32] slots=1\n")
    (tmp_path / "config").write_text("")
    job = subprocess.run(
        [sys.executable, "-m", "dslaunch", "-H", "hosts", "--ssh_config", "config", "train.py"],
        cwd=tmp_path,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert job.returncode == 2, job.stderr
    assert job.stderr == (
        "dslaunch: 32 hosts take about 112 open files, and this process may have 64; raise its limit (ulimit "
        "-n 112), or reach most hosts through others with --tree_above\n"
    )
