"""The end of an attempt that was traced: what is said while its file is made."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest

from dslaunch.launcher.job.trace_ranks import with_trace
from dslaunch.launcher.job.verdict import Verdict
from dslaunch.launcher.options.trace import TraceOptions
from dslaunch.launcher.output import console as console_module
from dslaunch.launcher.output.console import Console
from dslaunch.launcher.sync.trace_files import TraceFiles
from dslaunch.launcher.trace import merge
from dslaunch.launcher.trace.write import write_trace
from tests.launcher.memory_host import plan_of
from tests.launcher.trace.made_up import span, write_rank

OPTIONS = TraceOptions(bounds=(1, 1))


@pytest.fixture
def files() -> Iterator[TraceFiles]:
    """Of three hosts, n0 to n2, whose first ranks made one step."""
    made = TraceFiles()
    for number in range(3):
        folder = Path(made.folder, f"n{number}")
        folder.mkdir()
        write_rank(folder, 2 * number, [(1, 0, 100, [span("forward", "forward", 0, 1)])], torch=[])
        made.clock_of(f"n{number}").add(sent_at=0.0, at=0.0, heard_at=0.0)
    yield made
    made.forget()


def test_it_is_said_how_far_it_is(files: TraceFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PROGRESS_AFTER_S", "PROGRESS_EVERY_S", "PROGRESS_GROWTH"):
        monkeypatch.setattr(console_module, name, 0.0)
    monkeypatch.setattr(merge, "_TOLD_EACH", 5)
    plan = plan_of(3)
    plan = plan._replace(nodes=with_trace(plan.nodes, OPTIONS))
    err = io.BytesIO()
    console = Console(log_level="info", out=io.BytesIO(), err=err)
    verdict = Verdict(None, (), None, (("started", 1.0),))
    assert write_trace(OPTIONS, plan, files, console, verdict, path=str(tmp_path / "trace.json"))
    assert console.drain(10)
    said = [line for line in err.getvalue().decode().split("\n") if "--trace: " in line]
    assert said[:4] == [
        "dslaunch: --trace: 0 of 3 ranks read (0 s)",
        "dslaunch: --trace: 1 of 3 ranks read (0 s)",
        "dslaunch: --trace: 2 of 3 ranks read (0 s)",
        "dslaunch: --trace: 5 events written (0 s)",
    ]
