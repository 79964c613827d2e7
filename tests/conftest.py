"""Fixtures for all tests: the lab of real hosts."""

from __future__ import annotations

import gc
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests.fake_cuda.build import can_be_built, library
from tests.lab import Lab

if TYPE_CHECKING:  # most tests need no torch
    from tests.runtime.ranks import Ranks

# No time limit for one example: other tests keep the machine busy. A fixture may serve all examples. The
# same examples in every run, so that a failure is of what was changed; `--hypothesis-profile=default`
# looks for new ones.
settings.register_profile(
    "tests",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("tests")

# What tests compute is small, and other tests keep the machine busy: OpenMP's threads would wait for each
# other, spinning, for seconds. Tests of threads name their number.
os.environ["OMP_NUM_THREADS"] = "1"

LAB_NODES = 4
# Not the one that `make lab` leaves up, and one for each process of `pytest -n`:
# labs have nothing in common but the machine.
LAB_NAME = "-".join(
    word
    for word in (os.environ.get("DSLAUNCH_LAB_NAME", "tests"), os.environ.get("PYTEST_XDIST_WORKER"))
    if word
)
END_ENV = "DSLAUNCH_TESTS_END"  # when no more test begins, in seconds of time.time()
EXHAUSTIVE_LIMIT_S = 600.0  # of a test with all cases of something, unless it has a limit of its own
LONG_S = 2.0  # of a test that no promise names
LAB_WAIT_S = 100  # for another test run on this machine to end; below the time limit of one test


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--time-limit`, for machines whose time is limited."""
    parser.addoption(
        "--time-limit",
        type=float,
        metavar="SECONDS",
        help="skip, and list, the tests that have not begun by then",
    )


def pytest_configure(config: pytest.Config) -> None:
    """The processes of `pytest -n` begin later, and end with the first."""
    gc.disable()  # until all tests are collected, of which next to nothing is garbage
    limit_s = config.getoption("--time-limit")
    if limit_s is not None and not hasattr(config, "workerinput"):
        os.environ[END_ENV] = str(time.time() + limit_s)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Begin nothing after the end."""
    if time.time() > float(os.environ.get(END_ENV, "inf")):
        pytest.skip(f"not begun within {item.config.getoption('--time-limit'):g} s")


@pytest.fixture(scope="session", autouse=True)
def _default_signals() -> None:
    """What the tests start gets every signal, even if the tests themselves were started in the
    background (`&`, nohup).

    A signal that is ignored stays ignored in children; one that has a handler,
    even one that does nothing, does not.
    """
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _own_records(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The jobs of the tests are not among those of the user who runs them."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """A head and 4 nodes, made once; every test finds them as new.

    Without root or namespaces its tests are skipped, or fail if DSLAUNCH_LAB=required is in the environment.
    """
    reason = Lab.can_be_made()
    if reason is not None:
        if os.environ.get("DSLAUNCH_LAB") == "required":
            pytest.fail(f"DSLAUNCH_LAB=required, but no lab can be made: {reason}", pytrace=False)
        pytest.skip(f"no lab: {reason}")
    with Lab.up(LAB_NODES, name=LAB_NAME, wait_s=LAB_WAIT_S) as made:
        yield made


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Processes to run ranks in: `ranks(function, world_size=2)`."""
    from tests.runtime.ranks import Ranks

    pool = Ranks()
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def cuda_ranks() -> Iterator[Ranks]:
    """`ranks`, with a fake CUDA device each."""
    reason = can_be_built()
    if reason is not None:
        pytest.skip(reason)
    from tests.fake_cuda.ranks import Parent
    from tests.runtime.ranks import Ranks

    library()
    parent = Parent()
    pool = Ranks(parent.fork)
    yield pool
    pool.stop()
    parent.stop()


@pytest.fixture(autouse=True)
def _restored_lab(request: pytest.FixtureRequest) -> Iterator[None]:
    """After a test that used the lab: all hosts up, connected and clean again, whatever the test left behind.

    Being autouse it is set up before the test's own fixtures, so it ends after them.
    """
    if "lab" not in request.fixturenames:
        yield
        return
    made: Lab = request.getfixturevalue("lab")
    yield
    made.restore()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests that use the lab or ranks, so that `-m 'not lab'` leaves them out; begin with the
    long files under `-n`.
    """
    for item in items:
        if item.get_closest_marker("exhaustive") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(EXHAUSTIVE_LIMIT_S))
        for fixture, marker in (("lab", "lab"), ("ranks", "ranks"), ("cuda_ranks", "ranks")):
            if fixture in getattr(item, "fixturenames", ()):
                item.add_marker(marker)
    if hasattr(config, "workerinput"):
        is_run = [
            item
            for item in items
            if "not exhaustive" not in config.option.markexpr or not item.get_closest_marker("exhaustive")
        ]
        lengths = _lengths(is_run, usual_limit_s=float(config.getini("timeout")))
        items.sort(key=lambda item: lengths.get(item.path, (0.0, 0)), reverse=True)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """List the long tests that docs/design/promises.md does not name: each is to be shorter or exhaustive."""
    if "not exhaustive" not in config.option.markexpr:
        return
    page = (config.rootpath / "docs/design/promises.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/]+\.py::\w+)`", page))
    seconds = {
        report.nodeid: report.duration
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", "") == "call"
        and report.duration > LONG_S
        and report.nodeid.partition("[")[0].removeprefix("tests/") not in named
    }
    if seconds:
        terminalreporter.section(f"longer than {LONG_S:g} s, and named by no promise")
        for name, took_s in sorted(seconds.items(), key=lambda one: -one[1]):
            terminalreporter.line(f"{took_s:6.1f} s  {name}")


def pytest_collection_finish() -> None:
    """What is loaded now stays: a search for garbage looks at what the tests make,
    and not a thousand times at that.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


def _lengths(items: list[pytest.Item], *, usual_limit_s: float) -> dict[Path, tuple[float, int]]:
    """How long each file may take: the longest time limit that a test of it was given,
    and how many of them are slow.

    With the long files first no process has a long one left at the end, while the others have nothing to do.
    """
    limits: dict[Path, float] = {}
    num_slow: dict[Path, int] = {}
    for item in items:
        limit = item.get_closest_marker("timeout")
        limit_s = float(limit.args[0]) if limit else usual_limit_s
        limits[item.path] = max(limits.get(item.path, usual_limit_s), limit_s)
        num_slow[item.path] = num_slow.get(item.path, 0) + (item.get_closest_marker("slow") is not None)
    return {path: (limits[path], num_slow[path]) for path in limits}
