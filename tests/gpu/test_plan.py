"""What is asked of a machine with a GPU, and what becomes of a step that fails."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest

from .__main__ import ROOT, run, write
from .plan import PARTS, PLAN, Step

PART_S = 600  # a call on such a machine takes no more
LONG_S = 20


@pytest.mark.parametrize("part", PARTS)
def test_a_part_takes_less_than_ten_minutes_and_its_programs_exist(part: str) -> None:
    steps = [step for step in PLAN if step.part == part]
    assert 0 < sum(step.limit_s for step in steps) < PART_S
    assert len({step.name for step in steps}) == len(steps)
    for step in steps:
        assert importlib.util.find_spec(step.argv[0]) is not None
        for word in step.argv[1:]:
            assert not word.endswith(".py") or (ROOT / word).is_file(), word


def test_every_step_belongs_to_a_part() -> None:
    assert {step.part for step in PLAN} == set(PARTS)


def result_of(tmp_path: Path, source: str, *, is_fake: bool = False, **more: Any) -> dict[str, Any]:
    """Of a step that runs this program."""
    (tmp_path / "program_of_a_step.py").write_text(source)
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    step = Step(
        "works", "one, of a test", "what it is", **{"limit_s": LONG_S, **more}, argv=("program_of_a_step",)
    )
    return run(step, environ, is_fake=is_fake, out=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "is_ok", "status"),
    [
        ('print(\'{"name": "x", "right": true}\')', True, 0),
        ('print(\'{"name": "x", "right": false}\')', False, 0),
        ('print(\'{"name": "x", "error": "no such device"}\')', False, 0),
        ("raise SystemExit(3)", False, 3),
    ],
)
def test_a_step_is_right_if_it_ends_well_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str, is_ok: bool, status: int
) -> None:
    found = result_of(tmp_path, source)
    assert (found["ok"], found["status"]) == (is_ok, status)
    assert ("FAILED" in capsys.readouterr().out) == (not is_ok)


@pytest.mark.slow
def test_a_step_without_an_end_is_ended(tmp_path: Path) -> None:
    found = result_of(tmp_path, "import signal\nsignal.pause()", limit_s=1)
    assert (found["ok"], found["status"]) == (False, "no end after 1 s")


@pytest.mark.slow
def test_what_the_fake_device_cannot_answer_is_left_out_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = result_of(tmp_path, "raise SystemExit(3)", is_fake=True, only_real="it has no such units")
    assert capsys.readouterr().out == "works: one, of a test: left out: it has no such units\n"
    write(tmp_path, {"machine": "vm"}, [found], name="works")
    assert (
        "| works | one, of a test | what it is | left out: it has no such units | 0.0 |"
        in (tmp_path / "results-works.md").read_text()
    )
    assert json.loads((tmp_path / "results-works.json").read_text())["results"] == [found]


@pytest.mark.slow
def test_on_the_fake_device_a_step_is_small_and_has_more_time(tmp_path: Path) -> None:
    source = "import json, sys\nprint(json.dumps({'name': 'x', 'given': sys.argv[1:]}))"
    found = result_of(tmp_path, source, is_fake=True)
    assert found["lines"] == [{"name": "x", "given": ["--small"]}]
    assert result_of(tmp_path, source)["lines"] == [{"name": "x", "given": []}]
