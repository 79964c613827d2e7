"""`--time-limit` of the tests: what has not begun by then is skipped, and said to be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import END_ENV

TESTS = f"""
import os, time

def test_first():
    assert 0 < float(os.environ["{END_ENV}"]) - time.time() <= 1000
    os.environ["{END_ENV}"] = "1"  # as if it had taken long

def test_second():
    pass
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "end", "reason"),
    [
        (["--time-limit", "1000"], "1 passed, 1 skipped", "not begun within 1000 s"),
        (["--time-limit", "1000", "-n", "1"], "1 passed, 1 skipped", "not begun within 1000 s"),
    ],
)
def test_after_the_limit_no_test_begins(tmp_path: Path, options: list[str], end: str, reason: str) -> None:
    """The processes of `pytest -n` have the end of the first."""
    (tmp_path / "test_two.py").write_text(TESTS)
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    environ.pop(END_ENV, None)  # of the run that this is a test of
    given = ["-p", "tests.conftest", "-p", "no:cacheprovider", "-q", "-rs", "-o", "timeout=60", *options]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *given, "test_two.py"],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1].startswith(end), done.stdout
    assert reason in done.stdout
