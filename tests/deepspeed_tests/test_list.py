"""The list of DeepSpeed's tests, its page, and what is said of a run.

`python -m tests.deepspeed_tests.test_list` writes the page anew.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.deepspeed_tests.__main__ import NOT_COLLECTED, Listed, Result, is_explained, read_list

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "deepspeed-tests.md"
HEAD = """\
# DeepSpeed's own tests against the drop-in package

DeepSpeed's unit tests are a yardstick for programs that were written for it. Those that use public names only
(class A), public names and deep paths that programs import (class B), or names of its inside while they check
what programs rely on (class C) run against `import deepspeed` of dslaunch:

    make test-deepspeed TESTS=~/DeepSpeed/tests
    make test-deepspeed TESTS=~/DeepSpeed/tests ONLY="lr_schedulers comm"

`TESTS` is the folder `tests/` of a clone of DeepSpeed, which is not a part of this project. The files run one
after the other, each in a process of its own, from a copy: in a clone their conftest.py would find the
clone's package `deepspeed`. Each file gets a line: passed/failed/refused/skipped, the same as this page has
it, and passed/failed/skipped under DeepSpeed 0.19.8.
*Refused* is a test that ends with one of dslaunch's errors that name what is not there; each of these
messages is printed once. A failure of another kind is in the list of differences below, or is printed with
its message, and the exit code is 1.

pytest: the run needs a version from 7.2 to 8.3, for which DeepSpeed's harness is made, or from 9.1 on, as
this project has. The versions between do not take the harness's class DistributedFixture for a fixture, and
do not let a plugin say that it is one.

## The files

The number of tests in a file depends on the age of the clone: with a few files it is not the same in the two
columns of figures.

| file in tests/unit | class | DeepSpeed 0.19.8 on CPUs: passed/failed/skipped | here: passed/failed/refused/skipped | why not all |
|---|---|---|---|---|
"""  # noqa: E501 - the head of the table
LEFT_OUT = """
## Files that are left out

What asks for a GPU or another package whatever its tests are about, what is not in dslaunch as a whole, and
what tests only how DeepSpeed is built inside. A file that this page does not name is printed as *not in the
list*, and the exit code is 1: DeepSpeed has added it since.

| files in tests/unit | why |
|---|---|
"""
DIFFERENCES = """
## Known differences

| test | why it fails here |
|---|---|
"""
CONFTEST = """
import pytest
from deepspeed.moe.layer import MoE
from deepspeed.pipe import PipelineModule

@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef, request):
    if getattr(fixturedef.func, "is_dist_fixture", False):
        fixturedef.func()(request)
"""
TEST_DATA = """
import deepspeed
import pytest
import torch.multiprocessing

def test_passes():
    assert deepspeed.__version__.endswith("dslaunch")

def test_skips():
    pytest.skip("no")

def test_refused():
    deepspeed.DeepSpeedHybridEngine(None)

def test_fails():
    assert 1 == 2

def raises_nothing(rank):
    with pytest.raises(NotImplementedError):
        pass

def test_a_rank_fails():
    with torch.multiprocessing.Pool(1) as pool:
        pool.starmap_async(raises_nothing, [(0,)]).get(60)

class writes_a_file:
    is_dist_fixture = True

    def __call__(self, request):
        request.getfixturevalue("tmp_path").joinpath("written").touch()

def test_asks_for_a_class_that_is_a_fixture(writes_a_file, tmp_path):
    assert tmp_path.joinpath("written").exists()
"""
TEST_DIST = """
import pytest

def test_passes():
    pass

def test_hangs():
    pytest.exit("Test hanged, exiting", returncode=1)

def test_never_begins():
    pass
"""


def page() -> str:
    files, differences, left_out = read_list()
    rows = [f"| {one.path} | {one.kind} | {one.theirs} | {one.here} | {one.note} |\n" for one in files]
    left, differing = (
        [f"| {name} | {why} |\n" for name, why in notes.items()] for notes in (left_out, differences)
    )
    return "".join([HEAD, *rows, LEFT_OUT, *left, DIFFERENCES, *differing])


def test_the_page_is_the_list() -> None:
    assert PAGE.read_text() == page()


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.deepspeed_tests", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_run_counts_what_passes_fails_is_refused_stops_early_and_does_not_collect(tmp_path: Path) -> None:
    for name, text in {
        "runtime/test_data": TEST_DATA,
        "comm/test_dist": TEST_DIST,
        "utils/test_get_optim_files": "import no_such_package_of_anyone",
    }.items():
        file = tmp_path / "unit" / f"{name}.py"
        file.parent.mkdir(parents=True)
        file.write_text(text)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    done = run(tmp_path, "runtime/test_data", "test_dist", "test_get_optim_files")
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    data, dist, files = (
        next(line for line in lines if line.startswith(name))
        for name in ("runtime/test_data ", "comm/test_dist ", "utils/test_get_optim_files ")
    )
    assert data.split()[1:3] == ["A", "2/2/1/1"]
    assert data.split()[-1] == "5/0/0"
    assert "    unit.runtime.test_data::test_fails: assert 1 == 2" in lines
    assert any(line.startswith("    refused 1: ") and "DeepSpeedHybridEngine" in line for line in lines), (
        lines
    )
    assert "1/0/0/0 stopped: Test hanged, exiting" in dist
    assert (
        "    unit.runtime.test_data::test_a_rank_fails: AssertionError: DID NOT RAISE NotImplementedError"
        in lines
    )
    assert "does not collect: ModuleNotFoundError: No module named 'no_such_package_of_anyone'" in files
    assert lines[-1] == ("3 passed in 3 files, 3 of them with something to explain; 0 files not in the list")


@pytest.mark.slow
def test_files_that_the_list_leaves_out_or_does_not_name_are_told(tmp_path: Path) -> None:
    for name in ("runtime/test_data", "runtime/test_of_tomorrow", "inference/v2/test_of_yesterday"):
        file = tmp_path / "unit" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("def test_passes(): pass")
    (tmp_path / "harness.py").touch()  # instead of the one that imports torch
    done = run(tmp_path)
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "runtime/test_of_tomorrow not in the list" in lines
    assert any(line.startswith("inference/v2/* 1 left out: ") for line in lines), lines
    assert lines[-1] == "1 passed in 1 files, 0 of them with something to explain; 1 files not in the list"
    assert done.returncode == 1
    (tmp_path / "unit" / "runtime" / "test_of_tomorrow.py").unlink()
    assert run(tmp_path, "runtime/test_data").returncode == 0


@pytest.mark.parametrize(
    ("here", "result", "expected"),
    [
        ("5/0/0/0", Result(passed=5), True),
        ("5/0/0/0", Result(passed=4, refusals=("x is not in dslaunch",)), True),
        ("5/0/0/0", Result(passed=4, failed=1), True),  # the test is in the list of differences
        ("5/0/0/0", Result(passed=4, failed=1, unexpected=("test_x: 1 == 2",)), False),
        ("5/0/0/0", Result(trouble=f"{NOT_COLLECTED}: no module x"), False),
        (NOT_COLLECTED, Result(trouble=f"{NOT_COLLECTED}: no module x"), True),
        (NOT_COLLECTED, Result(trouble="not done within 900 s"), False),
    ],
)
def test_what_a_run_has_to_explain(here: str, result: Result, expected: bool) -> None:
    assert is_explained(Listed("runtime/test_data", "A", "5/0/0", here), result) is expected


def test_a_folder_without_deepspeed_s_tests_is_named(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert (done.returncode, done.stderr) == (
        2,
        (
            f"{tmp_path}: has no folder `unit`; give the folder tests/ of a clone of DeepSpeed: make "
            "test-deepspeed TESTS=folder\n"
        ),
    )


if __name__ == "__main__":
    PAGE.write_text(page())
