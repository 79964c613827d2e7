"""`dslaunch report` on real jobs: one that trains, one that fails and begins again, one that still runs."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.launcher.detached_job import tell
from tests.launcher.local_job import Start
from tests.launcher.page.made_events import MadeRun, as_lines

pytestmark = pytest.mark.slow

PAGE_S = 120.0  # to make a page, on a machine where much else runs

TELL = """
import json
def tell(**numbers):
    while True:
        try:
            fd = os.open(os.environ['DSLAUNCH_METRICS_PIPE'], os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # it is not there yet, or is not read yet
            time.sleep(0.01)
            continue
        os.write(fd, f'{rank} {json.dumps(numbers)}\\n'.encode())
        os.close(fd)
        return
"""


def test_a_job_that_fails_and_begins_again_has_a_page(start: Start, tmp_path: Path) -> None:
    job = start(
        TELL
        + textwrap.dedent("""
        for step in range(1, 5):
            tell(step=step, steps=1, loss=1.0 / step, step_s=0.1, forward_s=0.05, comm_s=0.01)
            time.sleep(0.1)
        if rank == 1 and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':
            raise RuntimeError('<b>the disk</b> is full')
        """),
        *("--num_gpus", "2", "--log_dir", "logs", "--metrics_interval", "0.1"),
        *("--max_restarts", "1", "--min_uptime", "0"),
    )
    assert job.wait() == 0
    told = tell(tmp_path, "report", "logs", "-o", "first.html", timeout_s=PAGE_S)
    assert told.code == 0, told
    assert re.fullmatch(r"dslaunch: wrote first\.html \(1\.\d MiB\)\n", told.err), told
    page = (tmp_path / "first.html").read_text()
    assert "RuntimeError: &lt;b&gt;the disk&lt;/b&gt; is full" in page
    assert "<b>the disk" not in page
    assert "ended well" in page
    for key in ("curve-loss", "phases-by-rank", "time-line", "host-cpu"):
        assert f'data-key="{key}"' in page
    assert (tmp_path / "first.html").stat().st_mode & 0o077 == 0
    (tmp_path / "mine.html").write_text("<html>")
    told = tell(tmp_path, "report", "logs", "-o", "mine.html", timeout_s=PAGE_S)
    assert told.code == 2
    assert "mine.html is there already, and is no page of dslaunch report" in told.err
    assert (tmp_path / "mine.html").read_text() == "<html>"
    told = tell(tmp_path, "report", "logs", "-o", "", timeout_s=PAGE_S)
    assert (told.code, "give the name of one, or leave it out" in told.err) == (2, True)


def test_a_job_is_found_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(600)\n")
    told = tell(tmp_path, "--detach", "--num_gpus", "1", "--name", "mine", "train.py")
    assert told.code == 0, told
    try:
        told = tell(tmp_path, "report", "mine", timeout_s=PAGE_S)
        assert told.code == 0, told
        (page,) = tmp_path.glob("mine*.html")
        assert ">running</span>" in page.read_text()
    finally:
        tell(tmp_path, "stop", "mine", "--now")


def test_without_the_library_of_charts_one_line_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_bytes(as_lines(MadeRun(num_hosts=1, per_host=1, num_steps=8).events()))
    program = (
        "import sys; sys.modules['bokeh'] = None; from dslaunch.launcher.command_line.cli import main; "
        "main(['report', 'events.jsonl'])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 2
    assert ended.stderr == (
        'dslaunch: dslaunch report needs the package bokeh; install it: pip install ".[report]" in a clone '
        "of dslaunch\n"
    )
    assert list(tmp_path.glob("*.html")) == []
