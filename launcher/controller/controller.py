"""Drives the agents of one job: connect to all, prepare all, start all, and at the first failure stop all.

One thread per host connects and reads; everything else happens in the thread that calls `run`, which takes
one event after the other. Nothing starts anywhere before every host is ready.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from typing import NamedTuple

from ..backends.bootstrap import AgentParts
from ..backends.channel import Channel
from ..errors import EXIT_MISTAKE
from ..job.plan import NodePlan, Plan, job_of, origins_of
from ..job.verdict import (
    Failure,
    HangFailure,
    HostFailure,
    RankFailure,
    Verdict,
    lost_peer,
    rank_failure,
    verdict_of,
)
from ..options.start import CONNECT_WINDOW
from ..output.console import Console
from ..sync.sync_job import SyncJob
from ..wire.frames import (
    Chunk,
    Done,
    Exited,
    Found,
    Frame,
    Healthy,
    Hello,
    Leaving,
    Listening,
    Milestone,
    Note,
    Output,
    Pong,
    Prepare,
    Problem,
    ProtocolError,
    Reached,
    Ready,
    Stacks,
    Start,
    Started,
    Stop,
    Took,
)
from ..wire.job import as_json
from .address_search import AddressSearch
from .file_traffic import FileTraffic
from .job_signals import watch
from .lasting import Lasting
from .link import LinkEnd
from .memory_hosts import introduce
from .output_watch import OutputWatch
from .peers import PeerEvent, Peers, PeerTalk
from .protocol_check import Phase, contradiction
from .resizing import HostWatch, Resizing
from .roster import AgentEvent, HostState, Roster
from .running_job import RunningJob
from .servers import Servers
from .silence import Silence
from .timings import DECIDED, DETECTED, STOPPED, Timings

HELLO_TIMEOUT_S = 60.0  # from an open connection to the agent's first word
STOP_MARGIN_S = 10.0  # for the agents to answer, after the workers' grace
HANG_GRACE_S = 1.0  # for the workers of a job that hangs
# To hear how a rank ended that others have lost; torch takes some tenths of a second to leave
CAUSE_WAIT_S = 1.0
POLL_S = 0.2
# For an answer that a host must work for, while its heartbeat goes on: looking up names may be slow
ANSWER_TIMEOUT_S = 120.0
SILENCE_LOOKS = 20.0  # number of looks at all hosts in one heartbeat time


class _SignalReceived(NamedTuple):
    number: int


class Controller:
    """Runs one plan once."""

    def __init__(
        self,
        plan: Plan,
        *,
        connect: Callable[[NodePlan], Channel],
        console: Console,
        window: int = CONNECT_WINDOW,
        peers: Peers | None = None,
        watch: HostWatch | None = None,
        files: SyncJob | None = None,
        lasting: Lasting = Lasting(),  # noqa: B008 - it cannot change
    ) -> None:
        self._plan = plan
        self._console = console
        self._events: queue.SimpleQueue[AgentEvent | _SignalReceived | PeerEvent] = queue.SimpleQueue()
        self._roster = Roster(
            plan.all_nodes,
            connect=connect,
            silence_s=plan.heartbeat_s,
            hello_timeout_s=HELLO_TIMEOUT_S,
            enter_timeout_s=plan.prepare_timeout_s,
            window=window,
            parts=AgentParts(moves_files=files is not None, holds_memory=bool(plan.snapshot_every)),
        )
        self._kept = lasting.kept
        self._search = AddressSearch(plan, self._roster, console)
        self._failures: list[Failure] = []
        self._job = RunningJob(self._roster, console, plan, self._failures, lasting.limits)
        self._servers = Servers(self._roster, console, plan)
        self._resizing = Resizing(self._roster, console, watch, plan)
        self._peers = PeerTalk(peers)
        self._timings = Timings(plan.world_size, tell=self._job.phase)
        self._output = OutputWatch(console, self._failures)
        self._files = FileTraffic(files, console, plan, self.stop, self._failures)
        self._silence = Silence(self._roster, self._failures, self._fail_host, heartbeat_s=plan.heartbeat_s)
        self._ended_well: dict[int, float] = {}  # the time of the end, by rank
        self._interrupts: list[int] = []
        # The signal that ended the job, unless a failure ended it before
        self._interrupted_by: int | None = None
        self._look_at = self._look_for_silence_at = 0.0
        self._heard_at = 0.0  # time at which the last handled event arrived
        self._announced = ""  # the reported reason why the job was stopped; empty if none was
        self._started_at: float | None = None
        self._stopped_at: float | None = None
        self._kill_at = float("inf")

    def run(self) -> Verdict:
        """Run from nothing to a verdict; then no process of the job is left on any host that answers.

        Errors: LaunchError if the log files cannot be made; nothing has started then
        """
        self._console.begin(origins_of(self._plan))
        with watch(lambda one: self._events.put(_SignalReceived(one)), last_act=self._console.abandoned):
            try:
                self._run_phases()
                self._stop_and_wait()
                self._timings.mark(STOPPED)
                self._files.say_collected(self._roster.hosts)
                self._wait_for_peers()
                if self._kept is not None and not self._interrupts:
                    self._roster.keep(self._kept)
            finally:
                self._files.end_sync()
                self._roster.close()
        verdict = verdict_of(
            self._failures,
            stopped_at=self._stopped_at,
            interrupted_by=self._interrupted_by,
            phases_s=self._timings.all_s(),
            started_at=self._started_at,
            ended_well=self._ended_well,
            announced=self._announced,
        )
        change = "" if self._is_failing() else self._resizing.change
        end_s = {} if verdict.culprit is None else self._timings.end_s(verdict.culprit.at_s)
        return verdict._replace(
            change=change,
            leaving=self._resizing.leaving,
            servers=self._servers.ends,
            end_s=tuple(end_s.items()),
            has_trained=self._job.has_trained,
        )

    # Messages of the peers, the controllers of other nodes, from any thread.

    def allow_start(self) -> None:
        """Allow the start: all peers are ready."""
        self._events.put(PeerEvent(is_start_allowed=True))

    def stop(self, failure: Failure) -> None:
        """Stop for a failure elsewhere; its `at_s` is on our clock."""
        self._events.put(PeerEvent(failure))

    def finish(self) -> None:
        """Take the peers for finished: no more events come from them."""
        self._events.put(PeerEvent(is_finished=True))

    # The phases. After each one: a failure, or an interrupt, ends them.

    def _run_phases(self) -> None:
        for phase in (
            self._connect,
            self._find_master,
            self._find_servers,
            self._wait_for_start,
            self._start_servers,
            self._start,
        ):
            phase()
            if self._is_failing():
                return

    def _connect(self) -> None:
        self._timings.begin()
        self._roster.begin(self._deliver_for, kept=self._kept)
        self._wait("connected", lambda host: host.hello is not None, is_phase=False)
        if not self._is_failing():
            self._timings.end("connected", max(host.link.opened_at or 0.0 for host in self._roster))
            self._timings.end("agent")
        if self._files.is_syncing:
            self._wait("synced", self._files.is_synced, is_over=self._files.has_failed)
            self._files.end_sync()
        # A host is asked to prepare as soon as it is connected, so it may fail before the last one is
        # connected: wait for the answers of all.
        self._wait("prepared", lambda host: host.ready is not None, is_over=self._files.has_failed)

    def _find_master(self) -> None:
        """Find the address at which all others reach node 0; a node that does not reach it has failed."""
        self._files.say_synced()
        for note in self._roster.notes():
            self._console.say(note)
        self._search.begin()
        self._end_search(is_phase=True)
        self._servers.master_addr = self._search.address

    def _find_servers(self) -> None:
        """Find the address at which the trainers reach each server."""
        for host in self._servers.hosts:
            if self._is_failing():
                return
            self._search.begin_for(host.plan, *self._servers.names_of(host))
            self._end_search(is_phase=False)
            self._servers.found(host, self._search.address)

    def _end_search(self, *, is_phase: bool) -> None:
        """Wait for the end of the search, and report what it found."""
        while not self._search.is_over() and not self._is_failing():
            self._wait(
                "reached",
                self._search.is_answered,
                is_over=self._search.is_over,
                timeout_s=ANSWER_TIMEOUT_S,
                is_phase=is_phase,
            )
        self._search.report(lambda host, why: self._fail_host(host, why, time.monotonic()))

    def _wait_for_start(self) -> None:
        self._peers.ready()
        while not self._peers.is_start_allowed and not self._is_failing():
            self._take_event()

    def _start_servers(self) -> None:
        """Start the servers, and wait until they are healthy."""
        if self._servers.is_there:
            self._servers.start()
            self._wait("healthy", self._servers.is_ready, is_patient=False)

    def _start(self) -> None:
        first = self._roster.hosts[0].ready
        port = (first.master_port if first else 0) or self._plan.master.port
        of_memory = introduce(self._roster, self._plan, self._console)
        start = Start(self._servers.master_addr, port, {**self._servers.variables(), **of_memory})
        self._started_at = time.monotonic()
        for host in self._roster:
            if not host.is_started:
                host.start(start)
        self._wait("started", lambda host: len(host.pids) == len(host.ranks), is_patient=False)
        self._console.end_progress(is_up=not self._is_failing())
        self._wait("ended", lambda host: host.is_over, is_patient=False)

    def _wait(
        self,
        phase: str,
        is_there: Callable[[HostState], bool],
        *,
        is_patient: bool = True,
        is_over: Callable[[], bool] = lambda: False,
        timeout_s: float = float("inf"),
        is_phase: bool = True,
    ) -> None:
        """Wait until every host has reached this phase, or no longer can.

        A failure ends the wait; a patient wait first hears every host's answer. `is_phase`: the end of this
        wait ends a phase of the start. Without a timeout: docs/design/waits.md has the limits of the wait
        for each host.
        """
        began = time.monotonic()
        missing = {  # a dict as a set that keeps its order
            host: None for host in self._roster if not is_there(host) and not (is_patient and host.has_failed)
        }
        shown_at = 0.0
        while missing and not self._interrupts and not (self._is_failing() and not is_patient):
            if is_over():
                break
            if time.monotonic() - began > timeout_s:
                self._fail_missing(phase, missing, timeout_s)
                break
            if time.monotonic() - shown_at >= POLL_S:
                shown_at = time.monotonic()
                self._show_progress(phase, missing, began)
            for host in self._take_event():
                if is_there(host) or (is_patient and host.has_failed):
                    missing.pop(host, None)
        if is_phase and not self._is_failing():
            # The event's time, not the present: we may have been busy with output since
            self._timings.end(phase, self._heard_at)

    def _fail_missing(self, phase: str, missing: dict[HostState, None], timeout_s: float) -> None:
        first = self._roster.hosts[0]
        # If the first host is missing, the others may only wait for it
        for host in (first,) if first in missing else missing:
            why = f"its agent did not answer within {timeout_s:g} s, and the job waits for all to be {phase}"
            self._fail_host(host, why, time.monotonic())

    def _show_progress(self, phase: str, missing: dict[HostState, None], began_at: float) -> None:
        if phase == "started":
            num_up = self._roster.num_up - self._servers.num_up
            self._console.progress_of_workers(num_up, self._plan.world_size, began_at)
        elif phase == "healthy":
            self._console.progress_of(self._servers.progress(), began_at)
        elif phase != "ended":
            self._roster.show_progress(self._console, self._files.named(phase), [*missing], began_at)

    # Events.

    def _deliver_for(self, host: HostState) -> Callable[[Frame | LinkEnd, float], None]:
        def deliver(item: Frame | LinkEnd, at_s: float) -> None:
            # Shown in this thread: a console that blocks must not hold up the events
            if isinstance(item, Output):
                why_not = self._contradiction(host, item)
                if why_not:
                    raise ProtocolError(why_not)
                self._job.heard_output(at_s)
                self._timings.heard_output(at_s)
                self._console.output(item.rank, item.stream, item.text, host.link.grant)
            elif isinstance(item, Chunk | Found | Took):
                self._files.receive(host, item)
            else:
                self._events.put(AgentEvent(host, item, at_s))

        return deliver

    def _take_event(self) -> list[HostState]:
        """Deal with the next event; return the hosts with news, so that not all have to be looked at."""
        changed: list[HostState] = []
        self._silence.look_for_standstill()
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + POLL_S
            self._output.look(self._interrupts)
            self._job.look(started_at=None if self._stopped_at else self._started_at)
            self._resizing.look(is_running=self._is_running)
            self._files.look(now)
            self._look_at_servers()
        if now >= self._look_for_silence_at:
            self._look_for_silence_at = now + max(POLL_S, self._plan.heartbeat_s / SILENCE_LOOKS)
            changed += self._silence.look()
        try:
            event = self._events.get(timeout=POLL_S)
        except queue.Empty:
            return changed
        if isinstance(event, _SignalReceived):
            self._receive(event.number)
        elif isinstance(event, PeerEvent):
            self._hear(event)
        else:
            self._heard_at = event.at_s
            self._handle(event.host, event.item, event.at_s)
            changed.append(event.host)
        if self._failures:
            self._timings.mark(DETECTED)
        self._tell_peers()
        return changed

    def _look_at_servers(self) -> None:
        if self._is_failing() or self._stopped_at is not None:
            return
        failure = self._servers.look()
        if failure is not None:
            self._failures.append(failure)
        else:
            self._servers.end_with_trainers()

    def _handle(self, host: HostState, item: Frame | LinkEnd, at_s: float) -> None:
        if host.is_over:
            return
        why_not = self._contradiction(host, item) or self._files.take(host, item)
        if why_not:
            self._fail_host(host, why_not, at_s)
            return
        self._job.record(host, item, at_s)
        if isinstance(item, Hello):
            self._greet(host, item)
        elif isinstance(item, Ready):
            host.ready = item
            self._search.prepare(host)
        elif isinstance(item, Listening | Reached):
            self._search.take(host, item)
        elif isinstance(item, Problem):
            who = f"{host.plan.role}: " if host.plan.role else ""
            self._fail_host(host, who + item.message, at_s, exit_code=item.exit_code)
        elif isinstance(item, Pong):
            host.clock_offset_s = min(host.clock_offset_s, at_s - item.at)
            self._files.note_clock(host, item, at_s)
        elif isinstance(item, Started | Exited | Healthy | Stacks | Milestone):
            self._handle_worker(host, item, at_s)
        elif isinstance(item, Leaving | Note):
            self._resizing.hear(host, item)
        elif isinstance(item, Done):
            host.is_done = True
            host.is_over = not self._files.collect(host)
            self._job.warn_of_left_over(host, item.left_over)
        elif isinstance(item, LinkEnd) and not self._connects_anew(host):
            self._silence.lose_host(host, item, at_s)

    def _connects_anew(self, host: HostState) -> bool:
        """Tell whether a host is connected once more, as its kept agent was gone before it was asked."""
        is_starting = self._stopped_at is None and not self._is_failing() and not self._files.is_syncing
        return is_starting and self._roster.connect_anew(host)

    def _greet(self, host: HostState, hello: Hello) -> None:
        """Ask a host whose agent has just started to prepare, while others are still being connected."""
        twin = self._roster.greet(host, hello)
        if twin is not None:
            shared = ", ".join(one for one in host.plan.devices if one in twin.plan.devices)
            why = (
                f"{host.name} and {twin.name} are one machine, {hello.hostname}, and both have slot {shared}"
            )
            hint = "give a machine one line in the hostfile, or lines with different devices="
            self._fail_host(host, f"{why}; {hint}", time.monotonic(), exit_code=EXIT_MISTAKE)
            return
        host.ping(0)
        self._files.begin(host, lambda: host.send(Prepare(as_json(job_of(self._plan, host.plan)))))
        self._console.debug(
            f"{host.name}: agent {hello.pid}, Python {hello.python}, {hello.num_devices} GPUs"
        )
        if host.plan.node_rank == 0:
            self._search.greet_first(hello)

    def _handle_worker(
        self, host: HostState, item: Started | Exited | Healthy | Stacks | Milestone, at_s: float
    ) -> None:
        if isinstance(item, Started):
            host.pids[item.rank] = item.pid
            self._console.debug(f"{host.name}: {host.plan.role or f'rank {item.rank}'} is process {item.pid}")
            self._servers.has_started(host, item)
        elif isinstance(item, Healthy):
            self._servers.hear(host, item)
        elif isinstance(item, Stacks):
            self._job.take_stacks(item)
        elif isinstance(item, Milestone):
            self._timings.take(item.rank, item.name, min(at_s, item.at + host.clock_offset_s))
        else:
            self._handle_exit(host, item, at_s)

    def _handle_exit(self, host: HostState, item: Exited, at_s: float) -> None:
        host.exit_codes[item.rank] = item.code
        failure = rank_failure(
            item,
            local_rank=next(one.local_rank for one in host.plan.ranks if one.rank == item.rank),
            host=host.name,
            pid=host.pids.get(item.rank, 0),
            at_s=min(at_s, item.at + host.clock_offset_s),
            place=self._plan.place_of(item.rank),
            role=host.plan.role,
        )
        if host.plan.role:
            is_running = not self._is_failing() and self._stopped_at is None
            ended = self._servers.failure_by(host, failure, is_running=is_running)
            if ended is None:
                return
            failure = ended
        elif item.code == 0:
            self._ended_well[item.rank] = failure.at_s
            return
        elif self._resizing.takes_end(item.code):
            return
        self._console.failed()
        self._failures.append(failure)

    def _contradiction(self, host: HostState, item: Frame | LinkEnd) -> str:
        if isinstance(item, LinkEnd):
            return ""
        phase = Phase.RUNNING if host.is_started else Phase.PREPARING
        if self._stopped_at is not None:
            phase = Phase.STOPPING
        return contradiction(
            item,
            phase=Phase.CONNECTING if host.hello is None else phase,
            ranks=host.ranks,
            num_ended=len(host.ranks if host.plan.role else host.exit_codes),
            is_first=host.plan.node_rank == 0 or bool(host.plan.role),
        )

    def _fail_host(
        self, host: HostState, message: str, at_s: float, *, exit_code: int = 3, is_way_lost: bool = False
    ) -> None:
        host.has_failed = True
        self._failures.append(
            HostFailure(
                host=host.name, message=message, at_s=at_s, exit_code=exit_code, is_way_lost=is_way_lost
            )
        )
        self._roster.leave(host)
        if host.plan.node_rank == 0:
            self._search.lose_first()

    def _receive(self, number: int) -> None:
        """Take a signal to this process."""
        if not self._job.obey(number, has_peers=self._peers.is_there):
            self._interrupts.append(number)

    def _hear(self, event: PeerEvent) -> None:
        """Take an event of the peers."""
        self._peers.hear(event)
        if event.failure is not None:
            self._tell_peers()
            self._failures.append(event.failure)
            self._peers.knows(len(self._failures))

    def _tell_peers(self) -> None:
        self._peers.tell(self._failures, self._interrupts, stopped_at=self._stopped_at)

    @property
    def _is_running(self) -> bool:
        return self._started_at is not None and self._stopped_at is None and not self._is_failing()

    def _is_failing(self) -> bool:
        return bool(self._failures or self._interrupts)

    # The end.

    def _stop_and_wait(self) -> None:
        """Tell every host to stop, unless all workers ended well; wait until no host has a process left."""
        self._console.end_progress(is_stopping=not self._roster.is_over)
        if self._roster.is_over:
            return
        self._wait_for_cause()
        grace_s = self._plan.kill_grace_s if self._roster.num_up else 0.0
        if any(isinstance(one, HangFailure) for one in self._failures):
            grace_s = min(grace_s, HANG_GRACE_S)  # what stands still does not save
        if len(self._interrupts) > 1:
            grace_s = 0.0
        self._stopped_at = time.monotonic()
        self._timings.mark(DECIDED)
        self._interrupted_by = self._interrupts[0] if self._interrupts and not self._failures else None
        self._announced = self._job.announce_stop(
            grace_s, self._failures, self._interrupted_by, has_started=self._started_at is not None
        )
        self._stop_all(grace_s)
        running = {host: None for host in self._roster if not host.is_over}
        while running and (
            self._files.waits_for_files(self._interrupts) or time.monotonic() <= self._kill_at + STOP_MARGIN_S
        ):
            num_interrupts = len(self._interrupts)
            for host in self._take_event():
                if host.is_over:
                    running.pop(host, None)
            if len(self._interrupts) > max(1, num_interrupts):
                self._console.say("killing all workers now")
                self._stop_all(0.0)
        for host in running:
            if not host.is_over and not self._files.is_asked(host):
                self._fail_host(host, "its agent did not confirm that the workers ended", time.monotonic())

    def _wait_for_cause(self) -> None:
        """Wait a moment for the cause: a rank that lost contact with another may fail before the other's end
        is known here.
        """
        until = time.monotonic() + CAUSE_WAIT_S
        while (
            time.monotonic() < until
            and self._roster.num_running
            and not (self._ended_well or self._interrupts)
            and all(isinstance(one, RankFailure) and lost_peer(one) for one in self._failures)
        ):
            self._take_event()

    def _stop_all(self, grace_s: float) -> None:
        self._kill_at = time.monotonic() + grace_s
        for host in self._roster:
            if host.hello is not None:
                host.send(Stop(grace_s))
            elif not host.is_over:
                self._roster.leave(host)  # nothing runs on this host yet; to end its stream is enough

    def _wait_for_peers(self) -> None:
        """Wait until the peers' parts of the job have ended: their failures count for this part, too. A
        second interrupt ends the wait.
        """
        if not self._peers.is_there:
            return
        self._tell_peers()
        self._peers.ended()
        num_interrupts = max(1, len(self._interrupts))
        while not self._peers.is_finished and len(self._interrupts) <= num_interrupts:
            self._take_event()
        if self._interrupts and not self._failures:
            self._interrupted_by = self._interrupts[0]
