"""`python -m dslaunch.runtime.numerics`: its exit code where it has nothing to compare."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def _started(folder: Path) -> subprocess.Popen[str]:
    request = json.dumps({"folder": str(folder), "reference": "plain"})
    command = [sys.executable, "-m", "dslaunch.runtime.numerics", request]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def _first_file(folder: Path) -> Path:
    """Return the file that is read first."""
    place = folder / "configured" / "engine0"
    place.mkdir(parents=True)
    return place / "step0.rank0.json"


def test_ctrl_c_in_a_comparison_shows_no_traceback(tmp_path: Path) -> None:
    pipe = _first_file(tmp_path)
    os.mkfifo(pipe)
    with _started(tmp_path) as process, open(pipe, "w"):  # which waits for the reader
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()
    assert process.returncode == -signal.SIGINT


def test_a_damaged_recording_is_an_error_and_no_difference(tmp_path: Path) -> None:
    _first_file(tmp_path).write_text("")
    with _started(tmp_path) as process:
        assert process.stderr is not None
        said = process.stderr.read()
    assert (process.returncode, "dslaunch: numerics: " in said) == (2, True), said
