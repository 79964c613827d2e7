"""Notes of ranks become the parts of a recovery."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import recovery_run
from benchmarks.recovery_run import Measured, Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = Run.__new__(Run)
    made.folder = tmp_path
    return made


def write(run: Run, process: str, *notes: tuple[str, float, int]) -> None:
    lines = (json.dumps({"what": what, "at": at, "step": step}) for what, at, step in notes)
    (run.folder / f"notes-{process}").write_text("".join(f"{line}\n" for line in lines))


def test_new_workers_are_followed_from_the_fault_to_the_first_step(run: Run) -> None:
    write(
        run, "a-1", ("begun", 0.0, 0), ("step begins", 9.0, 14), ("step", 9.5, 15), ("step begins", 9.9, 15)
    )
    write(run, "b-1", ("begun", 0.0, 0), ("step begins", 9.0, 14), ("step", 9.6, 15))
    for process, later in (("a-2", 0.0), ("b-2", 0.5)):
        moments = [
            (what, at + later, 10) for what, at in (("begun", 12.0), ("imported", 14.0), ("groups", 15.0))
        ]
        steps = [("loaded", 16.0 + later, 10), ("step begins", 16.5, 10), ("step", 17.0, 11)]
        write(run, process, *moments, *steps)
    found = recovery_run._read(run, 10.0)
    assert found == Measured(
        **{"total_s": 7.0, "to_workers_s": 2.5, "import_s": 2.0, "groups_s": 1.0, "load_s": 1.0},
        **{"step_s": 0.5, "steps_again": 5},
    )


def test_a_survivor_goes_on_without_new_workers(run: Run) -> None:
    write(
        run,
        "a-1",
        ("step begins", 9.0, 14),
        ("step", 9.5, 15),
        ("step begins", 9.9, 15),
        ("step begins", 12, 15),
    )
    write(run, "b-1", ("step", 9.5, 15))
    with (run.folder / "notes-a-1").open("a") as file:
        file.write(json.dumps({"what": "step", "at": 13.0, "step": 16}) + "\n" + '{"what": "st')
    assert recovery_run._read(run, 10.0) == Measured(total_s=3.0, steps_again=0)
