"""Files as phases of a job: to each host before it prepares, and back when its workers have ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..errors import EXIT_HOST, EXIT_MISTAKE
from ..job.plan import Plan
from ..job.trace_ranks import traced_ranks
from ..job.verdict import Failure, HostFailure
from ..output.console import Console
from ..sync.sync_job import SyncJob, root_on
from ..wire.frames import (
    Chunk,
    Collected,
    Found,
    Frame,
    Pong,
    ProtocolError,
    Synced,
    SyncWant,
    Took,
    bytes_of,
)
from ..wording import shown_size
from .link import LinkEnd
from .roster import HostState

if TYPE_CHECKING:
    from ..sync.collector import Collector
    from ..sync.sender import Sender

MAX_PROBLEMS = 5


class FileTraffic:
    """The files of one attempt. If this machine cannot send the files, the fault is added to `failures`, and
    `stop` is called to end the job.
    """

    def __init__(
        self,
        job: SyncJob | None,
        console: Console,
        plan: Plan,
        stop: Callable[[Failure], None],
        failures: Sequence[Failure],
    ) -> None:
        job = job or SyncJob()
        self._console = console
        self._cwd = bytes_of(plan.cwd)
        self._trace = job.trace
        # Collectors, asked one after the other for each host.
        self._collectors = [] if job.collector is None else [job.collector]
        if job.trace is not None:
            self._collectors.append(job.trace.collector)
        for one in self._collectors:
            one.begin()
        self._current: dict[HostState, Collector] = {}  # the collector that gets the host's files now
        self._manifest = job.manifest
        self._sender: Sender | None = None
        if job.manifest is not None:
            from ..sync.sender import Sender

            self._sender = Sender(
                job.manifest,
                num_hosts=len(plan.all_nodes),
                limit_s=plan.prepare_timeout_s,
                fail=self._fail,
                is_forced=job.is_forced,
            )
        self._stop = stop
        self._failures = failures
        self._failure: Failure | None = None
        self._limit_s = plan.prepare_timeout_s
        self._prepare: dict[HostState, Callable[[], None]] = {}
        self._started: list[HostState] = []  # hosts that files come from
        self._heard_at: dict[HostState, float] = {}

    def begin(self, host: HostState, prepare: Callable[[], None]) -> None:
        """Send the folder to the host, then let it prepare."""
        if self._sender is None or self._manifest is None or host.plan.is_local:
            prepare()
            return
        self._prepare[host] = prepare
        root = root_on(host.plan.host, self._manifest.root, self._cwd)
        address = host.hello.reached_at if host.hello is not None else ""
        self._sender.offer(host, root, [address] if address else [])

    @property
    def is_syncing(self) -> bool:
        return self._sender is not None

    def is_synced(self, host: HostState) -> bool:
        return host.hello is not None and (self._sender is None or self._sender.is_done(host))

    def has_failed(self) -> bool:
        """Tell whether the job ends because the files here cannot be sent."""
        return self._failure is not None and self._failure in self._failures

    def _fail(self, message: str, name: str = "this machine", exit_code: int = EXIT_MISTAKE) -> None:
        """Note a failure. May be called from any thread; only the first failure counts."""
        if self._failure is None:
            self._failure = HostFailure(name, message, time.monotonic(), exit_code)
            self._stop(self._failure)

    def look(self, now: float) -> None:
        """Give up transfers that stand still: a hanging file system stops a thread, not its heartbeat."""
        sender = self._sender
        hint = "look at its file systems, or give it more time"
        for host in self._prepare:
            if sender is not None and not host.is_over and sender.is_stuck(host, now):
                why = f"--sync: nothing has moved there for --prepare_timeout={self._limit_s:g} s"
                self._fail(f"{why}; {hint}", host.name, EXIT_HOST)
        stuck_file = "" if sender is None or not self._prepare else sender.stuck_file(now)
        if stuck_file:
            why = f"--sync: {stuck_file} could not be read for --prepare_timeout={self._limit_s:g} s"
            self._fail(f"{why}; {hint}")
        for host in self._started:
            if self.is_asked(host) and not host.is_over and self._heard_at[host] < now - self._limit_s:
                self._console.warn(
                    f"{self._current[host].option}: {host.name}: nothing has come for "
                    f"--prepare_timeout={self._limit_s:g} s, so the rest stays there; look at its "
                    "file systems, or give it more time"
                )
                self._give_up(host)

    def named(self, phase: str) -> str:
        """Return the phase's name in the line that counts the hosts."""
        if self._sender is None or phase != "synced":
            return phase
        return f"{phase}, {shown_size(self._sender.num_sent)} sent"

    def end_sync(self) -> None:
        """End the sync: all hosts have the folder, or the job is given up."""
        if self._sender is not None:
            self._sender.close()

    def say_synced(self) -> None:
        if self._sender is not None:
            for note in self._sender.notes():
                self._console.say(note)
            summary = self._sender.summary()
            if summary:
                self._console.say(summary)

    def receive(self, host: HostState, item: Frame) -> None:
        """Take a frame in the host's own thread, so that only this host waits for our disk.

        Errors: ProtocolError if the host was not asked for files
        """
        collector, sender = self._current.get(host), self._sender
        if isinstance(item, Took) and sender is not None and sender.is_asked(host):
            sender.grant(host, item.num_bytes)
        elif isinstance(item, Found | Chunk) and collector is not None and collector.is_asked(host):
            self._heard_at[host] = time.monotonic()
            if isinstance(item, Found):
                collector.receive_name(host, item)
            else:
                collector.receive_piece(host, item.data)
                host.send(Took(len(item.data)))
        elif not isinstance(item, Took):
            raise ProtocolError(f"its agent sent {type(item).__name__} without being asked")

    def take(self, host: HostState, item: Frame | LinkEnd) -> str:
        """Deal with a frame about files, and ignore any other; return the error that the frame reports, else
        "".
        """
        if isinstance(item, SyncWant | Synced):
            if self._sender is None or not self._sender.is_asked(host):
                return f"its agent sent {type(item).__name__} without being asked"
            if isinstance(item, SyncWant):
                why_not = self._sender.want(host, item)
                return f"its agent wants {why_not}" if why_not else ""
            self._sender.end(host, item)
            self._prepare.pop(host)()
        elif isinstance(item, Collected):
            collector = self._current.get(host)
            if collector is None or not collector.is_asked(host):
                return "its agent sent Collected without being asked"
            collector.end(host, item)
            host.is_over = not self._ask_next(host)
        return ""

    def collect(self, host: HostState) -> bool:
        """Begin to collect this host's files, as its workers have ended; return whether files are still to
        come.
        """
        if not host.pids or not self._ask_next(host):
            return False
        self._started.append(host)
        return True

    def _ask_next(self, host: HostState) -> bool:
        """Ask the host for the files of the next collector; return whether there is another one."""
        wanted = [one for one in self._collectors if self._is_wanted(one, host)]
        last = self._current.get(host)
        left = wanted if last is None else wanted[wanted.index(last) + 1 :]
        if not left:
            return False
        self._current[host] = left[0]
        self._heard_at[host] = time.monotonic()
        left[0].ask(host)
        return True

    def _is_wanted(self, collector: Collector, host: HostState) -> bool:
        """Tell whether the host has files for this collector: traces are only on hosts of traced ranks."""
        is_trace = self._trace is not None and collector is self._trace.collector
        return not is_trace or bool(traced_ranks(host.plan))

    def note_clock(self, host: HostState, item: Pong, at_s: float) -> None:
        """Note what the host's clock and ours showed at one moment; with that the host's times are compared
        with others.
        """
        number, sent_at = host.pinged
        if self._trace is not None and number == item.number and traced_ranks(host.plan):
            self._trace.clock_of(host.name).add(sent_at=sent_at, at=item.at, heard_at=at_s)

    def is_asked(self, host: HostState) -> bool:
        """Tell whether files of this host are still to come."""
        return host in self._current and self._current[host].is_asked(host)

    def waits_for_files(self, interrupts: Sequence[int]) -> bool:
        """Tell whether files are still to come; a second request to end gives them up."""
        waiting = [one for one in self._started if self.is_asked(one) and not one.is_over]
        if len(interrupts) > 1:
            for host in waiting:
                self._give_up(host)
            return False
        return bool(waiting)

    def _give_up(self, host: HostState) -> None:
        """Take no more files of this host; from now on the end of its link counts as for any other host."""
        host.is_over = True
        host.link.abandon()

    def say_collected(self, hosts: Sequence[HostState]) -> None:
        """Report the collected files at the end."""
        if not (self._started or any(host.pids for host in hosts)):
            return  # no worker has run, so there can be no files
        for host in self._started:
            if self.is_asked(host):
                self._current[host].lose(host)
        for collector in self._collectors:
            self._say(collector, hosts)

    def _say(self, collector: Collector, hosts: Sequence[HostState]) -> None:
        option = collector.option
        for host in hosts:
            if host.pids and host not in self._started and self._is_wanted(collector, host):
                what = "what its workers wrote, for it was lost before they had ended"
                self._console.warn(f"{option}: not brought: {host.name}: {what}")
        for problem in collector.problems[:MAX_PROBLEMS]:
            self._console.warn(f"{option}: not brought: {problem}")
        if len(collector.problems) > MAX_PROBLEMS:
            self._console.warn(f"{option}: not brought: {len(collector.problems) - MAX_PROBLEMS} more")
        if self._trace is not None and collector is self._trace.collector:
            return  # the traces are reported when they are merged
        for line in collector.renamed:
            self._console.say(line)
        self._console.say(collector.summary)
