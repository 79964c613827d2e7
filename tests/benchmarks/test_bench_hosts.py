"""The launch benchmark runs: every tool that is there, real hosts, tables and picture."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.launch_peers import curve_tools
from tests.conftest import LAB_NAME

BENCH = Path(__file__).with_name("bench_hosts.py")
TIMEOUT_S = 900  # two minutes on idle cores


@pytest.mark.slow
@pytest.mark.usefixtures("lab")  # skipped where it is; the benchmark makes one of its own
@pytest.mark.timeout(TIMEOUT_S)
def test_a_quick_run_measures_every_tool_that_is_installed(tmp_path: Path) -> None:
    words = ["--quick", "--out", str(tmp_path), "--lab", f"{LAB_NAME}-bench"]
    ran = subprocess.run([sys.executable, BENCH, *words], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    found = json.loads((tmp_path / "launch.json").read_text())
    assert found["counts"] == [2]
    installed = [tool.name for tool in curve_tools() if not tool.why_missing]
    assert [*found["curve"]] == installed
    for name in installed:
        assert all(seconds and seconds > 0 for seconds in found["curve"][name]), name
    missing = [tool.name for tool in curve_tools() if tool.why_missing]
    assert [line.partition(":")[0] for line in found["missing"]] == missing
    for target in found["targets"]:
        assert target["ours"] > 0, target
        assert target["theirs"] or missing, target
    assert (tmp_path / "launch.md").read_text() in ran.stdout
    assert (tmp_path / "launch.png").read_bytes().startswith(b"\x89PNG")
