"""DeepSpeed's own unit tests with `import deepspeed` of dslaunch, beside what DeepSpeed does with them.

    make test-deepspeed TESTS=folder [ONLY=words]
    python -m tests.deepspeed_tests folder [words ...]

`folder` holds DeepSpeed's `tests/` (it has a folder `unit` in it); it is not a part of this project and
nothing is written to it. The files of files.txt, or those with one of the words in their path, run one after
the other, each in a process of its own, from a copy: their conftest.py puts the folder above itself first on
the module path, which in a clone is another `deepspeed`.

A failure that ends with one of dslaunch's refusals by name counts as refused, and each refusal is printed
once with its number of tests. Files that files.txt leaves out are counted by its reasons, and each file that
it does not name is printed as not in the list. The exit code is 1 if there is one, if a file does not collect
or stops early, or if a test fails that is neither refused nor listed in files.txt as different.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks.launch_peers import DEEPSPEED_FOLDER, DEEPSPEED_NEEDS
from dslaunch import drop_in

HERE = Path(__file__).parent
FILES = HERE / "files.txt"
PYTEST = (7, 2)  # their harness uses names of _pytest that are there from 7.2 on
PYTEST_WITHOUT_CLASS_FIXTURES = (8, 4)  # from here on DistributedFixture is no fixture to pytest by itself,
PYTEST_REGISTER_FIXTURE = (9, 1)  # and from here on harness.py can say that it is one
NOT_RAISED = "DID NOT RAISE"  # names the error that a test expects, which may be one of the refusals
NOT_COLLECTED = "does not collect"
STOPPED = "_pytest.outcomes.Exit: "  # the harness ends the whole run when one test hangs
FILE_LIMIT_S = 900.0
REFUSALS = (
    "is not in dslaunch",
    "is not available in dslaunch",
    "of dslaunch has no attribute",
    "ConfigError",
    "NotImplementedError",
    "dslaunch does not",
    "which DeepSpeed has, is not here",
)


class Listed(NamedTuple):
    """A file of DeepSpeed's, what its own package does with it, what dslaunch did when the list was last
    written, and why not all of it passes.
    """

    path: str
    kind: str
    theirs: str
    here: str
    note: str = ""


class Result(NamedTuple):
    """What became of one file. `unexpected`: tests that fail without a refusal, and are not in the list of
    differences. `refusals`: the message of each refused test. `trouble`: why not all of its tests have
    run, "" if they have.
    """

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    unexpected: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()
    trouble: str = ""

    def __str__(self) -> str:
        if self.trouble and not any(self[:3]) and not self.refusals:
            return self.trouble
        counts = f"{self.passed}/{self.failed}/{len(self.refusals)}/{self.skipped}"
        return f"{counts} {self.trouble}".rstrip()


class Contents(NamedTuple):
    """What files.txt says: of files that are run; of tests that differ, part of their names -> why; of files
    that are left out, a pattern of their paths -> why.
    """

    files: tuple[Listed, ...]
    differences: dict[str, str]
    left_out: dict[str, str]


def read_list() -> Contents:
    """Return what files.txt says."""
    lines = [line for line in FILES.read_text().splitlines() if line and not line.startswith("#")]
    rows = [[cell.strip() for cell in line.split("|")] for line in lines]
    notes = {kind: {row[0]: row[2] for row in rows if row[1] == kind} for kind in ("differs", "left out")}
    files = tuple(Listed(*row) for row in rows if row[1] not in notes)
    return Contents(files, notes["differs"], notes["left out"])


def sort_rest(folder: Path, contents: Contents) -> tuple[Counter[str], list[str]]:
    """Return of the files in `folder` that are not run how many each line leaves out, and those that no line
    names.
    """
    paths = {path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("test_*.py")}
    left_out: Counter[str] = Counter()
    unknown = []
    for path in sorted(paths - {one.path for one in contents.files}):
        line = next((line for line in contents.left_out if fnmatchcase(path, line)), None)
        if line is None:
            unknown.append(path)
        else:
            left_out[line] += 1
    return left_out, unknown


def run(path: str, copy: Path, differences: Mapping[str, str], limit_s: float = FILE_LIMIT_S) -> Result:
    """Run one file in a process of its own, which is ended with all that it has started
    when its time is up.
    """
    report = copy.parent / "report.xml"
    report.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "pytest",
        f"unit/{path}.py",
        "-p",
        "no:cacheprovider",
        "-p",
        "harness",
        "-q",
    ]
    if path.startswith("inference/"):  # DeepSpeed runs them by themselves
        command += ["-m", "inference"]
    log = copy.parent / "log"
    with log.open("w") as output:
        job = subprocess.Popen(
            [*command, f"--junitxml={report}"],
            cwd=copy,
            env=environment(copy),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            job.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
            return Result(trouble=f"not done within {limit_s:.0f} s")
    said = log.read_text()
    if not report.exists():
        return Result(trouble="ended: " + " ".join(said.split()[-20:]))
    result = read_report(report, differences)
    if STOPPED in said:  # the report has the test that did not end as one without a problem
        why = said.rsplit(STOPPED, 1)[1].splitlines()[0].strip(" !")
        return result._replace(passed=result.passed - 1, trouble=f"stopped: {why}")
    return result


def read_report(report: Path, differences: Mapping[str, str]) -> Result:
    """Return what pytest says of one file."""
    passed = failed = skipped = 0
    unexpected = []
    refusals = []
    for case in ElementTree.parse(report).iter("testcase"):  # our own pytest has written it
        name = f"{case.get('classname', '')}::{case.get('name', '')}"
        problem = case.find("failure") if case.find("failure") is not None else case.find("error")
        if problem is None:
            skipped += case.find("skipped") is not None
            passed += case.find("skipped") is None
            continue
        message = problem.get("message", "").splitlines()[0]
        text = f"{problem.get('message', '')}\n{problem.text or ''}"
        if "collection failure" in text:
            return Result(
                trouble=f"{NOT_COLLECTED}: {text.strip().splitlines()[-1].removeprefix('E').strip()}"
            )
        if any(word in text for word in REFUSALS) and NOT_RAISED not in message:
            refusals.append(message[:300])
            continue
        failed += 1
        if not any(part in name for part in differences):
            unexpected.append(f"{name}: {message[:200]}")
    return Result(passed, failed, skipped, tuple(unexpected), tuple(refusals))


def environment(copy: Path) -> dict[str, str]:
    """What DeepSpeed's tests need to run on CPUs: LOCAL_SIZE is how many devices the accelerator counts.
    Options for the tests of dslaunch are none of theirs.
    """
    ours = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    return ours | {
        "PYTHONPATH": os.pathsep.join([drop_in.FOLDER, str(copy), str(HERE)]),
        "PATH": os.pathsep.join([drop_in.BIN, str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        drop_in.PYTHON_VARIABLE: sys.executable,
        drop_in.VARIABLE: "always",
        "DS_ACCELERATOR": "cpu",
        "DS_TEST_USE_INSTALLED_DEEPSPEED": "1",
        "DS_UNITTEST_TIMEOUT": "120",
        "HF_HUB_OFFLINE": "1",
        "LOCAL_SIZE": "4",
        "OMP_NUM_THREADS": "1",
    }


def why_not(folder: Path) -> str:
    """Return what keeps the tests from being run, "" if nothing does."""
    if not (folder / "unit").is_dir():
        return (
            f"{folder}: has no folder `unit`; give the folder tests/ of a clone of DeepSpeed: make "
            "test-deepspeed TESTS=folder"
        )
    version = pytest.version_tuple[:2]
    if version < PYTEST or PYTEST_WITHOUT_CLASS_FIXTURES <= version < PYTEST_REGISTER_FIXTURE:
        return (
            f"pytest {pytest.__version__}: DeepSpeed's tests need 7.2 to 8.3, or 9.1 or later; "
            "`make setup` brings one"
        )
    try:
        from _pytest.fixtures import FixtureFunctionMarker  # noqa: F401
    except ImportError:
        return (
            f"pytest {pytest.__version__} has no _pytest.fixtures.FixtureFunctionMarker, which DeepSpeed's "
            "tests import; install pytest 8.3"
        )
    return ""


def is_explained(one: Listed, result: Result) -> bool:
    """Return whether all tests of the file have run, or the list says that it does not collect, and no
    failure is without a reason.
    """
    if result.trouble:
        return one.here == NOT_COLLECTED and result.trouble.startswith(NOT_COLLECTED)
    return not result.unexpected


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.deepspeed_tests", description=__doc__.split("\n")[0]
    )
    parser.add_argument("folder", type=Path, help="DeepSpeed's tests/")
    parser.add_argument("words", nargs="*", help="only files with one of these in their path")
    parser.add_argument("--limit", type=float, default=FILE_LIMIT_S, help="seconds that a file may take")
    given = parser.parse_args()
    trouble = why_not(given.folder)
    if trouble:
        print(trouble, file=sys.stderr)
        return 2
    contents = read_list()
    files, differences, _ = contents

    def is_asked_for(path: str) -> bool:
        return not given.words or any(word in path for word in given.words)

    wanted = [one for one in files if is_asked_for(one.path)]
    there = [one for one in wanted if (given.folder / "unit" / f"{one.path}.py").is_file()]
    print(
        f"pytest {pytest.__version__}; passed/failed/refused/skipped now, and in the list; DeepSpeed 0.19.8: "
        "passed/failed/skipped"
    )
    results = []
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place) / "tests"
        shutil.copytree(given.folder, copy)
        for beside in DEEPSPEED_NEEDS:  # what DeepSpeed's package depends on, and its tests import
            if (DEEPSPEED_FOLDER / beside).is_dir():
                shutil.copytree(DEEPSPEED_FOLDER / beside, copy / beside)
        for one in there:
            result = run(one.path, copy, differences, given.limit)
            results.append(result)
            figures = f"{result!s:16} {one.here:14} {one.theirs:14}"
            print(f"{one.path:55} {one.kind}  {figures} {one.note}".rstrip(), flush=True)
            for line in result.unexpected:
                print(f"    {line}")
            for line, number in Counter(result.refusals).items():
                print(f"    refused {number}: {line}")
    if len(there) < len(wanted):
        missing = ", ".join(one.path for one in wanted if one not in there)
        print(f"not in {given.folder}: {missing}")
    left_out, unknown = sort_rest(given.folder / "unit", contents)
    for line, number in left_out.items():
        if is_asked_for(line):
            print(f"{line:55} {number} left out: {contents.left_out[line]}")
    unknown = [path for path in unknown if is_asked_for(path)]
    for path in unknown:
        print(f"{path:55} not in the list")
    bad = [one for one, result in zip(there, results, strict=True) if not is_explained(one, result)]
    print(
        f"{sum(one.passed for one in results)} passed in {len(results)} files, {len(bad)} of them with "
        f"something to explain; {len(unknown)} files not in the list"
    )
    return 1 if bad or unknown or not results else 0


if __name__ == "__main__":
    sys.exit(main())
