"""What a program tells by `dslaunch.report()`, read from the pipe; and what becomes of it where the pipe is
full, gone, or nobody reads.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from decimal import Decimal
from math import inf, isnan, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dslaunch
from dslaunch.runtime.environment import read_metrics
from dslaunch.runtime.errors import ConfigError
from dslaunch.runtime.metrics import pipe as pipe_module, report as report_module
from dslaunch.runtime.metrics.pipe import process_pipe
from tests.runtime.metrics.told import Reader, telling


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Its only element is the time."""
    now = [1000.0]
    monkeypatch.setattr(pipe_module.time, "monotonic", lambda: now[0])
    return now


# ---- what is told


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (3, 3),
        (0.5, 0.5),
        (np.float32(0.5), 0.5),
        (np.int64(7), 7),
        (np.array(2.5), 2.5),
        (torch.tensor(1.5, requires_grad=True), 1.5),
        (torch.tensor(4), 4),
        (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
        (-inf, -inf),
        (2**70, 2.0**70),
    ],
)
def test_numbers_of_any_library_are_told(reader: Reader, value: Any, told: float) -> None:
    with telling(3, reader.path):
        dslaunch.report(accuracy=value)
    assert reader.lines() == {3: [{"accuracy": told}]}


def test_nan_is_a_number(reader: Reader) -> None:
    with telling(0, reader.path):
        dslaunch.report(loss=nan)
    ((row,),) = reader.lines().values()
    assert isnan(row["loss"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"loss": torch.zeros(4)}, r"report\(loss=...\): was given Tensor of shape \[4\]; give one number"),
        ({"accuracy": "0.5"}, r"report\(accuracy='0.5'\): is str; give a number"),
        ({"accuracy": None}, r"report\(accuracy=None\): is NoneType"),
        ({"accuracy": True}, r"report\(accuracy=True\): is bool"),
        ({"accuracy": np.bool_(True)}, r"report\(accuracy=True\): is bool"),
        ({"accuracy": 1j}, r"report\(accuracy=1j\): is complex"),
        ({"accuracy": Decimal(1)}, r"is Decimal"),
        ({"accuracy": 10**400}, r"report\(accuracy=...\): the number is too large for a float"),
        ({"step": 1.5}, r"report\(step=1.5\): must be a whole number, 0 or more"),
        ({"step": -1}, r"report\(step=-1\): must be a whole number, 0 or more"),
        (
            {"state": 1},
            r"report\('state'=...\): a name has 1 to 40 printable ASCII .*, and is not",
        ),
        ({"a" * 41: 1}, r"a name has 1 to 40 printable ASCII"),
        ({"a\nb": 1}, r"a name has 1 to 40 printable ASCII"),
        ({'a"b': 1}, r"no quotation mark and no backslash"),
        ({"loss": torch.tensor(1.0, device="meta")}, r"report\(loss=...\): .*meta tensors; give a number"),
        ({"steps": -1}, r"report\(steps=-1\): must be a finite number, 0 or more"),
        ({"forward_s": nan}, r"report\(forward_s=nan\): must be a finite number"),
    ],
)
@pytest.mark.parametrize("is_asked", [False, True])
def test_what_is_no_number_is_refused_by_name(
    reader: Reader, given: dict[str, Any], message: str, is_asked: bool
) -> None:
    if not is_asked:  # the same without a launcher, so that it is found where the program is written
        with pytest.raises(ConfigError, match=message):
            dslaunch.report(**given)
        return
    with telling(0, reader.path), pytest.raises(ConfigError, match=message):
        dslaunch.report(**given)


def test_too_many_names_are_refused_and_the_most_fit_into_a_line(reader: Reader) -> None:
    with telling(0, reader.path):
        names = [f"{number:040d}" for number in range(32)]
        dslaunch.report(**dict.fromkeys(names, -1.2345678901234567e-300))
        with pytest.raises(
            ConfigError, match="was given 33 different names so far, the last ones extra; tell"
        ):
            dslaunch.report(extra=1)
        dslaunch.report(**dict.fromkeys(names, 2))  # as before: the name that was refused does not count
    assert [len(row) for row in reader.lines()[0]] == [32, 32]


def test_what_a_worker_starts_tells_nothing_in_its_name(reader: Reader) -> None:
    child = "import dslaunch; dslaunch.report(step=900, loss=9.0)"
    worker = (
        "import subprocess, sys, dslaunch\n"
        "dslaunch.report(step=1, loss=1.0)\n"
        f"subprocess.run([sys.executable, '-c', {child!r}], check=True)\n"
        "dslaunch.report(step=2, loss=2.0)"
    )
    environ = {
        **os.environ,
        "DSLAUNCH_METRICS_PROCESS": "1 /a/pipe/of/the/job/around/this",
        "DSLAUNCH_METRICS_PIPE": str(reader.path),
        "DSLAUNCH_METRICS_INTERVAL": "0.1",
        "RANK": "2",
    }
    subprocess.run([sys.executable, "-c", worker], env=environ, check=True)
    assert [row["step"] for row in reader.lines()[2]] == [1, 2]


def test_a_trace_is_told_the_steps_of_a_program_without_an_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    monkeypatch.setattr("dslaunch.runtime.tracing.tracer.mark_step", told.append)
    monkeypatch.setenv("DSLAUNCH_TRACE", "2-3")
    monkeypatch.setenv("DSLAUNCH_TRACE_FILE", str(tmp_path / "trace"))
    report_module._step_marker.cache_clear()
    try:
        for step in (1, 2):
            dslaunch.report(step=step)
    finally:
        report_module._step_marker.cache_clear()
    assert told == [1, 2]


def test_steps_of_a_program_without_an_engine_are_timed(reader: Reader) -> None:
    with telling(0, reader.path):
        began = time.monotonic()
        for step in (0, 1, 3):
            dslaunch.report(step=step)
            time.sleep(0.01)
        took_s = time.monotonic() - began
    first, second, third = reader.lines()[0]
    assert first == {"step": 0}
    assert (second["steps"], third["steps"]) == (1, 2)
    assert 0.02 <= second["step_s"] + third["step_s"] <= took_s


def test_a_program_without_torch_reports_in_a_tenth_of_a_second(reader: Reader) -> None:
    program = (
        "import time; began = time.process_time(); import dslaunch; dslaunch.report(step=1, loss=0.5)\n"
        "import sys; print(time.process_time() - began, sorted({'torch', 'numpy'} & sys.modules.keys()))"
    )
    environ = {**os.environ, "DSLAUNCH_METRICS_PIPE": str(reader.path), "RANK": "2"}
    runs = [
        subprocess.run(
            [sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True
        )
        for _ in range(3)
    ]
    took_s, loaded = zip(*(run.stdout.split(maxsplit=1) for run in runs), strict=True)
    assert set(loaded) == {"[]\n"}
    assert min(map(float, took_s)) < 0.1
    assert reader.lines() == {2: [{"step": 1, "loss": 0.5}] * 3}


def test_nothing_happens_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DSLAUNCH_METRICS_PIPE", raising=False)
    process_pipe.cache_clear()
    dslaunch.report(step=1, loss=0.5)
    dslaunch.report()
    assert process_pipe() is None


@pytest.mark.parametrize("text", ["soon", "-1", "nan", ""])
def test_an_interval_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"DSLAUNCH_METRICS_INTERVAL={text!r} in the environment: must be"):
        read_metrics({"DSLAUNCH_METRICS_PIPE": "/tmp/p", "DSLAUNCH_METRICS_INTERVAL": text})


# ---- lines


def test_of_an_interval_the_last_values_and_the_sums_are_told(reader: Reader, clock: list[float]) -> None:
    with telling(0, reader.path, interval_s=1.0):
        for number in range(5):
            dslaunch.report(loss=number, wait_s=0.25, steps=1)
            clock[0] += 0.4
        dslaunch.report(loss=9)
    assert reader.lines()[0] == [
        {"loss": 0, "wait_s": 0.25, "steps": 1},
        {"loss": 3, "wait_s": 0.75, "steps": 3},
        {"loss": 9, "wait_s": 0.25, "steps": 1},  # when the program ends
    ]


def _fill(path: Path) -> None:
    """Write lines of another rank until there is room for none."""
    writer = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    for lines in (b"9 {}\n" * 600, b"9 {}\n"):
        with suppress(BlockingIOError):
            while True:
                os.write(writer, lines)
    os.close(writer)


def test_what_a_full_pipe_does_not_take_is_in_the_next_line(reader: Reader, clock: list[float]) -> None:
    with telling(0, reader.path, interval_s=1.0):
        dslaunch.report(loss=0, steps=1)
        _fill(reader.path)
        clock[0] += 1
        began = time.perf_counter()
        dslaunch.report(loss=1, steps=1, accuracy=0.5)
        assert time.perf_counter() - began < 0.1
        assert reader.lines().pop(0) == [{"loss": 0, "steps": 1}]
        dslaunch.report(loss=2, steps=1)  # it is tried once in an interval
        assert reader.lines() == {}
        clock[0] += 1
        dslaunch.report(loss=3, steps=1)
        assert reader.lines()[0] == [{"loss": 3, "steps": 3, "accuracy": 0.5}]


def test_a_pipe_that_comes_later_or_comes_again_gets_all(tmp_path: Path, clock: list[float]) -> None:
    folder = tmp_path / "later"
    with telling(0, folder / "numbers", interval_s=1.0):
        dslaunch.report(steps=1)
        folder.mkdir()
        reader = Reader(folder)
        clock[0] += 1
        dslaunch.report(steps=1)
        assert reader.lines()[0] == [{"steps": 2}]
        reader.close()  # nobody reads: an error of write(), or of open()
        clock[0] += 1
        dslaunch.report(steps=1)
        clock[0] += 1
        dslaunch.report(steps=1)
        reader.path.unlink()
        again = Reader(folder)
        clock[0] += 1
        dslaunch.report(steps=1)
        assert again.lines()[0] == [{"steps": 3}]
        again.close()


def test_a_program_that_wants_sigpipe_does_not_die_of_it(tmp_path: Path) -> None:
    program = """
import os, signal, sys, dslaunch
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
path = os.environ["DSLAUNCH_METRICS_PIPE"]
reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
dslaunch.report(loss=1)
os.close(reader)
dslaunch.report(loss=2)
print("alive", signal.SIGPIPE in signal.pthread_sigmask(signal.SIG_BLOCK, []), flush=True)
os.kill(os.getpid(), signal.SIGPIPE)
"""
    os.mkfifo(tmp_path / "numbers")
    environ = {
        **os.environ,
        "DSLAUNCH_METRICS_PIPE": str(tmp_path / "numbers"),
        "DSLAUNCH_METRICS_INTERVAL": "0",
    }
    ended = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True)
    assert (ended.stdout, ended.returncode) == ("alive False\n", -signal.SIGPIPE), ended.stderr


def test_a_forked_child_tells_nothing(reader: Reader) -> None:
    with telling(0, reader.path):
        dslaunch.report(loss=1)
        child = os.fork()
        if child == 0:
            dslaunch.report(loss=2)
            pipe = process_pipe()
            assert pipe is not None
            pipe.tell_state("saving", at_once=True)
            pipe.end()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        dslaunch.report(loss=3)
    assert reader.lines()[0] == [{"loss": 1}, {"loss": 3}]


class Told(torch.utils.data.Dataset[int]):
    """Each sample is told where it is made."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, place: int) -> int:
        dslaunch.report(step=900 + place, loss=9.0)
        return place


@pytest.mark.slow
def test_workers_of_a_loader_tell_nothing_before_the_first_step_either(reader: Reader) -> None:
    """Nor do forked ones: the test of a forked child."""
    with telling(0, reader.path):
        for _ in torch.utils.data.DataLoader(Told(), num_workers=1, multiprocessing_context="spawn"):
            pass
        dslaunch.report(step=1, loss=1.0)
    assert [row["step"] for row in reader.lines()[0]] == [1]


@pytest.mark.parametrize("is_taken", [True, False])
def test_a_program_that_closes_all_files_has_its_numbers_in_no_file_of_its_own(
    reader: Reader, tmp_path: Path, is_taken: bool
) -> None:
    own = tmp_path / "own"
    program = (
        "import os, sys, dslaunch\n"
        "dslaunch.report(step=1, loss=1.0)\n"
        "os.closerange(3, 256)\n"
        f"own = [os.open({str(own)!r}, os.O_RDWR | os.O_CREAT) for _ in range({8 if is_taken else 0})]\n"
        "dslaunch.report(step=2, loss=2.0)\n"
        "for one in own: os.fstat(one)"
    )
    environ = {
        **os.environ,
        "DSLAUNCH_METRICS_PIPE": str(reader.path),
        "DSLAUNCH_METRICS_INTERVAL": "0",
        "DSLAUNCH_METRICS_PROCESS": "",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
    }
    subprocess.run([sys.executable, "-c", program], env=environ, check=True)
    assert [row["step"] for row in reader.lines()[0]] == [1, 2]
    assert not is_taken or own.read_bytes() == b""


def test_a_file_is_there_whole_before_its_line(reader: Reader, tmp_path: Path) -> None:
    text = json.dumps({"words": "x" * 100_000})
    with telling(5, reader.path):
        pipe = process_pipe()
        assert pipe is not None
        pipe.tell_file("config", text)
        pipe.tell_file("trace", "{}")
    assert [row["file"] for row in reader.lines()[5]] == ["config", "trace"]
    assert (tmp_path / "config-5.json").read_text() == text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config-5.json", "numbers", "trace-5.json"]


def test_a_file_waits_for_the_folder_of_the_pipe(tmp_path: Path) -> None:
    folder = tmp_path / "later"
    with telling(5, folder / "numbers"):
        pipe = process_pipe()
        assert pipe is not None
        pipe.tell_file("config", "{}")
        folder.mkdir()
        reader = Reader(folder)
        dslaunch.report(loss=1)
    assert reader.lines()[5] == [{"loss": 1, "file": "config"}]
    reader.close()


def test_what_takes_long_is_told_before_and_not_twice_in_an_interval(
    reader: Reader, clock: list[float]
) -> None:
    with telling(0, reader.path, interval_s=1.0):
        dslaunch.report(loss=1)
        pipe = process_pipe()
        assert pipe is not None
        for state in ("saving", "loading"):
            clock[0] += 0.1
            pipe.tell_state(state, at_once=True)
        clock[0] += 1
        dslaunch.report(loss=2)
        pipe.tell_state(None)
        clock[0] += 1
        dslaunch.report(loss=3)
    assert reader.lines()[0] == [
        {"loss": 1},
        {"state": "saving"},
        {"loss": 2, "state": "loading"},
        {"loss": 3},
    ]


def test_a_handler_of_a_signal_may_report_at_any_time(reader: Reader) -> None:
    """It comes while the thread that it interrupts reports itself. Nothing is lost, or told twice."""
    given: list[int] = []  # appended to at once: a sum could be interrupted, too
    told = 0

    def report() -> None:
        given.append(1)
        dslaunch.report(steps=1)

    with telling(0, reader.path, interval_s=0.0):
        before = signal.signal(signal.SIGALRM, lambda *_: report())
        signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
        try:
            until = time.monotonic() + 0.5
            while time.monotonic() < until:
                report()
                told += sum(line.get("steps", 0) for line in reader.lines().get(0, ()))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, before)
        dslaunch.report(last=1)
    told += sum(line.get("steps", 0) for line in reader.lines().get(0, ()))
    assert told == len(given)
