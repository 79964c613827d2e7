"""`dslaunch report` on real jobs: one that failed, has begun again and still runs."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.launcher.detached_job import tell
from tests.launcher.local_job import Start, poll
from tests.launcher.made_events import Made, write_events

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


def test_a_job_that_has_begun_again_and_runs_has_a_page(start: Start, tmp_path: Path) -> None:
    job = start(
        TELL
        + textwrap.dedent("""
        is_first = os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'
        for step in range(1, 5):
            tell(step=step, steps=1, loss=1.0 / step, step_s=0.1, forward_s=0.05, comm_s=0.01)
            time.sleep(0.1)
        if rank == 1 and is_first:
            raise RuntimeError('<b>the disk</b> is full')
        if not is_first:
            open(f'again-{rank}', 'w').close()
            wait()
        wait()
        """),
        *("--detach", "--name", "mine", "--num_gpus", "2", "--metrics_interval", "0.1"),
        *("--max_restarts", "1", "--min_uptime", "0"),
        env={"XDG_STATE_HOME": str(tmp_path / "state")},
    )
    assert job.wait() == 0, job.err
    poll(lambda: all((tmp_path / f"again-{rank}").exists() for rank in range(2)), "the second attempt")
    try:
        told = tell(tmp_path, "report", "mine", timeout_s=PAGE_S)
    finally:
        tell(tmp_path, "stop", "mine", "--now")
    assert told.code == 0, told
    (path,) = tmp_path.glob("mine*.html")
    assert re.fullmatch(rf"dslaunch: wrote {path.name} \(1\.\d MiB\)\n", told.err), told
    assert path.stat().st_mode & 0o077 == 0
    page = path.read_text()
    assert "RuntimeError: &lt;b&gt;the disk&lt;/b&gt; is full" in page
    assert "<b>the disk" not in page
    assert ">running</span>" in page
    for key in ("curve-loss", "phases-by-rank", "time-line", "host-cpu"):
        assert f'data-key="{key}"' in page


def test_without_the_library_of_charts_one_line_says_what_to_install(tmp_path: Path) -> None:
    write_events(tmp_path / "events.jsonl", Made(num_hosts=1, slots=1, duration_s=8.0))
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
