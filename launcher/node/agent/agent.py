"""The agent: runs on a node, starts this node's workers, and ends them.

The launcher's death, a cut connection and a lost launcher (no ping for the heartbeat time) reach it as the
end of its input or as silence, and end the job; so does a signal. If the agent itself dies, the keeper ends
the job.
"""

from __future__ import annotations

import os
import sys
import time

from ....shared import variables
from ...wire.frames import (
    AskStacks,
    Chunk,
    Collect,
    Done,
    Frame,
    Hello,
    Hold,
    ImportAhead,
    Inspect,
    Leaving,
    Listen,
    MemoryHosts,
    Note,
    Ping,
    Pong,
    Prepare,
    Problem,
    Reach,
    Reached,
    Ready,
    Renew,
    Resize,
    Signal,
    Start,
    StartAgain,
    Stop,
    SyncFrom,
    SyncOffer,
    Took,
    bytes_of,
)
from ...wire.job import read_job
from ..observe.devices import count_accelerators
from ..system.background import in_background
from ..system.lean_stdlib import Selector, name_of_signal, signal, suppress
from ..system.private_folder import PrivateFolder
from ..workers.ending import LEFT_OVER_GRACE_S, Ending
from ..workers.preparation import Prepared, Unprepared
from ..workers.starter import Starter
from ..workers.worker import HANDLED
from ..workers.worker_group import WorkerGroup
from .reach import try_addresses
from .uplink import Uplink

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ...wire.job import NodeJob
    from ..files.file_traffic import FileThreads
    from ..memory.server import MemoryServer
    from ..observe.gpu_sample import GpuSample
    from ..observe.metrics import MetricsReader
    from ..observe.notice import NoticeWatch
    from ..workers.kept_preloader import KeptPreloader
    from ..workers.server_watch import ServerWatch
    from .open_port import OpenPort

TICK_S = 0.2
METRICS_AFTER_S = 0.5  # after the start, which the first reading would slow down


class AgentState:
    """WAITING for a job; PREPARED to start it; RUNNING it; STOPPING it (nothing new starts); ENDED.

    After ENDED comes WAITING, if another attempt of the job follows.
    """

    WAITING = 1
    PREPARED = 2
    RUNNING = 3
    STOPPING = 4
    ENDED = 5


class Agent:
    """Serves one launcher over stdin and stdout."""

    def __init__(self, folder: PrivateFolder) -> None:
        self._folder = folder
        self._num_devices = count_accelerators()
        self._selector = Selector()
        self._num_jobs = 0  # attempts of the job that this agent began to serve
        self._uplink = Uplink(
            self._selector,
            obey=self._obey,
            pause=lambda is_paused: self._workers.pause(is_paused),
            end=lambda: self._stop(self._grace_s),
        )
        self._files: FileThreads | None = None
        self._memory: MemoryServer | None = None  # snapshots, which outlive the workers
        self._preloader: KeptPreloader | None = None  # for a job that may start again
        self._told_to_stop_by = 0  # the signal that this process got; the launcher did not want this end
        self._was_told_to_go = False  # a signal announced the end of this host
        self._keeper = os.getppid()
        self._wake_read, self._wake_write = os.pipe()
        self._await_job()

    def _await_job(self) -> None:
        """Wait for a job, with nothing left of one before."""
        self._num_jobs += 1
        self._state = AgentState.WAITING
        self._workers = WorkerGroup(self._selector, self._uplink.send)
        self._ending = Ending(
            self._workers, spared=lambda: () if self._preloader is None else self._preloader.pids()
        )
        self._open_port: OpenPort | None = None  # only on the first host
        self._grace_s = LEFT_OVER_GRACE_S
        self._job: NodeJob | None = None
        self._prepared: Prepared | None = None
        self._starter: Starter | None = None
        self._notice: NoticeWatch | None = None
        self._metrics: MetricsReader | None = None
        self._metrics_at = float("inf")  # when the reader of metrics is made
        self._server: ServerWatch | None = None
        self._step = ""  # the step of the preparation that is under way
        self._prepare_by = float("inf")
        self._preload_at = float("inf")  # when the imports of the next attempt are begun

    def run(self) -> None:
        """Serve the launcher until the job is over and nothing of it is left."""
        self._watch_signals()
        self._uplink.send(
            Hello(
                hostname=os.uname().nodename,
                python=sys.version.split()[0],
                reached_at=_address_reached(),
                num_devices=self._num_devices,
                pid=os.getpid(),
                machine=_machine(),
            )
        )
        while self._state != AgentState.ENDED or self._is_awaited:
            self._selector.wait(TICK_S)
            self._tick()

    @property
    def _is_awaited(self) -> bool:
        """Tell whether the launcher may still want something of an agent whose job is over.

        It hangs up when all hosts are done. An agent that ended before would take time from the hosts that
        are not done, where they share something.
        """
        return self._uplink.has_unsent if self._told_to_stop_by else self._uplink.is_connected

    # Signals and time.

    def _watch_signals(self) -> None:
        for fd in (self._wake_read, self._wake_write):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        for signum in HANDLED:
            signal.signal(signum, lambda signum, frame: None)  # the wake-up pipe carries the number
        self._selector.on_read(self._wake_read, self._read_signals)

    def _read_signals(self) -> None:
        with suppress(BlockingIOError):
            for number in os.read(self._wake_read, 1024):
                if self._is_notice(number):
                    self._was_told_to_go = True
                    self._uplink.send(Leaving(f"its agent got {name_of_signal(number)}"))
                elif number not in (signal.SIGCHLD, 0):
                    self._be_told_to_stop(number)

    def _is_notice(self, number: int) -> bool:
        """Tell whether a signal is the first notice that the host must be left soon: the launcher has the job
        save then. A signal that the kernel sends because the keeper died ends the job.
        """
        is_asked = number == signal.SIGTERM and self._state == AgentState.RUNNING and not self._was_told_to_go
        return is_asked and self._job is not None and self._job.is_elastic and os.getppid() == self._keeper

    def _be_told_to_stop(self, number: int) -> None:
        """Tell the launcher that the host wanted this end; the workers end after that."""
        if not self._told_to_stop_by:
            self._told_to_stop_by = number
            why = f"the agent ended: it got {name_of_signal(number)}, or the process above it was killed"
            self._uplink.send(Problem(why, 3))
        self._stop(self._grace_s)

    def _tick(self) -> None:
        now = time.monotonic()
        self._uplink.check_silence(now)
        self._check_preparation(now)
        if self._state == AgentState.RUNNING or self._state == AgentState.STOPPING:
            self._workers.send_stacks(now)
            self._workers.send_prompts(now)
            self._workers.collect(is_our_kill=self._state == AgentState.STOPPING)
            self._look_at_metrics(now)
            if now >= self._preload_at and self._starter is not None:
                self._preload_at = float("inf")
                self._starter.prepare_next()
            if self._server is not None:
                self._look_at_server(self._server, now)
            elif self._notice is not None:
                self._look_at_notice(now)
            elif self._state == AgentState.RUNNING and self._workers.is_told:
                self._state = AgentState.STOPPING
                self._ending.begin_with_left_over()
        if self._state == AgentState.STOPPING and self._ending.go_on(now):
            self._end()

    def _look_at_server(self, server: ServerWatch, now: float) -> None:
        if self._state == AgentState.RUNNING:
            server.look(now)
        else:
            server.end()

    def _look_at_metrics(self, now: float) -> None:
        """Read metrics while a worker runs, and the last ones before the end of the job is reported.

        A failure here ends the metrics, not the job.
        """
        try:
            if self._metrics is not None and self._workers.is_told:
                self._metrics.send(now)
                self._end_metrics()
            elif self._metrics is not None:
                self._metrics.look(now, is_behind=self._uplink.is_behind)
            elif now >= self._metrics_at:
                self._metrics_at = float("inf")
                self._read_metrics()
        except Exception as error:
            self._end_metrics()
            self._uplink.send(Note(f"no more numbers of its workers: {type(error).__name__}: {error}"))

    def _end_metrics(self) -> None:
        metrics, self._metrics = self._metrics, None
        if metrics is not None:
            metrics.close()

    def _read_metrics(self) -> None:
        pipe = self._starter.metrics_pipe if self._starter is not None else None
        if pipe is None or self._job is None or self._workers.is_ended:
            return
        from ..observe.metrics import MetricsReader

        try:
            self._metrics = MetricsReader(
                pipe,
                ranks=[one.rank for one in self._job.ranks],
                interval_s=self._job.metrics_interval_s,
                is_folding=self._job.folds_metrics,
                send=self._uplink.send,
                pids=self._workers.running_pids,
                gpus=self._watch_gpus(self._job.metrics_interval_s),
            )
        except OSError as error:
            self._uplink.send(Note(f"no numbers of its workers will be seen: {pipe}: {error.strerror}"))

    def _watch_gpus(self, interval_s: float) -> GpuSample | None:
        if not self._num_devices or self._prepared is None:
            return None
        from ..observe.gpu_sample import GpuSample

        python = self._prepared.python or sys.executable
        return GpuSample(python, self._prepared.env, interval_s=interval_s, selector=self._selector)

    def _look_at_notice(self, now: float) -> None:
        """Look for a notice while the workers run; its command ends before the left-over processes do."""
        if self._notice is not None and self._state == AgentState.RUNNING and not self._workers.is_told:
            self._notice.look(now)
        elif self._notice is not None:
            self._notice.close()
            self._notice = None

    # The end.

    def _stop(self, grace_s: float) -> None:
        """End the job, or a host without a job; a second call can only shorten the grace time."""
        if self._state in (AgentState.STOPPING, AgentState.ENDED):
            self._ending.hasten(grace_s)
            return
        self._state = AgentState.STOPPING
        self._close_port()
        self._ending.begin(grace_s)

    def _end(self) -> None:
        """Report the end: nothing of the job is left."""
        self._state = AgentState.ENDED
        if self._told_to_stop_by:  # the job did not end well, even if every worker exits with 0
            name = name_of_signal(self._told_to_stop_by)
            with suppress(OSError):
                os.write(2, b"it got %s, or the process above it was killed\n" % name.encode())
        else:
            if self._starter is not None and self._starter.is_tracing:
                self._folder.remove_outside()  # the launcher asks for the traces; they go with this process
            elif self._job is not None and self._job.keeps_agent:
                self._folder.clear()
            else:
                self._folder.remove()  # before Done: the next attempt of the job may follow at once
            self._uplink.send(Done(self._ending.num_left_over))

    def _renew(self) -> None:
        """Be as after Hello. What this agent was told about itself, such as a signal, stays."""
        if self._state not in (AgentState.ENDED, AgentState.PREPARED) or self._told_to_stop_by:
            return
        self._close_port()
        self._workers.end()
        self._end_metrics()
        if self._starter is not None:
            self._starter.close()
        self._folder.clear()
        self._await_job()

    # Frames of the launcher.

    def _obey(self, frame: Frame) -> None:
        if isinstance(frame, Ping):
            self._uplink.send(Pong(frame.number, time.monotonic()))
        elif isinstance(frame, Hold):
            self._uplink.hold_s = frame.for_s
        elif isinstance(frame, Listen):
            self._listen(frame)
        elif isinstance(frame, Reach):
            self._in_background(lambda: Reached(try_addresses(*frame)))
        elif isinstance(frame, Inspect):
            self._inspect(frame)
        elif isinstance(frame, (Chunk, SyncOffer, SyncFrom, Took, Collect)):
            self._move_files(frame)
        elif isinstance(frame, ImportAhead):
            if self._state == AgentState.PREPARED and self._starter is not None:
                self._starter.prepare_next()
        elif isinstance(frame, Renew):
            self._renew()
        else:
            self._obey_for_job(frame)

    def _obey_for_job(self, frame: Frame) -> None:
        if isinstance(frame, Prepare):
            self._prepare(read_job(frame.job))
        elif isinstance(frame, Start):
            self._start(frame)
        elif isinstance(frame, MemoryHosts):
            self._meet_memory(frame)
        elif isinstance(frame, StartAgain):
            if self._server is not None and self._state == AgentState.RUNNING:
                self._end_metrics()  # its processes are no left-over ones
                self._server.start_again(time.monotonic() + frame.after_s)
        elif isinstance(frame, Signal):
            self._workers.signal(frame.number, is_for_group=False)
        elif isinstance(frame, AskStacks):
            self._workers.ask_stacks(self._prepared.env if self._prepared else {}, self._folder)
        elif isinstance(frame, Resize):
            starter = self._starter
            why_not = "" if starter is None else starter.ask_to_end(frame.why, by_disk=frame.by_disk)
            if why_not:
                self._uplink.send(Note(why_not))
        elif isinstance(frame, Stop):
            self._stop(frame.grace_s)

    # These load what they need when they are called: most agents never are.

    def _listen(self, frame: Listen) -> None:
        from .open_port import OpenPort

        if self._open_port is None:
            self._open_port = OpenPort(self._selector, self._uplink.send)
        self._open_port.open(frame, job_port=self._prepared.master_port if self._prepared else None)

    def _close_port(self) -> None:
        if self._open_port is not None:
            self._open_port.close()
        if self._files is not None:
            self._files.end_sync()

    def _move_files(self, frame: Frame) -> None:
        from ..files.file_traffic import FileThreads

        if self._files is None:
            self._files = FileThreads(self._selector, self._uplink.send, own_folder=self._folder.path)
        self._files.take(frame)

    def _inspect(self, frame: Inspect) -> None:
        from ..observe.inspection import answer

        if frame.question == "clock":  # a thread would take time
            self._uplink.send(answer(*frame))
        else:
            self._in_background(lambda: answer(*frame))

    def _in_background(self, work: Callable[[], Frame]) -> None:
        """Send the answer of work that is done in a thread, unless the job is another one by then."""
        number = self._num_jobs
        in_background(
            self._selector,
            work,
            lambda answer: self._uplink.send(answer) if number == self._num_jobs else None,
        )

    # The job.

    def _prepare(self, job: NodeJob) -> None:
        """Prepare in a thread, because a --venv_script may take longer than a heartbeat."""
        self._job = job
        self._uplink.heartbeat_s = job.heartbeat_s
        self._grace_s = job.kill_grace_s
        if job.keeps_agent and self._preloader is None:
            from ..workers.kept_preloader import KeptPreloader

            self._preloader = KeptPreloader()

        def work() -> Frame:
            try:
                self._prepared = Prepared(job, num_devices=self._num_devices, says=self._begin_step)
                self._starter = Starter(
                    job,
                    self._prepared,
                    self._folder,
                    num_devices=self._num_devices,
                    says=self._begin_step,
                    kept=self._preloader,
                )
                if job.save_pid is not None:
                    self._save_pid(job.save_pid)
                memory = self._hold_memory(self._prepared) if job.holds_memory else (0, [])
            except Unprepared as problem:
                return Problem(str(problem), problem.exit_code)
            return Ready(self._prepared.master_port, self._prepared.notes + self._starter.notes, *memory)

        def finish(answer: Frame) -> None:
            self._prepare_by = float("inf")
            if self._state != AgentState.WAITING:  # we ended it on the way, so its failure does not count
                return
            if isinstance(answer, Ready):
                self._state = AgentState.PREPARED
                if self._open_port is not None:
                    self._open_port.choose(answer.master_port)
            self._uplink.send(answer)

        self._prepare_by = time.monotonic() + job.prepare_timeout_s
        in_background(self._selector, work, finish)

    def _begin_step(self, step: str) -> None:
        self._step = step

    def _check_preparation(self, now: float) -> None:
        """Give up a preparation that takes too long, without waiting for its thread: a file system that hangs
        keeps it in the kernel, where nothing ends it.
        """
        if self._state == AgentState.WAITING and now > self._prepare_by and self._job is not None:
            self._prepare_by = float("inf")
            why = (
                f"not prepared within --prepare_timeout={self._job.prepare_timeout_s:g} s: still {self._step}"
            )
            hint = "look at its file systems there, or give it more time"
            self._uplink.send(Problem(f"{why}; {hint}", 3))

    def _hold_memory(self, prepared: Prepared) -> tuple[int, list[str]]:
        """Have a server of snapshots for the workers of this attempt; return its port and addresses."""
        from ..memory.server import MemoryServer
        from ..system.own_addresses import own_addresses

        path = self._folder.file("memory")
        try:
            if path is None:
                raise OSError("no temporary folder can be made")
            if self._memory is None:
                self._memory = MemoryServer()
            self._memory.listen(path)
        except OSError as error:
            prepared.notes.append(f"no snapshots will be kept here: {error.strerror or error}")
            return 0, []
        prepared.env[variables.MEMORY.encode()] = os.fsencode(path)
        return self._memory.port, own_addresses()

    def _meet_memory(self, hosts: MemoryHosts) -> None:
        from ..memory.copier import MemoryPeer

        if self._memory is not None:
            peers = [MemoryPeer(*one) for one in hosts.peers]
            self._memory.meet(hosts.name, peers, hosts.partner, hosts.token)

    def _save_pid(self, launcher_pid: int) -> None:
        from ..system.pid_file import PidFileInUse, write_pid_file

        try:
            self._folder.add_outside(write_pid_file(launcher_pid, os.getpid()))
        except PidFileInUse as error:
            raise Unprepared(
                f"--save_pid: {error}; remove it, or leave the option out", exit_code=3
            ) from None
        except OSError as error:
            raise Unprepared(
                f"--save_pid: {error.filename}: {error.strerror}; let this file be written, or "
                "leave the option out",
                exit_code=3,
            ) from None

    def _start(self, start: Start) -> None:
        if self._state != AgentState.PREPARED or not (self._job and self._prepared and self._starter):
            return
        self._close_port()
        self._state = AgentState.RUNNING
        if start.master_addr:
            self._prepared.env[b"MASTER_ADDR"] = bytes_of(start.master_addr)
            self._prepared.env[b"MASTER_PORT"] = str(start.master_port).encode()
        self._prepared.env.update((bytes_of(name), bytes_of(value)) for name, value in start.env.items())
        self._workers.begin(self._starter.milestones)
        if self._job.is_server:
            self._watch_server(self._job)
        else:
            self._start_workers()

    def _watch_server(self, job: NodeJob) -> None:
        from ..workers.server_watch import ServerWatch

        self._server = ServerWatch(
            job, self._workers, selector=self._selector, send=self._uplink.send, start=self._start_workers
        )
        self._server.begin(time.monotonic())

    def _start_workers(self) -> None:
        if not (self._job and self._prepared and self._starter):
            return
        for rank in self._job.ranks:
            try:
                self._workers.add(self._starter.start(rank))
            except OSError as error:
                self._give_up_start(rank.rank, error)
                return
        self._starter.end()
        self._workers.watch_memory()
        self._metrics_at = time.monotonic() + METRICS_AFTER_S
        if self._preloader is not None:
            from ..workers.kept_preloader import MAKE_AFTER_S

            self._preload_at = time.monotonic() + MAKE_AFTER_S
        if self._job.notice_file is not None or self._job.notice_command is not None:
            self._watch_notice(self._job, self._prepared.env)

    def _watch_notice(self, job: NodeJob, env: dict[bytes, bytes]) -> None:
        from ..observe.notice import NoticeWatch

        self._notice = NoticeWatch(
            file=job.notice_file,
            command=job.notice_command,
            env=env,
            leave=lambda why: self._uplink.send(Leaving(why)),
            note=lambda text: self._uplink.send(Note(text)),
        )

    def _give_up_start(self, rank: int, error: OSError) -> None:
        """End the started workers: a limit of this host was met in the middle."""
        from ..system.limits import why_not_started

        who = "the server" if self._server is not None else f"rank {rank}"
        why = why_not_started(who, error) or f"cannot start {who}: {error}"
        self._uplink.send(Problem(why, 3))
        self._stop(self._grace_s)


def _machine() -> str:
    """Return an identity that only this host has: its boot, and the container on it."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.uname().nodename}"
    except OSError:
        return ""


def _address_reached() -> str:
    """Address of this host on the SSH connection that the agent was started through."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    return words[2] if len(words) == 4 else ""
