"""Saves that are killed: two ranks, forked from one warm process for each,
that go on from what the last ones have left.

`run_all(folder, ...)` is for a process of its own without threads: children that are forked have none
of their parent's.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # what making an optimizer imports, which takes a second: once, before all forks
from torch import Tensor, nn

import dslaunch
from dslaunch import CheckpointError
from dslaunch.kernels.disk import DiskEngine
from dslaunch.runtime.checkpoint import background, rank_notes
from dslaunch.runtime.checkpoint.files.reader import CheckpointReader
from dslaunch.runtime.checkpoint.storage.folder_store import FolderStore
from dslaunch.runtime.checkpoint.storage.store import LATEST
from dslaunch.runtime.checkpoint.storage.stream import DirectStream
from dslaunch.runtime.checkpoint.storage.url_store import open_store
from tests.runtime.models import make_config, train_engine

POINTS = 20
NEVER = 10**6
AFTER_LATEST = -1  # when `latest` names the new one
ALL = -1
KEPT = 3
BEFORE = KEPT + 1  # saves that are not killed
_WRITES = 60  # so many of a stream's writes are one event
_DEADLINE_S = 60.0
_ALONE = (0, 2, 15, 17)  # of the points: two kills of either rank
_EVENTS: tuple[tuple[Any, str, int], ...] = (
    (os, "fsync", 1),
    (os, "ftruncate", 1),
    (Path, "mkdir", 1),
    (Path, "rename", 1),
    (Path, "replace", 1),
    (shutil, "rmtree", 1),
    (FolderStore, "begin", 1),
    (FolderStore, "put", 1),
    (FolderStore, "publish", 1),
    (DirectStream, "_send", 1),
    (DirectStream, "write", _WRITES),
    (DiskEngine, "create", 1),
)


@dataclass(frozen=True)
class Plan:
    """One save: who is killed (a rank or ALL), before which event of that rank's (of rank 0's for ALL)."""

    victim: int
    event: int
    is_alone: bool = False  # who is left has to notice by itself; else it is killed, too, as a launcher does


@dataclass
class Outcome:
    """What became of it."""

    plan: Plan
    steps: tuple[int, int]  # of the newest checkpoint, before and after
    statuses: list[int]  # of the ranks; negative: the signal
    said: list[str]  # "events N" of who saved, or the error
    differences: list[str] = field(
        default_factory=list
    )  # of the newest checkpoint, from what was to be saved


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(7, 15), nn.Linear(15, 1))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


def run_all(folder: Path, *, is_async: bool, tag: str | None) -> tuple[list[Outcome], list[str]]:
    """Kill POINTS saves, one after the other; return what became of each, and what is left in the folder
    after one more save.
    """
    torch.set_num_threads(1)
    expected = _undisturbed()
    root = folder / "killed"
    # the last of them overwrites, or prunes, as those do that are killed
    outcomes = [_attempt(root, Plan(ALL, NEVER), expected, is_async=is_async, tag=tag) for _ in range(BEFORE)]
    counts = [int(said.removeprefix("events ")) for said in outcomes[-1].said]
    for number in range(POINTS):
        victim = (0, ALL, 1)[number % 3]
        last = counts[max(victim, 0)] - 1
        plan = Plan(victim, 1 + number * last // (POINTS - 1), is_alone=number in _ALONE)
        if number == POINTS - 1:
            plan = Plan(ALL, AFTER_LATEST)
        outcomes.append(_attempt(root, plan, expected, is_async=is_async, tag=tag))
    for name in (".other.partial", ".other.removed"):  # of saves of other tags that were killed
        (root / name).mkdir()
    outcomes.append(_attempt(root, Plan(ALL, NEVER), expected, is_async=is_async, tag=tag))
    return outcomes, sorted(path.name for path in root.iterdir())


@cache
def _undisturbed() -> list[dict[str, Tensor]]:
    """What is in a checkpoint after 0, 1, 2, ... steps."""
    steps = range(POINTS + BEFORE + 2)

    def rank(index: int) -> str:
        engine = _make(is_async=False, keep_last=None)
        for step in steps:
            engine.save_checkpoint(root)
            train_engine(engine, steps=1, first=step, dtype=torch.bfloat16)
        return ""

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "undisturbed"
        statuses, said = _fork(rank, Path(folder) / "said")
        if statuses != [0, 0]:
            raise AssertionError(f"the undisturbed run ended with {statuses}: {said}")
        return [_tensors(root, f"global_step{step}") for step in steps]


def _attempt(
    root: Path, plan: Plan, expected: list[dict[str, Tensor]], *, is_async: bool, tag: str | None
) -> Outcome:
    store = open_store(root)
    before = _steps(root, store.latest()) if store.latest() else 0

    def rank(index: int) -> str:
        engine = _make(is_async=is_async, keep_last=None if tag else KEPT)
        if before:
            engine.load_checkpoint(root)
        train_engine(engine, steps=1, first=engine.global_steps, dtype=torch.bfloat16)
        countdown = _Countdown(plan, index)
        try:
            engine.save_checkpoint(root, tag)
            engine.destroy()
        except CheckpointError as error:
            return str(error)
        return f"events {countdown.seen}"

    statuses, said = _fork(rank, root.parent / "said", ends_all=not plan.is_alone)
    latest = str(store.latest())
    after = _steps(root, latest)
    found, wanted = _tensors(root, latest), expected[after]
    differences = sorted(
        name for name in found.keys() | wanted.keys() if not torch.equal(found[name], wanted[name])
    )
    return Outcome(plan, (before, after), statuses, said, differences)


def _make(*, is_async: bool, keep_last: int | None) -> Any:
    torch.manual_seed(0)
    section = {"async_save": is_async, "keep_last": keep_last}
    config = make_config(stage=2, bf16={"enabled": True}, steps_per_print=0, checkpoint=section)
    return dslaunch.initialize(model=Two(), config=config)[0]


def _steps(root: Path, tag: str | None) -> int:
    steps: int = CheckpointReader(open_store(root), str(tag)).training()["progress"]["global_steps"]
    return steps


def _tensors(root: Path, tag: str) -> dict[str, Tensor]:
    reader = CheckpointReader(open_store(root), tag)
    reader.verify()
    return {name: reader.tensor(name) for name in reader.tensors()}


class _Countdown:
    """Counts the events from now on, and kills before one of them."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.seen = 0
        self._at = plan.event if plan.victim in (rank, ALL) and (rank == 0 or plan.victim == 1) else NEVER
        self._is_for_all = plan.victim == ALL
        for owner, name, every in _EVENTS:
            setattr(owner, name, self._counted(getattr(owner, name), every))

    def _kill(self) -> None:
        os.kill(0 if self._is_for_all else os.getpid(), signal.SIGKILL)  # 0 is the group of the two

    def _counted(self, function: Callable[..., Any], every: int) -> Callable[..., Any]:
        calls = 0

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls % every == 0:
                self.seen += 1
                if self.seen == self._at:
                    self._kill()
            result = function(*args, **kwargs)
            if self._at == AFTER_LATEST and function.__name__ == "replace" and args[1].name == LATEST:
                self._kill()
            return result

        return counted


def _fork(
    function: Callable[[int], str], said: Path, *, ends_all: bool = True
) -> tuple[list[int], list[str]]:
    """Call it as two ranks that are a process group, too; return their exit statuses and what they say.

    `ends_all`: when one is killed, the other is, too.

    Errors: TimeoutError if they hang
    """
    shutil.rmtree(said, ignore_errors=True)
    said.mkdir(parents=True)
    pids: list[int] = []
    for index in range(2):
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, pids[0] if pids else 0)
            _be_rank(function, index, said)
        os.setpgid(pid, pids[0] if pids else pid)
        pids.append(pid)
    if ends_all:
        _end_all_with_the_first(pids)
    statuses = [_status(pid, deadline=time.monotonic() + _DEADLINE_S) for pid in pids]
    texts = [said / str(index) for index in range(2)]
    return statuses, [path.read_text() if path.exists() else "" for path in texts]


def _end_all_with_the_first(pids: list[int]) -> None:
    """If a child is killed, kill them all."""
    ends = {os.pidfd_open(pid): pid for pid in pids}
    try:
        while ends:
            ready, _, _ = select.select([*ends], [], [], _DEADLINE_S)
            for end in ready:
                status = os.waitid(os.P_PIDFD, end, os.WEXITED | os.WNOWAIT)
                os.close(end)
                del ends[end]
                if status is not None and status.si_code == os.CLD_KILLED:
                    os.killpg(pids[0], signal.SIGKILL)
            if not ready:
                return
    finally:
        for end in ends:
            os.close(end)


def _status(pid: int, *, deadline: float) -> int:
    """Wait for the end of a child; return its exit status, negative for a signal."""
    ends = os.pidfd_open(pid)
    try:
        ready, _, _ = select.select([ends], [], [], max(0.0, deadline - time.monotonic()))
    finally:
        os.close(ends)
    if not ready:
        os.killpg(os.getpgid(pid), signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if not ready:
        raise TimeoutError(f"a rank hung for {_DEADLINE_S:g} s")
    return status


def _store(index: int, port: Path) -> torch.distributed.TCPStore:
    """Served by rank 0, as jobs have it; a store in a file would be left half-written by who is killed."""
    if index == 0:
        store = torch.distributed.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
        port.with_suffix(".partial").write_text(str(store.port))
        port.with_suffix(".partial").rename(port)
        return store
    deadline = time.monotonic() + _DEADLINE_S
    while not port.exists():
        if time.monotonic() > deadline:
            raise TimeoutError("rank 0 serves no store")
        time.sleep(0.002)
    return torch.distributed.TCPStore("127.0.0.1", int(port.read_text()), 2, is_master=False)


def _be_rank(function: Callable[[int], str], index: int, said: Path) -> None:
    status = 1
    rank_notes.BEAT_S, rank_notes.PATIENCE_S = 0.1, 2.0
    background._NICENESS = 0  # a rank that makes way for what else this machine does would be taken for dead
    try:
        store = _store(index, said / "port")
        torch.distributed.init_process_group("gloo", store=store, rank=index, world_size=2)
        (said / str(index)).write_text(function(index))
        status = 0
    except BaseException:
        (said / str(index)).write_text(traceback.format_exc())
    finally:
        os._exit(status)  # none of what the parent has to end
