"""One command, once on each of many hosts.

If a host fails or cannot be used, the command still runs on the others.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ..backends.channel import Channel
from ..controller.job_signals import ENDING, NUM_ENDING_AT_ONCE, received, unignored
from ..controller.link import LinkEnd
from ..controller.protocol_check import Phase, contradiction
from ..controller.roster import AgentEvent, HostState, Roster
from ..errors import EXIT_HOST, LaunchError
from ..inputs.host_list import folded
from ..job.plan import NodePlan, Plan, job_of
from ..job.verdict import signal_name
from ..output.console import Console
from ..wire.frames import Done, Exited, Frame, Hello, Output, Prepare, Problem, Ready, Start, Stop
from ..wire.job import NodeJob, RankJob, as_json
from .host_output import HostOutput

POLL_S = 0.2
CONNECT_TIMEOUT_S = 60.0  # shortest limit for all steps of a connection together
STOP_MARGIN_S = 10.0  # for the agents to answer, after the command's grace


class Failure(NamedTuple):
    """A host on which the command did not end with 0, or could not run. `at_s` is when this became known."""

    node_rank: int
    code: int
    text: str
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsOutcome:
    """How the command ended on all hosts."""

    failures: tuple[Failure, ...]
    interrupted_by: int | None
    output_failure: LaunchError | None = None

    @property
    def exit_code(self) -> int:
        """Return 0 if the command ended with 0 on all hosts, else the code of the first failure, as for a
        job.
        """
        if self.interrupted_by is not None:
            return 128 + self.interrupted_by
        if self.output_failure is not None:
            return self.output_failure.exit_code
        return min(self.failures, key=lambda one: one.at_s).code if self.failures else 0


def command_of(plan: Plan, node: NodePlan) -> NodeJob:
    """Return the plan as this node's agent gets it: without ranks, a port to claim or a device to choose."""
    (rank, *_) = node.ranks
    one = RankJob(node.node_rank, [], list(rank.arguments))
    return job_of(plan, node)._replace(
        ranks=[one], devices=[], master_port=None, has_stacks=False, is_verbatim=True
    )


class EachHost:
    """Runs the plan's command on each of its hosts."""

    def __init__(
        self,
        plan: Plan,
        *,
        connect: Callable[[NodePlan], Channel],
        console: Console,
        output: HostOutput,
        fails_fast: bool,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> None:
        """`connect_timeout_s`: for all steps of a connection together."""
        self._plan = plan
        self._console = console
        self._output = output
        self._fails_fast = fails_fast
        self._roster = Roster(
            plan.nodes,
            connect=connect,
            silence_s=plan.heartbeat_s,
            hello_timeout_s=plan.heartbeat_s,
            connect_timeout_s=connect_timeout_s,
        )
        self._running = dict.fromkeys(self._roster)  # a dict as a set that keeps its order
        self._started: set[HostState] = set()
        self._failures: list[Failure] = []
        self._interrupts: list[int] = []
        self._num_obeyed = 0
        self._kill_at = float("inf")

    def run(self) -> HostsOutcome:
        """Run until the command has ended on every host; then none of its processes and their children is
        left.
        """
        began = time.monotonic()
        with received(unignored(ENDING), self._interrupt), self._roster:
            while self._running and time.monotonic() < self._kill_at + STOP_MARGIN_S:
                names = [host.name for host in self._running if host.hello is None]
                if names:
                    self._console.progress("connected", len(self._roster), names, began)
                event = self._roster.next(POLL_S)
                if event is not None and event.host in self._running:
                    self._handle(event)
                self._obey_interrupts()
                if self._console.failure is not None and self._kill_at == float("inf"):
                    self._stop(self._plan.kill_grace_s)  # the output has no reader any more
        self._console.end_progress()
        for host in self._running:
            why = "its agent did not confirm that the command ended"
            self._failures.append(Failure(host.plan.node_rank, EXIT_HOST, why, time.monotonic()))
        return HostsOutcome(
            failures=tuple(self._failures),
            interrupted_by=self._interrupts[0] if self._interrupts else None,
            output_failure=self._console.failure,
        )

    def _handle(self, event: AgentEvent) -> None:
        host, item, at_s = event
        why_not = "" if isinstance(item, LinkEnd) else self._contradiction(host, item)
        if why_not:
            self._roster.lose(host)
            self._end(host)
            self._fail(host, EXIT_HOST, why_not, at_s)
        elif isinstance(item, Hello):
            host.send(Prepare(as_json(command_of(self._plan, host.plan))))
        elif isinstance(item, Ready) and self._kill_at == float("inf"):
            self._started.add(host)
            host.send(Start("", 0))
        elif isinstance(item, Output):
            self._output.add(host.name, item.stream, item.text, host.link.grant)
        elif isinstance(item, Exited):
            host.exit_codes[item.rank] = item.code
            name = signal_name(item.signal)
            how = f"was killed by {name}" if item.signal else f"exited with code {item.code}"
            if item.code:
                self._fail(host, item.code, how, at_s)
        elif isinstance(item, Problem):
            self._end(host)
            self._fail(host, item.exit_code, item.message, at_s)
        elif isinstance(item, LinkEnd):
            self._end(host)
            self._fail(host, EXIT_HOST, item.message, at_s)
        elif isinstance(item, Done):
            self._end(host)

    def _contradiction(self, host: HostState, item: Frame) -> str:
        phase = Phase.RUNNING if host in self._started else Phase.PREPARING
        if self._kill_at < float("inf"):
            phase = Phase.STOPPING
        return contradiction(
            item,
            phase=Phase.CONNECTING if host.hello is None else phase,
            ranks=(host.plan.node_rank,),
            num_ended=len(host.exit_codes),
        )

    def _end(self, host: HostState) -> None:
        self._running.pop(host, None)

    def _fail(self, host: HostState, code: int, text: str, at_s: float) -> None:
        if self._kill_at < float("inf"):  # the command was told to end
            return
        self._failures.append(Failure(host.plan.node_rank, code, text, at_s))
        if self._fails_fast and self._running:
            self._console.say(f"{host.name} {text}: stopping the others")
            self._stop(self._plan.kill_grace_s)

    def _obey_interrupts(self) -> None:
        if len(self._interrupts) > self._num_obeyed:
            self._num_obeyed = len(self._interrupts)
            self._stop(self._plan.kill_grace_s if self._num_obeyed == 1 else 0.0)

    def _stop(self, grace_s: float) -> None:
        self._kill_at = min(self._kill_at, time.monotonic() + grace_s)
        for host in tuple(self._running):
            if host.hello is not None:
                host.send(Stop(grace_s))
            else:
                self._roster.lose(host)
                self._end(host)

    def _interrupt(self, number: int, _: object) -> None:
        """Handle a signal: the first ends the command everywhere, the second kills it, the third ends this
        process.
        """
        self._interrupts.append(number)
        if len(self._interrupts) >= NUM_ENDING_AT_ONCE:
            os._exit(128 + number)


def describe_failures(ended: HostsOutcome, plan: Plan) -> list[str]:
    """Return one sentence for each way in which the command failed, with all its hosts; the first failure
    comes first.
    """
    names_of: dict[str, list[str]] = {}
    for one in sorted(ended.failures, key=lambda one: one.at_s):
        names_of.setdefault(one.text, []).append(plan.nodes[one.node_rank].host.name)
    return [f"{folded(sorted(names, key=_order(plan)))}: {text}" for text, names in names_of.items()]


def _order(plan: Plan) -> Callable[[str], int]:
    places = {node.host.name: node.node_rank for node in plan.nodes}
    return lambda name: places[name]
