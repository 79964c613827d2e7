"""Temporary folders that a killed process leaves are removed by the next one, and no others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from dslaunch.launcher.fit.scratch_folder import MARK, scratch_folder

KILLED = """
import os, signal
from dslaunch.launcher.fit.scratch_folder import scratch_folder
with scratch_folder("plan") as folder:
    (folder / "0").mkdir()
    print(folder, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_only_a_folder_whose_process_is_gone_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", KILLED],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    left = Path(done.stdout.strip())
    assert (done.returncode, left.parent, (left / "0").is_dir()) == (-signal.SIGKILL, tmp_path, True)
    unmarked, open_to_all, other, elsewhere = (
        tmp_path / name for name in ("dslaunch-plan-a", "dslaunch-plan-b", "dslaunch-trial-c", "elsewhere")
    )
    for folder, mode in ((unmarked, 0o700), (open_to_all, 0o755), (other, 0o700), (elsewhere, 0o700)):
        folder.mkdir(mode)
        if folder is not unmarked:
            (folder / MARK).touch()
    link = tmp_path / "dslaunch-plan-d"
    link.symlink_to(elsewhere)
    stay = {unmarked, open_to_all, other, elsewhere, link}
    with scratch_folder("plan") as first:
        assert set(tmp_path.iterdir()) == {first, *stay}  # what was left is gone
        with scratch_folder("plan") as second:
            assert set(tmp_path.iterdir()) == {first, second, *stay}
    assert set(tmp_path.iterdir()) == stay
