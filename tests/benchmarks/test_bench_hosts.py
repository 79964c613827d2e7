"""The launch benchmark runs: every tool that is there and starts soon, real hosts, tables and picture."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.launch_peers import curve_tools
from tests.conftest import LAB_NAME

BENCH = Path(__file__).resolve().parents[2] / "benchmarks" / "bench_hosts.py"
TIMEOUT_S = 900  # half a minute on idle cores
HEAVY = ("deepspeed", "torchrun")  # two minutes more; `make bench-launch` measures them


@pytest.mark.slow
@pytest.mark.exhaustive  # no promise of the package: that `make bench-launch` still runs
@pytest.mark.usefixtures("lab")  # skipped where it is; the benchmark makes one of its own
@pytest.mark.timeout(TIMEOUT_S)
def test_a_quick_run_measures_every_tool_that_is_installed_and_asked_for(tmp_path: Path) -> None:
    words = ["--quick", "--out", str(tmp_path), "--lab", f"{LAB_NAME}-bench"]
    words += [f"--without={name}" for name in HEAVY]
    ran = subprocess.run([sys.executable, BENCH, *words], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    found = json.loads((tmp_path / "launch.json").read_text())
    assert found["counts"] == [2]
    tools = [tool for tool in curve_tools() if tool.name.split()[0] not in HEAVY]
    installed = [tool.name for tool in tools if not tool.why_missing]
    assert [*found["curve"]] == installed
    for name in installed:
        assert all(seconds and seconds > 0 for seconds in found["curve"][name]), name
    left_out = [tool.name for tool in curve_tools() if tool.why_missing or tool not in tools]
    assert [line.partition(":")[0] for line in found["missing"]] == left_out
    without = {*HEAVY, *(name.split()[0] for name in left_out)}
    for target in found["targets"]:
        assert target["ours"] > 0, target
        assert target["theirs"] or target["peer"].split()[0] in without, target
    assert (tmp_path / "launch.md").read_text() in ran.stdout
    assert (tmp_path / "launch.png").read_bytes().startswith(b"\x89PNG")
