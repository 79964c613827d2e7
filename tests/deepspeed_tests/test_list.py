"""The list of DeepSpeed's tests, its page, and what is said of a run.

`python -m tests.deepspeed_tests.test_list` writes the page anew.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.deepspeed_tests.__main__ import read_list

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference-deepspeed-tests.md"
HEAD = """\
# DeepSpeed's own tests against the drop-in package

DeepSpeed's unit tests are a yardstick for programs that were written for it. Those that use public names only (class A), or
public names and deep paths that programs import (class B), run against `import deepspeed` of dslaunch:

    make test-deepspeed TESTS=~/DeepSpeed/tests
    make test-deepspeed TESTS=~/DeepSpeed/tests ONLY="lr_schedulers comm"

`TESTS` is the folder `tests/` of a clone of DeepSpeed, which is not a part of this project. The files run one after the other, each in a
process of its own, from a copy: in a clone their conftest.py would find the clone's package `deepspeed`. Each file gets a
line: passed/failed/refused/skipped here, and passed/failed/skipped under DeepSpeed 0.19.8. *Refused* is a test that ends with
one of dslaunch's errors that name what is not there. A failure of another kind is in the list of differences below, or is printed
with its message, and the exit code is 1.

pytest: DeepSpeed's harness uses names that pytest has from 7.2 on, and the run is refused by an older one. It is made for versions up to
8.3: with later ones, as this project has, pytest does not take its class DistributedFixture for a fixture, and the tests
that ask for one end with "fixture not found".

## The files

| file in tests/unit | class | DeepSpeed 0.19.8 on CPUs: passed/failed/skipped | why not all |
|---|---|---|---|
"""
DIFFERENCES = """
## Known differences

| test | why it fails here |
|---|---|
"""
CONFTEST = "from deepspeed.moe.layer import MoE\nfrom deepspeed.pipe import PipelineModule\n"
TEST_DATA = """
import deepspeed
import pytest

def test_passes():
    assert deepspeed.__version__.endswith("dslaunch")

def test_skips():
    pytest.skip("no")

def test_refused():
    deepspeed.init_inference(None)

def test_fails():
    assert 1 == 2

def test_passes_too():
    pass
"""


def page() -> str:
    files, differences = read_list()
    rows = [f"| {one.path} | {one.kind} | {one.theirs} | {one.note} |\n" for one in files]
    return "".join(
        [HEAD, *rows, DIFFERENCES, *(f"| {name} | {why} |\n" for name, why in differences.items())]
    )


def test_the_page_is_the_list() -> None:
    assert PAGE.read_text() == page()


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.deepspeed_tests", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.slow
def test_a_run_counts_what_passes_fails_is_refused_and_does_not_collect(tmp_path: Path) -> None:
    for name, text in {
        "runtime/test_data": TEST_DATA,
        "comm/test_dist": "import no_such_package_of_anyone",
    }.items():
        file = tmp_path / "unit" / f"{name}.py"
        file.parent.mkdir(parents=True)
        file.write_text(text)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    done = run(tmp_path, "test_data", "test_dist")
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert next(line for line in lines if line.startswith("runtime/test_data ")).split()[1:] == [
        "A",
        "2/1/1/1",
        "5/0/0",
    ]
    assert "    unit.runtime.test_data::test_fails: assert 1 == 2" in lines
    dist = next(line for line in lines if line.startswith("comm/test_dist "))
    assert "does not collect: ModuleNotFoundError: No module named 'no_such_package_of_anyone'" in dist
    assert lines[-1] == "2 passed in 2 files, 2 of them with something to explain"


def test_a_folder_without_deepspeed_s_tests_is_named(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert (done.returncode, done.stderr) == (
        2,
        f"{tmp_path}: has no folder `unit`; give the folder tests/ of a clone of DeepSpeed: make test-deepspeed TESTS=folder\n",
    )


if __name__ == "__main__":
    PAGE.write_text(page())
