"""What is asked of a machine with a GPU, and what becomes of a step that fails."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.bench_cuda_kernels import FIRST_USE
from tests.fake_cuda.build import can_be_built

from . import __main__ as plan_runner
from .__main__ import ROOT, describe_machine, main, run, write
from .bundle import python_of
from .plan import PARTS, PLAN, Step

PART_S = 600  # a call on such a machine takes no more
FIRST_S = 260  # the shortest loan of such a machine, its start and the transfers aside
LONG_S = 20


@pytest.mark.parametrize("part", PARTS)
def test_a_part_takes_less_than_ten_minutes_and_its_programs_exist(part: str) -> None:
    steps = [step for step in PLAN if step.part == part]
    assert 0 < sum(step.limit_s for step in steps) < (FIRST_S if part == "first" else PART_S)
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


def test_what_is_known_is_written_after_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine may be gone before the last step ends."""
    (tmp_path / "first_of_two.py").write_text('print(\'{"name": "rate", "GB/s": 3}\')')
    steps = [
        Step("works", name, "what it is", LONG_S, (f"{name}_of_two",), small=())
        for name in ("first", "second")
    ]
    out = tmp_path / "out"

    def run_or_end(step: Step, environ: dict[str, str], **more: Any) -> dict[str, Any]:
        if step.name == "second":
            raise KeyboardInterrupt
        return run(step, {**environ, "PYTHONPATH": str(tmp_path)}, **more)

    monkeypatch.setattr(plan_runner, "PLAN", steps)
    monkeypatch.setattr(plan_runner, "run", run_or_end)
    monkeypatch.setattr(plan_runner, "describe_machine", lambda environ: {"machine": "vm"})
    monkeypatch.setenv("OUT", str(out))
    monkeypatch.setattr("sys.argv", ["gpu", "works", "--fake"])
    with pytest.raises(KeyboardInterrupt):
        main()
    assert "| rate | GB/s 3 |" in (out / "results-works.md").read_text()
    assert len(json.loads((out / "results-works.json").read_text())["results"]) == 1


@pytest.mark.slow
def test_a_wheel_that_does_not_load_is_told_and_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "dslaunch.py").write_text("raise ImportError('libcudart.so.13: no such file')")
    found = describe_machine({**os.environ, "PYTHONPATH": str(tmp_path)})
    assert found["dslaunch and the GPU"] == "cannot be used here"
    assert found["machine"]


def test_a_shim_is_not_taken_for_a_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    for folder, text in (("shim", "exit 127"), ("real", f'exec {sys.executable} "$@"')):
        (tmp_path / folder).mkdir()
        program = tmp_path / folder / f"python{version}"
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'shim'}:{tmp_path / 'real'}:/usr/bin:/bin")
    assert python_of(version) == str(tmp_path / "real" / f"python{version}")
    assert python_of("3.1") is None


def test_the_first_use_of_the_kernels_is_measured_by_a_program_that_has_all_it_names() -> None:
    """It runs on a GPU alone."""
    tree = ast.parse(FIRST_USE)
    known = {
        one.asname or one.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for one in node.names
    }
    known |= {
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    used = {
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    assert used <= known | {"print"}


@pytest.mark.parametrize(("cuda", "is_built"), [("None", True), ("'13.0'", False)])
def test_there_is_no_fake_device_beside_a_torch_for_true_ones(
    tmp_path: Path, cuda: str, is_built: bool
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text(f"__version__ = '2.11.0'\ncuda: Optional[str] = {cuda}\n")
    why_not = can_be_built(tmp_path)
    assert (why_not is None) == is_built
    assert is_built or "this torch is built for CUDA 13.0" in str(why_not)
