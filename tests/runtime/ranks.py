"""Real ranks for tests: four processes that live as long as the test session and form a new
gloo group per call.

`ranks(function, world_size=n)` calls `function(rank)` in n of them and returns the n results in rank order. A
call that takes longer than its deadline has hung: the processes are killed, and the test that fails shows
where their threads stood.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dslaunch.runtime.comm.process_group import destroy_group

IMPORTED = [
    "tests.runtime.ranks",
    "dslaunch.runtime.compat.engine.initialize",
    "torch.distributed.checkpoint",
    "pytest",  # by the files whose functions run in ranks
    "transformers.models.llama.modeling_llama",  # 2 s in each rank, if it is there
]
NO_GROUP = (
    "connectFullMesh failed"  # gloo's ranks miss each other once in ten thousand groups: nothing was run yet
)
MOST_THREADS = 20  # a rank with more of them has groups that nothing uses
DEADLINE_S = 200.0  # the start of the processes included; below the time limit of a test


class RankFailed(Exception):
    """A rank raised, died or hung; the text holds every rank's traceback."""


class Ranks:
    """The processes. They are forked from one that has imported torch,
    which is most of what a process costs here.
    """

    def __init__(self, make: Callable[[], tuple[Any, Connection]] | None = None) -> None:
        """`make` returns a process that runs `serve`, and the pipe to it."""
        self._make = make or _forked
        self._workers: list[tuple[Any, Connection]] = []

    def __call__(
        self, function: Callable[..., Any], *args: Any, world_size: int, deadline_s: float = DEADLINE_S
    ) -> list[Any]:
        """Return `[function(rank, *args) for rank in range(world_size)]`,
        each computed by its own process.
        """
        for attempt in range(2):
            self._start(world_size)
            with tempfile.TemporaryDirectory() as folder:
                pipes = [pipe for _, pipe in self._workers[:world_size]]
                for rank, pipe in enumerate(pipes):
                    pipe.send((function, rank, world_size, str(Path(folder) / "store"), args))
                answers = self._collect(pipes, deadline_s, Path(folder))
            failures = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(answers) if not ok]
            if not failures:
                return [value for _, value in answers]
            self.stop()  # the others may be stuck in a collective
            if attempt or not any(NO_GROUP in text for text in failures):
                raise RankFailed("\n".join(failures))
        raise AssertionError("unreachable")

    def stop(self, *, but: int = 0) -> None:
        """Kill the processes, but for the first few, and wait for their end."""
        for process, pipe in self._workers[but:]:
            pipe.close()
            process.kill()
            process.join()
        del self._workers[but:]

    def _start(self, count: int) -> None:
        while len(self._workers) < count:
            self._workers.append(self._make())

    def _collect(self, pipes: list[Connection], deadline_s: float, folder: Path) -> list[tuple[bool, Any]]:
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + deadline_s
        failed = False
        while len(answers) < len(pipes):
            waiting = [pipe for index, pipe in enumerate(pipes) if index not in answers]
            # One rank's failure leaves the others in a collective: give them a moment to
            # fail, too, and no more.
            ready = wait(waiting, timeout=1.0 if failed else max(0.0, deadline - time.monotonic()))
            if not ready:
                late = [index for index in range(len(pipes)) if index not in answers]
                answers |= {index: (False, self._stacks_of(index, folder)) for index in late}
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    answer = pipe.recv()
                except EOFError:
                    answer = (False, "died")
                answers[pipes.index(pipe)] = answer
                failed = failed or not answer[0]
        return [answers[index] for index in range(len(pipes))]

    def _stacks_of(self, rank: int, folder: Path) -> str:
        """What a rank that has not returned is doing."""
        with suppress(ProcessLookupError):
            os.kill(self._workers[rank][0].pid, signal.SIGUSR1)
        path, stacks = folder / f"stacks-{rank}", ""
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline and not (stacks and stacks.endswith("\n")):
            time.sleep(0.05)
            stacks = path.read_text() if path.exists() else ""
        return f"did not return; {stacks or 'it does not say where it stands'}"


def _forked() -> tuple[Any, Connection]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def serve(
    pipe: Connection, group: Callable[[int, int, str], AbstractContextManager[None]] | None = None
) -> None:
    """Call what comes through the pipe, in a group of ranks, until its other end is closed."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    has_imported = False
    while True:
        try:
            function, rank, world_size, store, args = pipe.recv()
        except EOFError:
            return
        if not has_imported:
            # modules live as long as the process: a collection looks at what the tests
            # made, and takes no time
            gc.freeze()
            has_imported = True
        try:
            with (
                _shows_stacks(Path(store).with_name(f"stacks-{rank}")),
                (group or process_group)(rank, world_size, store),
            ):
                value = function(rank, *args)
            pipe.send((True, value))
        except Exception:
            pipe.send((False, traceback.format_exc()))
        value = None
        # groups of engines that nothing holds any more wait for Python's collector, and the threads of each
        # wake 100 times a second
        if len(os.listdir("/proc/self/task")) > MOST_THREADS:
            gc.collect()


@contextmanager
def _shows_stacks(path: Path) -> Iterator[None]:
    """Inside, SIGUSR1 makes this process write there where each of its threads stands."""
    with open(path, "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file)
        try:
            yield
        finally:
            faulthandler.unregister(signal.SIGUSR1)


@contextmanager
def process_group(rank: int, world_size: int, store: str) -> Iterator[None]:
    """A gloo group over a file: no port."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    try:
        yield
        dist.barrier()  # who left while others still form a group would make them fail
    finally:
        destroy_group()
