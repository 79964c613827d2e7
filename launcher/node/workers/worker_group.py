"""The workers of one host, from their start to the report of their end."""

from __future__ import annotations

import os

from ...wire.frames import Exited, Frame, Output, Stacks, Started, text_of
from ..observe.evidence import MemoryWatch, evidence_of, read_place
from ..system.lean_stdlib import Selector, signal
from ..system.private_folder import PrivateFolder
from ..system.process_tree import reap
from .worker import Worker, WorkerStream

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .milestones import MilestonePipe
    from .stack_dump import StackDump

MOST_S_TO_END = 10.0  # a traceback that is older did not end the worker


class WorkerGroup:
    """Passes on the workers' output and their ends.

    While it is paused their pipes are left alone, so they wait.
    """

    def __init__(self, selector: Selector, send: Callable[[Frame], None]) -> None:
        self._selector = selector
        self._send = send
        self._workers: list[Worker] = []
        self._is_paused = False
        self._memory: MemoryWatch | None = None  # None until all workers are started
        self._stack_dumps: dict[Worker, StackDump] = {}
        self._milestones: MilestonePipe | None = None

    def begin(self, milestones: MilestonePipe | None) -> None:
        """Begin to listen: the first worker is about to be started."""
        if milestones is not None:
            self._milestones = milestones
            self._selector.on_read(milestones.fileno(), lambda: self._read_milestones(milestones))

    def end(self) -> None:
        """Stop listening: all workers have ended and were reported."""
        if self._milestones is not None:
            self._selector.forget(self._milestones.fileno())
            self._milestones = None

    def add(self, worker: Worker) -> None:
        """Add a worker that was started just now."""
        self._workers.append(worker)
        for stream in worker.streams:
            self._watch(worker, stream)
        self._send(Started(worker.rank, worker.pid))

    def forget(self) -> None:
        """Forget the workers, all of which have ended and were reported: they are started again."""
        self._workers = []

    def watch_memory(self) -> None:
        """Watch the memory, once all are started: the kernel's counters explain later how they end."""
        self._memory = MemoryWatch()

    @property
    def is_ended(self) -> bool:
        """Tell whether no worker runs any more; true if there are none."""
        return all(worker.status is not None for worker in self._workers)

    def running_pids(self) -> list[int]:
        """Process ids of the workers that run."""
        return [worker.pid for worker in self._workers if worker.status is None]

    @property
    def is_told(self) -> bool:
        """Tell whether all of them ended and the launcher was told so; true if there are none."""
        return all(worker.is_told for worker in self._workers)

    def signal(self, *signums: int, is_for_group: bool = True) -> None:
        """Send each of the signals to every worker that runs, with its process group or alone."""
        for worker in self._workers:
            for signum in signums:
                worker.signal(signum, is_for_group=is_for_group)

    def pause(self, is_paused: bool) -> None:
        """Leave their pipes alone, or read on; a second call with the same value does nothing."""
        if is_paused == self._is_paused:
            return
        self._is_paused = is_paused
        for worker in self._workers:
            for stream in worker.streams:
                if stream.is_open and is_paused:
                    self._selector.forget(stream.fd)
                elif stream.is_open:
                    self._watch(worker, stream)

    def collect(self, *, is_our_kill: bool) -> None:
        """Take note of the workers that ended, and report each once all its output was passed on."""
        # First those that SIGKILL ended: the kernel's counters explain them.
        for pid, status in sorted(reap(), key=lambda one: one[1] != signal.SIGKILL):
            for worker in self._workers:
                if worker.pid == pid:
                    worker.end(status)
                    if status and self._memory is not None:
                        worker.is_out_of_memory, worker.facts = self._memory.explain(
                            pid, status, is_our_kill=is_our_kill
                        )
        for worker in self._workers:
            self._tell_end_of(worker)

    def send_prompts(self, now: float) -> None:
        """Send the open lines of workers that read a terminal, after they were left for a while."""
        for worker in self._workers:
            for stream in worker.streams if worker.is_prompting and not self._is_paused else ():
                text = stream.prompt(now)
                if text:
                    self._send(Output(worker.rank, stream.number, text_of(text)))

    def ask_stacks(self, env: dict[bytes, bytes], folder: PrivateFolder) -> None:
        """Find out what each of them does, which takes a while; `send_stacks` sends it then."""
        from .stack_dump import StackDump

        for worker in self._workers:
            if worker.status is None and worker not in self._stack_dumps:
                own_file = folder.file(f"spy-{worker.rank}")
                dump = StackDump(worker.pid, file=worker.stacks_file, env=env, own_file=own_file)
                self._stack_dumps[worker] = dump

    def send_stacks(self, now: float) -> None:
        """Send the stacks that are known by now."""
        for worker, dump in list(self._stack_dumps.items()):
            dump.look(now)
            if dump.answer is not None:
                del self._stack_dumps[worker]
                self._send(Stacks(worker.rank, *dump.answer, read_place(worker.place_file)))

    def _read_milestones(self, pipe: MilestonePipe) -> None:
        for one in pipe.read():
            self._send(one)

    def _watch(self, worker: Worker, stream: WorkerStream) -> None:
        self._selector.on_read(stream.fd, lambda: self._read_output(worker, stream))

    def _read_output(self, worker: Worker, stream: WorkerStream) -> bool:
        """Pass on the output that is there; return whether more may be waiting."""
        if not stream.is_open:
            return False
        text, may_have_more = stream.read()
        if not stream.is_open and not self._is_paused:
            self._selector.forget(stream.fd)
        if text:
            self._send(Output(worker.rank, stream.number, text_of(text)))
        return may_have_more

    def _tell_end_of(self, worker: Worker) -> None:
        """Once a worker has ended, pass on all its output and then report how it ended."""
        if worker.status is None or worker.is_told:
            return
        for stream in worker.streams:
            while not self._is_paused and self._read_output(worker, stream):
                pass
            if stream.is_open:
                return  # goes on at a later tick, when the launcher has read more
        worker.is_told = True
        self._send(_exited(worker, worker.status))


def _exited(worker: Worker, status: int) -> Exited:
    is_signaled = os.WIFSIGNALED(status)
    signum = os.WTERMSIG(status) if is_signaled else 0
    code = 128 + signum if is_signaled else os.WEXITSTATUS(status)
    evidence: dict[str, Any] = {}
    at = worker.ended_at
    if code:
        out, err = (stream.tail for stream in worker.streams)
        evidence = evidence_of(
            status,
            facts=worker.facts,
            is_out_of_memory=worker.is_out_of_memory,
            error_file=worker.error_file,
            place_file=worker.place_file,
            has_local_rank=worker.has_local_rank,
            out=out,
            err=err,
        )
        raised_at = worker.streams[1].traceback_at
        if signum in (0, signal.SIGINT) and at - MOST_S_TO_END < raised_at < at:
            # Python closes connections before it ends, which may take a second: ranks that lose this one
            # would seem to have failed first.
            at = raised_at
    return Exited(worker.rank, code, signum, at, evidence)
