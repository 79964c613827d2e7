"""A hang is explained while it lasts: real ranks over TCP, one of which is held up."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dslaunch
from dslaunch import ConfigError
from dslaunch.runtime.comm.collectives import Collectives
from dslaunch.runtime.comm.flight_recorder import FlightRecorder
from dslaunch.runtime.comm.mesh import make_mesh, make_shard_axis
from dslaunch.runtime.comm.process_group import group_timeout
from dslaunch.runtime.comm.watchdog import watchdog
from dslaunch.runtime.comm.watchdog.board import BoardLost, _connections_to
from tests.runtime.metrics.told import Reader, telling
from tests.runtime.models import make_config
from tests.runtime.ranks import Ranks

pytestmark = pytest.mark.slow

LIMIT_S = 1.0
PATIENCE_S = 10.0  # where nothing should be reported, and less than torch's own timeouts below
LAST_LINE = "torch gives up after"
DEADLINE_S = 60.0  # for a report that takes a few seconds on an idle machine


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


@contextmanager
def tcp_group(rank: int, folder: Path, *, timeout: timedelta = timedelta(seconds=77)) -> Iterator[None]:
    """A group over TCP, as jobs have, in place of the one that this rank is in;
    afterwards it is in a new one over a file.
    """
    world_size = dist.get_world_size()
    dist.barrier()  # who left while others still form the group would make them fail
    dist.destroy_process_group()
    port = folder / "port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        port.with_suffix(".new").write_text(str(store.port))
        port.with_suffix(".new").rename(port)
    else:
        wait_until(port.exists)
        store = dist.TCPStore("127.0.0.1", int(port.read_text()), is_master=False)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    del store
    try:
        yield
    finally:
        dist.destroy_process_group()
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/again", rank=rank, world_size=world_size
        )


@contextmanager
def stderr_into(path: Path, **environ: str) -> Iterator[None]:
    """What this rank prints to stderr goes to a file; `environ` is in its environment."""
    kept = sys.stderr
    os.environ.update(environ)
    with path.open("w", buffering=1) as sys.stderr:
        try:
            yield
        finally:
            sys.stderr = kept
            for name in environ:
                del os.environ[name]


@contextmanager
def watched_into(path: Path) -> Iterator[None]:
    """Watchdogs that look often, and report to this file; not yet after a second,
    which a first step may well take.
    """
    kept = watchdog._LONGEST_POLL_S
    watchdog._LONGEST_POLL_S = LIMIT_S / 4
    try:
        with stderr_into(path, DSLAUNCH_WATCHDOG_S=str(PATIENCE_S)):
            yield
    finally:
        watchdog._LONGEST_POLL_S = kept


@contextmanager
def impatient(engine: dslaunch.Engine) -> Iterator[None]:
    """Reports what takes longer than LIMIT_S in here."""
    assert engine._watchdog is not None
    kept = engine._watchdog._limit_s
    engine._watchdog._limit_s = LIMIT_S
    try:
        yield
    finally:
        engine._watchdog._limit_s = kept


class Blocks(nn.Module):
    """Six units of one size; `order` says which ones a forward uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.order = tuple(range(6))

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.blocks[index](x).relu()
        return x


def make_engine(stage: int) -> dslaunch.Engine:
    bucket = {
        "stage": stage,
        "stage3_param_persistence_threshold": 0,
        "reduce_bucket_size": 72,
        "stage3_prefetch_bucket_size": 72,
    }
    engine, *_ = dslaunch.initialize(model=Blocks(), config=make_config() | {"zero_optimization": bucket})
    return engine


def train_step(engine: dslaunch.Engine) -> None:
    engine.backward(engine(torch.randn(4, 8)).square().mean())
    engine.step()


def hold_up(is_so: Callable[[], bool]) -> None:
    wait_until(is_so)


# ---- one rank in its own code


def _held(rank: int, folder: str, stage: int) -> str:
    path = Path(folder)
    report = path / "stderr-0"
    with (
        tcp_group(rank, path),
        watched_into(path / f"stderr-{rank}"),
        telling(rank, path / "numbers"),
    ):
        engine = make_engine(stage)
        for step in range(4):
            if rank == 1 and step == 2:
                hold_up(lambda: LAST_LINE in report.read_text())
            with impatient(engine) if rank != 1 and step == 2 else nullcontext():
                train_step(engine)
        engine.destroy()
    return (path / f"stderr-{rank}").read_text()


@pytest.mark.parametrize(
    ("stage", "what"),
    [(1, "reduce_scatter of unit 'blocks.5'"), (3, "all_gather of unit 'blocks.0'")],
)
def test_a_rank_in_its_own_code_is_named_with_its_stack_and_the_run_goes_on(
    ranks: Ranks, tmp_path: Path, stage: int, what: str
) -> None:
    reader = Reader(tmp_path)
    report, *others = ranks(_held, str(tmp_path), stage, world_size=3)
    reader.close()
    assert json.loads((tmp_path / "hang-0.json").read_text()) == report, "the launcher is told, too"
    assert others == ["", ""], "one report for all"
    first, *rest = report.splitlines()
    assert re.fullmatch(
        rf"dslaunch: it hangs: rank 1 has not come to {what} \(step 3\), for which ranks 0,2 have waited \d+ "
        r"s; in its own code for \d+ s, after all_gather of .+",
        first,
    )
    assert re.match(rf"dslaunch:   0,2 +\S+ +3 +waits for {what} +\d+ +\d+ s$", rest[1])
    assert re.match(r"dslaunch:   1 +\S+ +3 +own code, after all_gather of .+ +- +\d+ s$", rest[2])
    of_rank_1 = report[report.index("dslaunch: rank 1 (") :]
    assert "in hold_up" in of_rank_1
    assert "in wait_until" in of_rank_1
    assert "runtime/zero" not in report.replace(__file__, ""), "not where our own code is, but the program"
    assert rest[-1] == "dslaunch: the ranks go on waiting; torch gives up after 77 s"
    assert report.count("it hangs") == 1


# ---- one rank stopped


def _stopped(rank: int, folder: str, victim: int) -> str:
    path = Path(folder)
    (path / f"pid-{rank}").write_text(str(os.getpid()))
    helper = 1 if victim == 0 else 0
    with (
        tcp_group(rank, path),
        watched_into(path / f"stderr-{rank}"),
    ):
        engine = make_engine(3)
        train_step(engine)
        if rank == helper:
            pid = int((path / f"pid-{victim}").read_text())
            threading.Thread(target=_continue, args=(pid, path / f"stderr-{rank}")).start()
        if rank == victim:
            os.kill(os.getpid(), signal.SIGSTOP)
        with impatient(engine):
            train_step(engine)
        train_step(engine)
        engine.destroy()
    return (path / f"stderr-{rank}").read_text()


def _continue(pid: int, report: Path) -> None:
    try:
        wait_until(lambda: report.read_text().endswith("\n"))
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_stopped_rank_is_named_as_one_that_does_not_answer(ranks: Ranks, tmp_path: Path) -> None:
    report, *others = ranks(_stopped, str(tmp_path), 1, world_size=3)
    assert others == ["", ""]
    assert re.match(
        r"dslaunch: it hangs: rank 1 does not answer \(ended, stopped, or in code that keeps Python's "
        r"lock\), while ranks 0,2 have waited \d+ s for all_gather of unit 'blocks.0' \(step 2\); the last "
        r"that rank 1 can have taken part in is all_gather of unit 'blocks\.\d' \(step 1\)\n",
        report,
    )
    assert re.search(r"dslaunch:   1 +\? +\? +does not answer +\? +\?\n", report)


@pytest.mark.exhaustive
def test_without_rank_0_which_serves_the_store_each_rank_says_what_it_waits_for(
    ranks: Ranks, tmp_path: Path
) -> None:
    of_0, of_1, _ = ranks(_stopped, str(tmp_path), 0, world_size=3)
    # Its watchdog may be awake before its own code is, and then it says of itself what the
    # others could not ask.
    assert of_0 == "" or of_0.startswith("dslaunch: it hangs: rank 0 has not come to ")
    assert re.fullmatch(
        r"dslaunch: it hangs: rank 1 has waited \d+ s for all_gather of unit 'blocks.0' \(step 2\), and "
        r"cannot ask the others: the store at 127\.0\.0\.1:\d+ does not answer; rank 0, which serves it, is "
        r"stopped, has ended or cannot be reached\n",
        of_1,
    )


# ---- different paths


PARTED = """
import os, torch, dslaunch
from dslaunch.runtime.comm.watchdog import watchdog
from tests.runtime.comm.watchdog.test_watchdog import make_engine, train_step
watchdog._LONGEST_POLL_S = 0.3
engine = make_engine(3)
train_step(engine)
if os.environ["RANK"] == "2":
    engine.module.order = (0, 1, 3, 4, 5)
train_step(engine)
train_step(engine)
"""


def _run_job(program: str, *args: str, after_rank_0: Callable[[], object] = bool) -> list[tuple[str, int]]:
    """Return what each of 3 processes printed, and its exit code; their store is rank 0's."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    job = {
        "WORLD_SIZE": "3",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PYTHONPATH": str(Path(__file__).parents[4]),
        "DSLAUNCH_WATCHDOG_S": str(DEADLINE_S),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, *args],
            env={**os.environ, **job, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        texts = [processes[0].communicate(timeout=DEADLINE_S)[0]]
        after_rank_0()
        texts += [one.communicate(timeout=DEADLINE_S)[0] for one in processes[1:]]
    finally:
        for one in processes:
            one.kill()
            one.wait()
    return [(text, one.returncode) for text, one in zip(texts, processes, strict=True)]


def test_ranks_that_use_other_units_end_with_an_error_that_says_where_they_parted() -> None:
    """Before torch's and the watchdog's own limits, which are a minute and more."""
    for text, code in _run_job(PARTED):
        assert code == 1
        at = r'is at File "\S+/test_watchdog\.py", line \d+, in train_step'
        assert re.search(
            r"dslaunch: rank 0 came to (\w+) of unit 'blocks\.\d' where rank \d came to (\w+) of unit "
            rf"'blocks\.\d' \(step 2\): the ranks took different paths; rank 0 {at}; rank \d {at}; every "
            r"rank must use the same units of the model, in the same order\n",
            text,
        ), text


# ---- nothing happens


QUIET = """
import os, sys, time, torch, dslaunch
from pathlib import Path
from typing import Any
from dslaunch.runtime.comm.watchdog import watchdog
from dslaunch.runtime.comm.watchdog.board import BoardLost, _connections_to
from tests.runtime.comm.watchdog.test_watchdog import make_engine, train_step, wait_until
watchdog._LONGEST_POLL_S = 0.5
rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])
engine = make_engine(3)
for _ in range(3):
    train_step(engine)
board = engine._watchdog._board
looks = []
look = board.has
board.has = lambda *names: looks.append(time.monotonic()) or look(*names)
wait_until(lambda: looks)
if rank == 1:  # rank 0 ends first, and the store with it
    wait_until((folder / "ended").exists)
    before = len(looks)
    wait_until(lambda: len(looks) > before + 2)
"""


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_job_without_a_hang_prints_nothing_even_if_rank_0_ends_long_before_the_others(
    tmp_path: Path,
) -> None:
    done = _run_job(QUIET, str(tmp_path), after_rank_0=(tmp_path / "ended").touch)
    assert done == [("", 0)] * 3


# ---- limits


def _limits(rank: int, folder: str) -> list[object]:
    found: list[object] = []
    with tcp_group(rank, Path(folder)):
        for text in ("0", "77", None):
            environ = {} if text is None else {"DSLAUNCH_WATCHDOG_S": text}
            engine = None
            with stderr_into(Path(folder) / f"stderr-{rank}", **environ):
                try:
                    engine = make_engine(0)
                except ConfigError as error:
                    found.append(str(error))
            if engine is None:
                continue
            watchdog = engine._watchdog
            found.append(None if watchdog is None else watchdog._limit_s)
            engine.destroy()
            assert watchdog is None or not watchdog._thread.is_alive()
        dist.barrier()
    return found


def test_0_is_no_watchdog_and_one_that_torch_forestalls_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    for found in ranks(_limits, str(tmp_path), world_size=2):
        assert found == [
            None,
            "DSLAUNCH_WATCHDOG_S=77: torch gives a collective up after 77 s; give less, or 0 for no report, "
            "or raise DEEPSPEED_TIMEOUT, which is in minutes",
            pytest.approx(77 / 6),
        ]


def _timeouts(rank: int, folder: str) -> list[object]:
    with tcp_group(rank, Path(folder)):
        mesh = make_mesh(shard_size=2)
        groups = [mesh.shard.group, mesh.replicate.group, make_shard_axis(shard_size=2).group]
        dist.barrier()
        return [
            group_timeout(),
            *(group and group._get_backend(torch.device("cpu")).options._timeout for group in groups),
        ]


def test_all_groups_have_the_timeout_of_the_default_group(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(_timeouts, str(tmp_path), world_size=4) == [[timedelta(seconds=77)] * 4] * 4


def _let_go(rank: int, folder: str) -> bool:
    with tcp_group(rank, Path(folder)):
        engine = make_engine(1)
        train_step(engine)
        assert engine._watchdog is not None
        thread = engine._watchdog._thread
        assert thread.is_alive()
        del engine
        gc.collect()
        thread.join(10.0)
        return thread.is_alive()


def test_the_thread_ends_with_its_engine(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(_let_go, str(tmp_path), world_size=2) == [False, False]


def _connections_kept(rank: int, folder: str) -> int:
    with tcp_group(rank, Path(folder)):
        store: Any = dist.distributed_c10d._get_default_store()
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        before = _connections_to(store.port)
        engines = [make_engine(1) for _ in range(2)]  # kept: a collection of garbage would close them, too
        assert len(_connections_to(store.port) - before) > 1
        for engine in engines:
            engine.destroy()
        return len(_connections_to(store.port) - before)


def test_a_destroyed_engine_lets_its_connections_to_the_store_go(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(_connections_kept, str(tmp_path), world_size=2) == [0, 0]


def _outlived(rank: int, folder: str) -> list[bool]:
    with stderr_into(Path(folder) / f"err{rank}", DSLAUNCH_WATCHDOG_S="2"):  # it looks every half second
        with tcp_group(rank, Path(folder)):
            engine = make_engine(1)
            assert engine._watchdog is not None
            thread = engine._watchdog._thread
        assert dist.is_initialized()  # in the next group, which must not be asked for this engine's notes
        thread.join(5.0)
        found = [thread.is_alive()]

        watchdog = make_engine(1)._watchdog
        assert watchdog is not None
        assert not watchdog._board.has("a note")
        dist.barrier()
        (watchdog._board._file or Path()).unlink(missing_ok=True)
        with pytest.raises(BoardLost, match="has ended"):
            watchdog._board.has("a note")
        return found


def test_the_thread_ends_with_the_process_group(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(_outlived, str(tmp_path), world_size=2) == [[False]] * 2


def test_collectives_are_labelled_and_numbered_by_lane(ranks: Ranks) -> None:
    expected = [
        (0, 1, "broadcast of a"),
        (0, 2, "reduce_scatter of b"),
        (1, 1, "all_gather of c"),
        (0, 3, "all_gather of d"),
    ]
    for found, *under_way in ranks(_labels, world_size=2):
        assert found == expected
        # gloo tells of messages only whoever waits for them that they have ended
        assert under_way == [[], ["all_gather of c"], []]


def _labels(rank: int) -> tuple[list[tuple[int, int, str]], list[str], list[str], list[str]]:
    comm = Collectives(make_mesh(shard_size=2), gather_axis=make_shard_axis(shard_size=2))
    recorder = comm.wire.recorder
    comm.broadcast(torch.ones(2), what="a")
    comm.reduce_scatter_or_all_reduce(torch.ones(4), what="b").wait()
    if rank == 1:
        dist.barrier()  # so that rank 0 can see that it is under way
    pending = comm.all_gather_from(torch.ones(2), torch.empty(4), what="c")
    before, awaited = _under_way(recorder), ["all_gather of c"]
    waits = threading.Thread(target=pending.wait)
    waits.start()
    if rank == 0:
        wait_until(lambda: bool(_under_way(recorder)))
        awaited = _under_way(recorder)
        dist.barrier()
    waits.join(DEADLINE_S)
    comm.sharers.all_gather_objects(rank, what="d")
    recent = [(one.lane, one.number, str(one)) for one in recorder.recent()]
    return recent, before, awaited, _under_way(recorder)


def _under_way(recorder: FlightRecorder) -> list[str]:
    return [str(flight.label) for flight in recorder.under_way()]
