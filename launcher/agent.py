"""The agent: runs on a node, starts this node's workers, and leaves nothing behind. Standard library only.

Two processes. The *keeper* adopts whatever loses its parent and outlives the *agent*, its only child, which does
the work. Each is told when the other dies: if the agent is killed, the keeper kills everything below itself; if the
keeper is killed, the agent ends the job. The launcher's death, a cut connection and a lost launcher (no ping for the
heartbeat time) reach the agent as the end of its input or as silence, and end the job too.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from enum import Enum
from typing import Any

from .devices import count_accelerators
from .evidence import MemoryWatch, evidence_of
from .frames import (
    MAGIC,
    AskStacks,
    Decoder,
    Done,
    Exited,
    Frame,
    Hello,
    Hold,
    Inspect,
    Listen,
    Listening,
    Output,
    Ping,
    Pong,
    Prepare,
    Problem,
    ProtocolError,
    Reach,
    Reached,
    Ready,
    Signal,
    Stacks,
    Start,
    Started,
    Stop,
    bytes_of,
    encode,
    text_of,
)
from .inspection import answer
from .pid_file import PidFileInUse, write_pid_file
from .preparation import Prepared, Unprepared
from .private_folder import PrivateFolder
from .process_tree import become_subreaper, descendants, die_with_parent, kill_descendants, reap
from .reach import Listener, own_addresses, try_addresses, why_not_listening
from .stack_dump import StackDump
from .starter import Starter
from .worker import HANDLED, Stream, Worker

FIRST_HEARTBEAT_S = 120.0  # until the job says its own
TICK_S = 0.2
LEFT_OVER_GRACE_S = 2.0  # for processes that outlive their worker
OUTBOX_HIGH_BYTES = (
    1 << 20
)  # above this the workers' pipes are left alone, so a slow reader slows the workers
OUTBOX_LOW_BYTES = 1 << 18


class State(Enum):
    """WAITING for a job; PREPARED to start it; RUNNING it; STOPPING it (nothing new starts); ENDED."""

    WAITING = 1
    PREPARED = 2
    RUNNING = 3
    STOPPING = 4
    ENDED = 5


class Agent:
    """Serves one launcher over stdin and stdout."""

    def __init__(self, folder: PrivateFolder) -> None:
        self._folder = folder
        self._memory = MemoryWatch()
        self._state = State.WAITING
        self._selector = selectors.DefaultSelector()
        self._decoder = Decoder()
        self._outbox = bytearray(MAGIC)
        self._is_connected = True
        self._is_paused = False
        self._heard_at = time.monotonic()
        self._heartbeat_s = FIRST_HEARTBEAT_S
        self._hold_s = 0.0
        self._stack_dumps: dict[Worker, StackDump] = {}
        self._grace_s = LEFT_OVER_GRACE_S
        self._kill_at = float("inf")
        self._num_left_over = 0
        self._told_to_stop_by = 0  # a signal to this process; the launcher did not want this end
        self._workers: list[Worker] = []
        self._job: dict[str, Any] = {}
        self._prepared: Prepared | None = None
        self._starter: Starter | None = None
        self._listener: Listener | None = None
        self._listen_when_prepared: Listen | None = None
        self._wake_read, self._wake_write = os.pipe()

    def run(self) -> None:
        """Until the job is over and nothing of it is left."""
        self._watch_signals()
        for fd in (0, 1):
            os.set_blocking(fd, False)
        self._selector.register(0, selectors.EVENT_READ, self._read_frames)
        self._send(
            Hello(
                hostname=socket.gethostname(),
                python=sys.version.split()[0],
                reached_at=_address_reached(),
                num_devices=count_accelerators(),
                pid=os.getpid(),
            )
        )
        while self._state is not State.ENDED or (self._outbox and self._is_connected):
            for key, _ in self._selector.select(TICK_S):
                act: Callable[[], None] = key.data
                act()
            self._tick()

    # Signals and time.

    def _watch_signals(self) -> None:
        for fd in (self._wake_read, self._wake_write):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        for signum in HANDLED:
            signal.signal(signum, lambda signum, frame: None)  # the wake-up pipe carries the number
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._read_signals)

    def _read_signals(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for number in os.read(self._wake_read, 1024):
                if number not in (signal.SIGCHLD, 0):
                    self._told_to_stop_by = self._told_to_stop_by or number
                    self._stop(self._grace_s)

    def _tick(self) -> None:
        now = time.monotonic()
        if now - self._heard_at > max(self._heartbeat_s, self._hold_s):
            self._hang_up()
        if self._state is State.RUNNING or self._state is State.STOPPING:
            self._send_stacks(now)
            self._collect()
            if self._state is State.RUNNING and all(worker.is_reported for worker in self._workers):
                self._end_left_over()
        if self._state is State.STOPPING:
            self._finish_stopping(now)

    def _collect(self) -> None:
        """Take note of who ended, and say so once all they wrote was passed on."""
        # Of several, those that SIGKILL ended come first: they are what the kernel's counters explain.
        for pid, status in sorted(reap(), key=lambda one: one[1] != signal.SIGKILL):
            for worker in self._workers:
                if worker.pid == pid:
                    worker.end(status)
                    if status:
                        worker.is_out_of_memory, worker.facts = self._memory.explain(
                            pid, status, is_our_kill=self._state is State.STOPPING
                        )
        for worker in self._workers:
            self._report_end_of(worker)

    def _hang_up(self) -> None:
        """The launcher is gone: nobody reads what we write."""
        if self._is_connected:
            self._is_connected = False
            with contextlib.suppress(KeyError):
                self._selector.unregister(0)
            with contextlib.suppress(KeyError):
                self._selector.unregister(1)
            self._outbox.clear()
            self._pause(False)
        self._stop(self._grace_s)

    # Stopping.

    def _stop(self, grace_s: float) -> None:
        """SIGTERM to all workers, SIGKILL to whatever is left after `grace_s`; a second call can only shorten it."""
        kill_at = time.monotonic() + grace_s
        if self._state in (State.STOPPING, State.ENDED):
            self._kill_at = min(kill_at, self._kill_at)
            return
        self._state = State.STOPPING
        self._stop_listening()
        self._kill_at = kill_at
        for worker in self._workers:
            worker.signal(signal.SIGTERM)
            worker.signal(signal.SIGCONT)  # a stopped process takes no other signal

    def _end_left_over(self) -> None:
        """All workers ended by themselves: end what they left running."""
        left_over = descendants(os.getpid())
        self._num_left_over = len(left_over)
        self._state = State.STOPPING
        self._kill_at = time.monotonic() + (LEFT_OVER_GRACE_S if left_over else 0)
        kill_descendants(os.getpid(), signal.SIGTERM)

    def _finish_stopping(self, now: float) -> None:
        if now >= self._kill_at:
            kill_descendants(os.getpid())
            self._collect()
        elif self._kill_at > now + LEFT_OVER_GRACE_S and all(one.status is not None for one in self._workers):
            kill_descendants(os.getpid(), signal.SIGTERM)  # what the workers left; they themselves are gone
            self._kill_at = now + LEFT_OVER_GRACE_S
        if not descendants(os.getpid()) and all(worker.is_reported for worker in self._workers):
            self._state = State.ENDED
            if self._told_to_stop_by:  # so the job did not end well, even if every worker exits with 0
                name = signal.Signals(self._told_to_stop_by).name
                with contextlib.suppress(OSError):
                    os.write(2, b"it got %s, or the process above it was killed\n" % name.encode())
            else:
                self._folder.remove()  # first: the next attempt of the job may follow at once
                self._send(Done(self._num_left_over))

    # Frames.

    def _send(self, frame: Frame) -> None:
        if self._is_connected:
            self._outbox += encode(frame)
            self._flush()

    def _flush(self) -> None:
        try:
            while self._outbox:
                del self._outbox[: os.write(1, self._outbox[: 1 << 18])]
        except BlockingIOError:
            pass
        except OSError:
            self._hang_up()
            return
        is_waiting = 1 in self._selector.get_map()
        if self._outbox and not is_waiting:
            self._selector.register(1, selectors.EVENT_WRITE, self._flush)
        elif is_waiting and not self._outbox:
            self._selector.unregister(1)
        if len(self._outbox) > OUTBOX_HIGH_BYTES:
            self._pause(True)
        elif len(self._outbox) < OUTBOX_LOW_BYTES:
            self._pause(False)

    def _read_frames(self) -> None:
        try:
            data = os.read(0, 1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._hang_up()
            return
        self._heard_at = time.monotonic()
        try:
            for frame in self._decoder.feed(data):
                self._obey(frame)
        except ProtocolError:
            self._hang_up()

    def _obey(self, frame: Frame) -> None:
        if isinstance(frame, Ping):
            self._send(Pong(frame.number, time.monotonic()))
        elif isinstance(frame, Prepare):
            self._prepare(frame.job)
        elif isinstance(frame, Start):
            self._start(frame)
        elif isinstance(frame, Listen):
            self._listen(frame)
        elif isinstance(frame, Reach):
            self._in_background(lambda: Reached(try_addresses(*frame)), self._send)
        elif isinstance(frame, Inspect) and frame.question == "clock":  # a thread would take time
            self._send(answer(*frame))
        elif isinstance(frame, Inspect):
            self._in_background(lambda: answer(*frame), self._send)
        else:
            self._obey_for_workers(frame)

    def _obey_for_workers(self, frame: Frame) -> None:
        if isinstance(frame, Signal):
            for worker in self._workers:
                worker.signal(frame.number, is_for_group=False)
        elif isinstance(frame, AskStacks):
            self._ask_stacks()
        elif isinstance(frame, Hold):
            self._hold_s = frame.for_s
        elif isinstance(frame, Stop):
            self._stop(frame.grace_s)

    # The job.

    def _prepare(self, job: dict[str, Any]) -> None:
        """In a thread, because a --venv_script may take longer than a heartbeat."""
        self._job = job
        self._heartbeat_s = job["heartbeat_s"]
        self._grace_s = job["kill_grace_s"]

        def work() -> Frame:
            try:
                self._prepared = Prepared(job, num_devices=count_accelerators())
                self._starter = Starter(job, self._prepared, self._folder)
                if job.get("save_pid") is not None:
                    self._save_pid(job["save_pid"])
            except Unprepared as problem:
                return Problem(str(problem), problem.exit_code)
            return Ready(self._prepared.master_port, self._prepared.notes + self._starter.notes)

        def finish(answer: Frame) -> None:
            if self._state is State.WAITING and isinstance(answer, Ready):
                self._state = State.PREPARED
                if self._listen_when_prepared is not None:
                    self._listen(self._listen_when_prepared)
            self._send(answer)

        self._in_background(work, finish)

    def _save_pid(self, launcher_pid: int) -> None:
        try:
            self._folder.add_outside(write_pid_file(launcher_pid, os.getpid()))
        except (PidFileInUse, OSError) as error:
            raise Unprepared(
                f"--save_pid: {error}; remove it, or leave the option out", exit_code=3
            ) from None

    def _in_background(self, work: Callable[[], Frame], finish: Callable[[Frame], None]) -> None:
        """Work in a thread; `finish` is called in this one."""
        answers: list[Frame] = []
        done_read, done_write = os.pipe()

        def run() -> None:
            try:
                answers.append(work())
            except Exception as error:  # the end of a thread: whatever it is, the launcher has to hear of it
                _print_traceback()
                answers.append(Problem(f"cannot prepare the job: {type(error).__name__}: {error}", 3))
            finally:
                os.close(done_write)

        def end() -> None:
            self._selector.unregister(done_read)
            os.close(done_read)
            finish(answers[0])

        self._selector.register(done_read, selectors.EVENT_READ, end)
        threading.Thread(target=run, daemon=True).start()

    def _listen(self, asked: Listen) -> None:
        """Let the others try whether they reach this host: at once, or when the job's port is chosen."""
        if not asked.port and self._prepared is None:
            self._listen_when_prepared = asked
            return
        port = asked.port or (self._prepared.master_port if self._prepared else 0)
        try:
            listener = Listener(port, asked.token)
        except OSError as error:
            self._send(Listening(port, [], why_not_listening(port, error)))
            return
        self._stop_listening()
        self._listener = listener
        self._selector.register(listener, selectors.EVENT_READ, listener.accept)
        self._send(Listening(port, own_addresses(), ""))

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None

    def _start(self, start: Start) -> None:
        if self._state is not State.PREPARED or self._prepared is None or self._starter is None:
            return
        self._stop_listening()
        self._state = State.RUNNING
        self._memory = MemoryWatch()
        if start.master_addr:
            self._prepared.env[b"MASTER_ADDR"] = bytes_of(start.master_addr)
            self._prepared.env[b"MASTER_PORT"] = str(start.master_port).encode()
        if self._starter.milestones is not None:
            self._selector.register(self._starter.milestones, selectors.EVENT_READ, self._read_milestones)
        for plan in self._job["ranks"]:
            worker = self._starter.start(plan)
            self._workers.append(worker)
            for stream in worker.streams:
                self._watch(worker, stream)
            self._send(Started(worker.rank, worker.pid))
        self._starter.end()

    def _read_milestones(self) -> None:
        if self._starter is not None and self._starter.milestones is not None:
            for one in self._starter.milestones.read():
                self._send(one)

    def _ask_stacks(self) -> None:
        env = self._prepared.env if self._prepared else {}
        for worker in self._workers:
            if worker.status is None and worker not in self._stack_dumps:
                own_file = self._folder.file(f"spy-{worker.rank}")
                dump = StackDump(worker.pid, file=worker.stacks_file, env=env, own_file=own_file)
                self._stack_dumps[worker] = dump

    def _send_stacks(self, now: float) -> None:
        for worker, dump in list(self._stack_dumps.items()):
            dump.look(now)
            if dump.answer is not None:
                del self._stack_dumps[worker]
                self._send(Stacks(worker.rank, *dump.answer))

    def _watch(self, worker: Worker, stream: Stream) -> None:
        self._selector.register(
            stream.fd,
            selectors.EVENT_READ,
            lambda worker=worker, stream=stream: self._read_output(worker, stream),
        )

    def _pause(self, is_paused: bool) -> None:
        if is_paused == self._is_paused:
            return
        self._is_paused = is_paused
        for worker in self._workers:
            for stream in worker.streams:
                if stream.is_open and is_paused:
                    self._selector.unregister(stream.fd)
                elif stream.is_open:
                    self._watch(worker, stream)

    def _read_output(self, worker: Worker, stream: Stream) -> bool:
        """Pass on what is there; returns whether more may be waiting."""
        if not stream.is_open:
            return False
        text, may_have_more = stream.read()
        if not stream.is_open and not self._is_paused:
            self._selector.unregister(stream.fd)
        if text:
            self._send(Output(worker.rank, stream.number, text_of(text)))
        return may_have_more

    def _report_end_of(self, worker: Worker) -> None:
        """Once a worker has ended, pass on all it wrote and then say how it ended."""
        if worker.status is None or worker.is_reported:
            return
        for stream in worker.streams:
            while not self._is_paused and self._read_output(worker, stream):
                pass
            if stream.is_open:
                return  # goes on at a later tick, when the launcher has read more
        worker.is_reported = True
        is_signaled = os.WIFSIGNALED(worker.status)
        signum = os.WTERMSIG(worker.status) if is_signaled else 0
        code = 128 + signum if is_signaled else os.WEXITSTATUS(worker.status)
        evidence = {}
        if code:
            out, err = (stream.tail for stream in worker.streams)
            evidence = evidence_of(
                worker.status,
                facts=worker.facts,
                is_out_of_memory=worker.is_out_of_memory,
                error_file=worker.error_file,
                out=out,
                err=err,
            )
        self._send(Exited(worker.rank, code, signum, worker.ended_at, evidence))


def _address_reached() -> str:
    """This host's address on the SSH connection the agent was started through."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    return words[2] if len(words) == 4 else ""


def _print_traceback() -> None:
    import traceback  # here: it takes 2 ms, and most agents need none

    traceback.print_exc()


def main() -> None:
    """Be the keeper of an agent."""
    with contextlib.suppress(OSError):
        os.setsid()
    become_subreaper()
    keeper = os.getpid()
    folder = PrivateFolder()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            become_subreaper()
            die_with_parent(keeper, signal.SIGTERM)
            Agent(folder).run()
            status = 0
        except BaseException:
            _print_traceback()  # reaches the launcher as the end of this host's stderr
        finally:
            folder.remove()
            os._exit(status)
    _keep(child, folder)


def _keep(child: int, folder: PrivateFolder) -> None:
    """Outlive the agent, then leave nothing of it behind."""

    def pass_on(signum: int, frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGTERM)

    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, pass_on)
    os.close(0)
    os.close(1)
    status = 1
    while True:
        try:
            pid, ended_with = os.waitpid(-1, 0)
        except ChildProcessError:
            break
        except OSError as error:
            if error.errno != errno.EINTR:
                raise
            continue
        if pid == child:
            status = ended_with
            while kill_descendants(keeper_pid := os.getpid()) or descendants(keeper_pid):
                reap()
                time.sleep(0.01)
            folder.remove()  # again, in case the agent was killed
    os._exit(1 if status else 0)
