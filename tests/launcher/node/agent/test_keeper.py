"""The keeper leaves nothing behind, whenever a signal comes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

STRUCK = """
import os
from dslaunch.launcher.node.agent import keeper
from dslaunch.launcher.node.system.private_folder import PrivateFolder

class Struck(PrivateFolder):
    def __init__(self):
        super().__init__()
        os.kill(os.getpid(), {number})

keeper.PrivateFolder = Struck
keeper.main()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=str)
def test_a_signal_before_there_is_an_agent_leaves_no_folder(number: signal.Signals, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STRUCK.format(number=int(number))],
        stdin=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert list(tmp_path.iterdir()) == [], done
