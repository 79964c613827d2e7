"""Drives the agents of one job: connect to all, prepare all, start all, and at the first failure stop all.

One thread per host connects and reads; everything else happens in the thread that calls `run`, which takes one event
after the other. Nothing starts anywhere before every host is ready.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from .channel import Channel
from .console import Console
from .endpoint import master_address
from .frames import (
    AskStacks,
    Done,
    Exited,
    Frame,
    Hello,
    Hold,
    Listening,
    Milestone,
    Output,
    Ping,
    Pong,
    Prepare,
    Problem,
    Reached,
    Ready,
    Signal,
    Stacks,
    Start,
    Started,
    Stop,
    encode,
)
from .job_signals import ASKING, PASSED_ON, STOPPING, stop_until_continued, watch
from .link import Link, LinkEnd
from .plan import NodePlan, Plan, job_of, origins_of
from .reachability import MasterSearch
from .stacks import StackWatch
from .timings import Timings
from .verdict import Failure, HostFailure, OutputFailure, Verdict, judge, rank_failure, signal_name

CONNECT_WINDOW = 64  # connections being made at the same time
STOP_MARGIN_S = 10.0  # beyond the workers' grace, for the agents to answer
HOLD_S = 3600.0  # for which the workers run on while this process is stopped
HOLD_DRAIN_S = 1.0
POLL_S = 0.2
SILENCE_LOOKS = 20.0  # at all hosts in one heartbeat time


class Rest(Protocol):
    """The nodes of the job that other controllers drive. No method blocks; its answers are `allow_start`, `stop`, `finish`."""

    def part_is_ready(self) -> None: ...

    def part_failed(self, failure: Failure) -> None: ...

    def part_was_interrupted(self, number: int) -> None: ...

    def part_ended(self) -> None: ...


class _SignalReceived(NamedTuple):
    number: int


class _FromRest(NamedTuple):
    """A failure elsewhere, or another word."""

    failure: Failure | None = None
    is_start_allowed: bool = False
    is_finished: bool = False


@dataclass(slots=True, eq=False)
class _Node:
    """What is known of one host. It is `over` when its agent said so or its stream ended."""

    plan: NodePlan
    link: Link
    hello: Hello | None = None
    ready: Ready | None = None
    pids: dict[int, int] = field(default_factory=dict)  # by rank
    exit_codes: dict[int, int] = field(default_factory=dict)  # by rank
    clock_offset_s: float = float(
        "inf"
    )  # launcher's monotonic clock minus the node's, delay of one frame included
    has_failed: bool = False
    is_over: bool = False

    @property
    def name(self) -> str:
        return self.plan.host.name


class _Event(NamedTuple):
    node: _Node
    item: Frame | LinkEnd
    at_s: float


class Controller:
    """Runs one plan once."""

    def __init__(
        self,
        plan: Plan,
        *,
        connect: Callable[[NodePlan], Channel],
        agent_source: bytes,
        console: Console,
        window: int = CONNECT_WINDOW,
        rest: Rest | None = None,
    ) -> None:
        self._plan = plan
        self._console = console
        self._events: queue.SimpleQueue[_Event | _SignalReceived | _FromRest] = queue.SimpleQueue()
        places = threading.BoundedSemaphore(window)
        self._nodes: list[_Node] = []
        for node_plan in plan.nodes:
            link = Link(node_plan, connect=connect, agent_source=agent_source, window=places)
            node = _Node(plan=node_plan, link=link)
            self._nodes.append(node)
        self._search = MasterSearch(plan, lambda rank, frame: self._send(self._nodes[rank], frame))
        self._failures: list[Failure] = []
        self._interrupts: list[int] = []
        self._interrupted_by: int | None = None  # what ended the job, if no failure did before
        self._rest = rest
        self._num_told = 0  # failures that the rest needs not hear of (again)
        self._is_interrupt_told = False
        self._is_start_allowed = self._is_rest_finished = rest is None
        self._is_output_lost = False
        self._look_at = self._look_for_silence_at = 0.0
        self._timings = Timings(plan.world_size)
        self._started_at: float | None = None
        self._stacks = StackWatch(plan.stack_on_hang_s)
        self._stopped_at: float | None = None
        self._kill_at = float("inf")
        self._is_ended = threading.Event()

    def run(self) -> Verdict:
        """From nothing to a verdict; when it returns, no process of the job is left on any host that answers.

        Errors: LaunchError if the log files cannot be made; nothing has started then
        """
        self._console.begin(origins_of(self._plan))
        with watch(lambda number: self._events.put(_SignalReceived(number))):
            try:
                self._run_phases()
                self._stop_and_wait()
                self._wait_for_rest()
            finally:
                self._is_ended.set()
                for node in self._nodes:
                    node.link.close()
        return judge(
            self._failures,
            stopped_at=self._stopped_at,
            interrupted_by=self._interrupted_by,
            phases_s=self._timings.all_s(),
            started_at=self._started_at,
        )

    def _run_phases(self) -> None:
        self._timings.begin()
        for node in self._nodes:
            self._start_link(node)
        threading.Thread(target=self._keep_pinging, name="ping", daemon=True).start()
        self._wait("connected", lambda node: node.hello is not None)
        if self._is_failing():
            return
        self._timings.end("agent")
        self._timings.end("connected", max(node.link.opened_at for node in self._nodes))
        for node in self._nodes:
            self._send(node, Prepare(job_of(self._plan, node.plan)))
        self._search.listen()
        self._wait("prepared", lambda node: node.ready is not None)
        if self._is_failing():
            return
        self._show_notes()
        first = self._nodes[0].ready
        address = self._master_address()
        if self._is_failing():
            return
        self._wait_for_start()
        if self._is_failing():
            return
        start = Start(address, (first.master_port if first else 0) or self._plan.master.port)
        self._started_at = time.monotonic()
        for node in self._nodes:
            self._send(node, start)
        self._wait("started", lambda node: len(node.pids) == len(node.plan.ranks), is_patient=False)
        self._console.end_progress()
        self._wait("ended", lambda node: node.is_over, is_patient=False)

    # Events.

    def _start_link(self, node: _Node) -> None:
        def deliver(item: Frame | LinkEnd, at_s: float) -> None:
            if isinstance(item, Output):
                self._stacks.last_output_at = at_s
            if isinstance(item, Output) and self._timings.first_output_s is None:
                self._timings.first_output_s = at_s - self._timings.began_at
            if isinstance(item, Output):  # straight on: a console that blocks must not hold up the events
                self._console.output(item.rank, item.stream, item.text, node.link.grant)
            else:
                self._events.put(_Event(node, item, at_s))

        node.link.start(deliver)

    def _wait(self, phase: str, is_there: Callable[[_Node], bool], *, is_patient: bool = True) -> None:
        """Until every host is there. A failure ends the wait; a patient one first hears every host's answer."""
        began = time.monotonic()
        missing = {node: None for node in self._nodes if not is_there(node)}  # a set that keeps its order
        shown_at = 0.0
        while missing and not self._interrupts and not (self._is_failing() and not is_patient):
            if time.monotonic() - shown_at >= POLL_S:
                shown_at = time.monotonic()
                self._show_progress(phase, [node.name for node in missing], began)
            for node in self._take_event():
                if is_there(node) or (is_patient and node.has_failed):
                    missing.pop(node, None)
        if not self._is_failing():
            self._timings.end(phase)

    def _show_progress(self, phase: str, missing: list[str], began_at: float) -> None:
        if phase == "started":
            self._console.progress_of_workers(
                sum(len(node.pids) for node in self._nodes), self._plan.world_size, began_at
            )
        elif phase != "ended":
            num_failed = sum(node.has_failed for node in self._nodes)
            self._console.progress(phase, len(self._nodes), missing, began_at, num_failed=num_failed)

    def _take_event(self) -> list[_Node]:
        """Deal with the next event; returns the hosts of which something new is known, so that nobody looks at all."""
        changed: list[_Node] = []
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + POLL_S
            self._look_at_console()
            self._look_at_stacks()
        if time.monotonic() >= self._look_for_silence_at:
            self._look_for_silence_at = time.monotonic() + max(POLL_S, self._plan.heartbeat_s / SILENCE_LOOKS)
            changed += self._look_for_silence()
        try:
            event = self._events.get(timeout=POLL_S)
        except queue.Empty:
            return changed
        if isinstance(event, _SignalReceived):
            self._receive(event.number)
        elif isinstance(event, _FromRest):
            self._hear_rest(event)
        else:
            self._handle(event.node, event.item, event.at_s)
            changed.append(event.node)
        self._tell_rest()
        return changed

    def _handle(self, node: _Node, item: Frame | LinkEnd, at_s: float) -> None:
        if isinstance(item, Hello):
            node.hello = item
            self._send(node, Ping(0))  # at once: the answer tells how far the two clocks are apart
            self._console.debug(
                f"{node.name}: agent {item.pid}, Python {item.python}, {item.num_devices} GPUs"
            )
        elif isinstance(item, Ready):
            node.ready = item
        elif isinstance(item, Listening | Reached):
            self._search.take(node.plan.node_rank, item)
        elif isinstance(item, Problem):
            self._fail_host(node, item.message, at_s, exit_code=item.exit_code)
        elif isinstance(item, Pong):
            node.clock_offset_s = min(node.clock_offset_s, at_s - item.at)
        elif isinstance(item, Milestone):
            self._timings.take(item.rank, item.name, min(at_s, item.at + node.clock_offset_s))
        elif isinstance(item, Started | Exited | Stacks):
            self._handle_worker(node, item, at_s)
        elif isinstance(item, Done):
            node.is_over = True
            if item.left_over:
                self._console.warn(
                    f"{node.name}: ended {item.left_over} processes that outlived their worker"
                )
        elif isinstance(item, LinkEnd) and not node.is_over:
            self._fail_host(node, item.message, at_s)

    def _handle_worker(self, node: _Node, item: Started | Exited | Stacks, at_s: float) -> None:
        if isinstance(item, Started):
            node.pids[item.rank] = item.pid
            self._console.debug(f"{node.name}: rank {item.rank} is process {item.pid}")
        elif isinstance(item, Exited):
            self._handle_exit(node, item, at_s)
        else:
            self._stacks.take(item)

    def _handle_exit(self, node: _Node, item: Exited, at_s: float) -> None:
        node.exit_codes[item.rank] = item.code
        if item.code == 0:
            return
        self._failures.append(
            rank_failure(
                item,
                local_rank=next(one.local_rank for one in node.plan.ranks if one.rank == item.rank),
                host=node.name,
                pid=node.pids.get(item.rank, 0),
                at_s=min(at_s, item.at + node.clock_offset_s),
            )
        )

    def _fail_host(self, node: _Node, message: str, at_s: float, *, exit_code: int = 3) -> None:
        node.has_failed = True
        node.is_over = True
        self._failures.append(HostFailure(host=node.name, message=message, at_s=at_s, exit_code=exit_code))
        node.link.abandon()

    def _look_for_silence(self) -> list[_Node]:
        """Give up hosts that have been silent for the heartbeat time; returns them."""
        lost: list[_Node] = []
        for node in self._nodes:
            silent_s = node.link.silent_s()
            if node.hello is not None and not node.is_over and silent_s > self._plan.heartbeat_s:
                self._fail_host(
                    node,
                    f"nothing heard for {silent_s:.0f} s; the host, its network or its agent is down",
                    time.monotonic() - silent_s,
                )
                lost.append(node)
        return lost

    def _look_at_console(self) -> None:
        if self._interrupts:
            self._console.give_up_if_stuck(is_urgent=len(self._interrupts) > 1)
        failure = self._console.failure
        if failure is not None and not self._is_output_lost:
            self._is_output_lost = True
            self._failures.append(
                OutputFailure(message=str(failure), at_s=time.monotonic(), exit_code=failure.exit_code)
            )

    def _is_failing(self) -> bool:
        return bool(self._failures or self._interrupts)

    # The rest of the job, if other controllers drive it.

    def allow_start(self) -> None:
        """The rest is ready. This and the next two may be called from any thread."""
        self._events.put(_FromRest(is_start_allowed=True))

    def stop(self, failure: Failure) -> None:
        """Something failed elsewhere; `at_s` is on our clock."""
        self._events.put(_FromRest(failure))

    def finish(self) -> None:
        """Nothing more will be heard of the rest."""
        self._events.put(_FromRest(is_finished=True))

    def _hear_rest(self, word: _FromRest) -> None:
        self._is_start_allowed = self._is_start_allowed or word.is_start_allowed
        self._is_rest_finished = self._is_rest_finished or word.is_finished
        if word.failure is not None:
            self._tell_rest()
            self._failures.append(word.failure)
            self._num_told = len(self._failures)

    def _tell_rest(self) -> None:
        if self._rest is None:
            return
        for failure in self._failures[self._num_told :]:
            is_early = self._stopped_at is None or failure.at_s <= self._stopped_at
            if is_early or isinstance(failure, HostFailure):
                self._rest.part_failed(failure)
        self._num_told = len(self._failures)
        if self._interrupts and not self._is_interrupt_told:
            self._is_interrupt_told = True
            self._rest.part_was_interrupted(self._interrupts[0])

    def _wait_for_start(self) -> None:
        if self._rest is not None and not self._is_failing():
            self._rest.part_is_ready()
            while not self._is_start_allowed and not self._is_failing():
                self._take_event()

    def _wait_for_rest(self) -> None:
        """Until all parts ended: a failure elsewhere is a failure of this part too. A second interrupt gives up."""
        if self._rest is None:
            return
        self._tell_rest()
        self._rest.part_ended()
        num_interrupts = max(1, len(self._interrupts))
        while not self._is_rest_finished and len(self._interrupts) <= num_interrupts:
            self._take_event()
        if self._interrupts and not self._failures:
            self._interrupted_by = self._interrupts[0]

    # Signals to this process.

    def _receive(self, number: int) -> None:
        if number in PASSED_ON:
            self._pass_on(number)
        elif number == ASKING:
            self._ask_stacks(signal_name(number))
        elif number == STOPPING:
            self._stop_this_process()
        else:
            self._interrupts.append(number)

    def _ask_stacks(self, why: str) -> None:
        """What all ranks do, to be shown once the answers are there."""
        places = {
            rank: f"{node.name}, pid {pid}"
            for node in self._nodes
            for rank, pid in node.pids.items()
            if not node.is_over and rank not in node.exit_codes
        }
        if self._stacks.ask(why, places, now=time.monotonic()):
            for node in self._nodes:
                if node.pids:
                    self._send(node, AskStacks())

    def _look_at_stacks(self) -> None:
        now = time.monotonic()
        if self._started_at is not None and self._stopped_at is None:
            silent_s = self._stacks.silence_to_ask_about(now, started_at=self._started_at)
            if silent_s:
                self._ask_stacks(f"no output for {silent_s:.0f} s")
        if not self._stacks.is_asked:
            return
        ended = {rank for node in self._nodes for rank in (node.pids if node.is_over else node.exit_codes)}
        for block in self._stacks.blocks(now, ended=ended):
            self._console.show(block.title, block.lines)

    def _pass_on(self, number: int) -> None:
        nodes = [node for node in self._nodes if node.pids and not node.is_over]
        for node in nodes:
            self._send(node, Signal(number))
        num_workers = sum(len(node.pids) - len(node.exit_codes) for node in nodes)
        if num_workers:
            self._console.say(f"{signal_name(number)}: passed on to {num_workers} workers")
        else:
            self._console.warn(f"{signal_name(number)}: no worker runs that it could be passed on to")

    def _stop_this_process(self) -> None:
        """The workers go on until their output fills the pipes. Only for so long: agents that nobody watches end."""
        if self._rest is not None:
            self._console.warn(
                "stopping this dslaunch would end the job on the other nodes, so Ctrl-Z is ignored"
            )
            return
        self._console.say(
            f"stopping; the workers run on, for at most {HOLD_S / 60:.0f} minutes, and wait when their output is "
            "not read; `fg` or `bg` goes on"
        )
        self._console.drain(HOLD_DRAIN_S)
        for node in self._nodes:
            self._send(node, Hold(HOLD_S))
        stop_until_continued()
        for node in self._nodes:
            node.link.forgive_silence()
            self._send(node, Hold(0.0))

    # Stopping.

    def _stop_and_wait(self) -> None:
        """Tell every host to stop, unless all ended well, and wait until each one said that nothing is left."""
        self._console.end_progress()
        if all(node.is_over for node in self._nodes):
            return
        grace_s = self._plan.kill_grace_s if any(node.pids for node in self._nodes) else 0.0
        if len(self._interrupts) > 1:
            grace_s = 0.0
        self._stopped_at = time.monotonic()
        self._interrupted_by = self._interrupts[0] if self._interrupts and not self._failures else None
        self._announce_stop(grace_s)
        self._stop_all(grace_s)
        running = {node: None for node in self._nodes if not node.is_over}
        while running and time.monotonic() <= self._kill_at + STOP_MARGIN_S:
            num_interrupts = len(self._interrupts)
            for node in self._take_event():
                if node.is_over:
                    running.pop(node, None)
            if len(self._interrupts) > max(1, num_interrupts):
                self._console.say("killing all workers now")
                self._stop_all(0.0)
        for node in self._nodes:
            if not node.is_over:
                self._fail_host(node, "its agent did not confirm that the workers ended", time.monotonic())

    def _announce_stop(self, grace_s: float) -> None:
        running = sum(len(node.pids) - len(node.exit_codes) for node in self._nodes if not node.is_over)
        if not running:
            return
        why = signal_name(self._interrupted_by) if self._interrupted_by else self._failures[0].describe()
        workers = f"{running} {'' if self._interrupted_by else 'other '}worker{'s' if running != 1 else ''}"
        how = f"SIGTERM, and SIGKILL after {grace_s:g} s" if grace_s else "SIGKILL"
        hint = "; Ctrl-C again kills them now" if self._interrupted_by and grace_s else ""
        self._console.say(f"{why}: stopping {workers} ({how}{hint})")

    def _stop_all(self, grace_s: float) -> None:
        self._kill_at = time.monotonic() + grace_s
        for node in self._nodes:
            if node.hello is not None:
                self._send(node, Stop(grace_s))
            elif not node.is_over:
                node.is_over = True  # nothing runs there yet; the end of its stream is enough
                node.link.abandon()

    # Sending.

    def _send(self, node: _Node, frame: Frame) -> None:
        if not node.is_over:
            node.link.send(encode(frame))

    def _keep_pinging(self) -> None:
        """In a thread of its own: a terminal that blocks our output must not make us look dead."""
        number = 0
        while not self._is_ended.wait(min(self._plan.heartbeat_s / 4, 5.0) if number else 0.0):
            number += 1
            for node in self._nodes:
                if node.link.is_open and not node.is_over:
                    node.link.send(encode(Ping(number)))

    def _master_address(self) -> str:
        """Where all others reach node 0; whoever does not has failed."""
        first = self._nodes[0]
        if first.hello is None:
            raise AssertionError("node 0 is asked for its address before it said hello")
        addresses = [node.link.local_address for node in self._nodes[1:]]
        default = self._plan.master.address or master_address(
            is_one_machine=not self._search.is_needed,
            reached_at=first.hello.reached_at,
            hostname=first.hello.hostname,
            address_to_peers=next((one for one in addresses if one), ""),
        )
        self._search.begin(default, more=(first.hello.hostname, first.name))
        while not self._search.is_over and not self._is_failing():
            self._wait("reached", lambda node: self._search.is_answered(node.plan.node_rank))
        for node_rank, message in self._search.failures:
            self._fail_host(self._nodes[node_rank], message, time.monotonic())
        for note in self._search.notes:
            self._console.say(note)
        for warning in self._search.warnings:
            self._console.warn(warning)
        return self._search.address

    def _show_notes(self) -> None:
        """Say each note once, with the hosts it comes from."""
        hosts_of: dict[str, list[str]] = {}
        for node in self._nodes:
            for note in node.ready.notes if node.ready else ():
                hosts_of.setdefault(note, []).append(node.name)
        for note, hosts in hosts_of.items():
            shown = ", ".join(hosts[:4]) + (f" and {len(hosts) - 4} more" if len(hosts) > 4 else "")
            self._console.say(f"{shown}: {note}")
