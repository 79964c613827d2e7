"""One command, once on each of many hosts. A host that fails, or cannot be used, does not keep the others from it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..backends.channel import Channel
from ..controller.job_signals import ENDING, NUM_ENDING_AT_ONCE, received, unignored
from ..controller.link import LinkEnd
from ..controller.protocol_check import Phase, contradiction
from ..errors import EXIT_HOST, LaunchError
from ..inputs.host_list import folded
from ..job.plan import NodePlan, Plan, job_of
from ..job.verdict import signal_name
from ..output.console import Console
from ..wire.frames import Done, Exited, Frame, Hello, Output, Prepare, Problem, Ready, Start, Stop
from .fleet import Event, Fleet
from .host_output import HostOutput

POLL_S = 0.2
STOP_MARGIN_S = 10.0  # beyond the command's grace, for the agents to answer


class Failure(NamedTuple):
    """How it ended on a host where it did not end with 0. `at_s` is when this was heard of."""

    node_rank: int
    code: int
    text: str
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How all of it ended."""

    failures: tuple[Failure, ...]
    interrupted_by: int | None
    output_failure: LaunchError | None = None

    @property
    def exit_code(self) -> int:
        """0 if the command ended with 0 on every host, else what the first failure is worth, as with a job."""
        if self.interrupted_by is not None:
            return 128 + self.interrupted_by
        if self.output_failure is not None:
            return self.output_failure.exit_code
        return min(self.failures, key=lambda one: one.at_s).code if self.failures else 0


def command_of(plan: Plan, node: NodePlan) -> dict[str, Any]:
    """The plan as this node's agent gets it: no ranks to tell apart, no port to claim, no device to choose."""
    (rank, *_) = node.ranks
    one = {"rank": node.node_rank, "env": [], "arguments": list(rank.arguments)}
    changes = {"ranks": [one], "devices": [], "master_port": None, "is_verbatim": True}
    return {**job_of(plan, node), **changes}


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
    ) -> None:
        self._plan = plan
        self._console = console
        self._output = output
        self._fails_fast = fails_fast
        self._fleet = Fleet(plan.nodes, connect, silence_s=plan.heartbeat_s)
        self._nodes = {node.node_rank: node for node in plan.nodes}
        self._running = dict.fromkeys(self._nodes)  # a set that keeps its order
        self._greeted: set[int] = set()
        self._started: set[int] = set()
        self._exited: set[int] = set()
        self._failures: list[Failure] = []
        self._interrupts: list[int] = []
        self._num_obeyed = 0
        self._kill_at = float("inf")

    def run(self) -> Ended:
        """Until it has ended on every host; nothing of it is left anywhere then, nor what it started."""
        began = time.monotonic()
        with received(unignored(ENDING), self._interrupt), self._fleet as fleet:
            while self._running and time.monotonic() < self._kill_at + STOP_MARGIN_S:
                missing = [node for node in self._running if node not in self._greeted]
                if missing:
                    names = [self._nodes[one].host.name for one in missing]
                    self._console.progress("connected", len(self._nodes), names, began)
                event = fleet.next(POLL_S)
                if event is not None and event.node_rank in self._running:
                    self._handle(event)
                self._obey_interrupts()
                if self._console.failure is not None and self._kill_at == float("inf"):
                    self._stop(self._plan.kill_grace_s)  # nobody reads what it prints
        self._console.end_progress()
        for node_rank in self._running:
            self._failures.append(
                Failure(
                    node_rank, EXIT_HOST, "its agent did not confirm that the command ended", time.monotonic()
                )
            )
        return Ended(
            failures=tuple(self._failures),
            interrupted_by=self._interrupts[0] if self._interrupts else None,
            output_failure=self._console.failure,
        )

    def _handle(self, event: Event) -> None:
        node_rank, item, at_s = event
        why_not = "" if isinstance(item, LinkEnd) else self._contradiction(node_rank, item)
        if why_not:
            self._fleet.lose(node_rank)
            self._end(node_rank)
            self._fail(node_rank, EXIT_HOST, why_not, at_s)
        elif isinstance(item, Hello):
            self._greeted.add(node_rank)
            self._fleet.send(node_rank, Prepare(command_of(self._plan, self._nodes[node_rank])))
        elif isinstance(item, Ready) and self._kill_at == float("inf"):
            self._started.add(node_rank)
            self._fleet.send(node_rank, Start("", 0))
        elif isinstance(item, Output):
            self._output.add(
                self._name(node_rank), item.stream, item.text, self._fleet.links[node_rank].grant
            )
        elif isinstance(item, Exited):
            self._exited.add(node_rank)
            name = signal_name(item.signal)
            how = f"was killed by {name}" if item.signal else f"exited with code {item.code}"
            if item.code:
                self._fail(node_rank, item.code, how, at_s)
        elif isinstance(item, Problem):
            self._end(node_rank)
            self._fail(node_rank, item.exit_code, item.message, at_s)
        elif isinstance(item, LinkEnd):
            self._end(node_rank)
            self._fail(node_rank, EXIT_HOST, item.message, at_s)
        elif isinstance(item, Done):
            self._end(node_rank)

    def _contradiction(self, node_rank: int, item: Frame) -> str:
        phase = Phase.RUNNING if node_rank in self._started else Phase.PREPARING
        if self._kill_at < float("inf"):
            phase = Phase.STOPPING
        return contradiction(
            item,
            phase=phase if node_rank in self._greeted else Phase.CONNECTING,
            ranks=(node_rank,),
            num_ended=int(node_rank in self._exited),
        )

    def _end(self, node_rank: int) -> None:
        self._running.pop(node_rank, None)

    def _fail(self, node_rank: int, code: int, text: str, at_s: float) -> None:
        if self._kill_at < float("inf"):  # it was told to end
            return
        self._failures.append(Failure(node_rank, code, text, at_s))
        if self._fails_fast and self._running:
            self._console.say(f"{self._name(node_rank)} {text}: stopping the others")
            self._stop(self._plan.kill_grace_s)

    def _obey_interrupts(self) -> None:
        if len(self._interrupts) > self._num_obeyed:
            self._num_obeyed = len(self._interrupts)
            self._stop(self._plan.kill_grace_s if self._num_obeyed == 1 else 0.0)

    def _stop(self, grace_s: float) -> None:
        self._kill_at = min(self._kill_at, time.monotonic() + grace_s)
        for node_rank in tuple(self._running):
            if node_rank in self._greeted:
                self._fleet.send(node_rank, Stop(grace_s))
            else:
                self._fleet.lose(node_rank)
                self._end(node_rank)

    def _name(self, node_rank: int) -> str:
        return self._nodes[node_rank].host.name

    def _interrupt(self, number: int, _: object) -> None:
        """The first signal ends the command everywhere, the second kills it, the third ends this process."""
        self._interrupts.append(number)
        if len(self._interrupts) >= NUM_ENDING_AT_ONCE:
            os._exit(128 + number)


def describe_failures(ended: Ended, plan: Plan) -> list[str]:
    """One sentence for all hosts where it ended in the same way, the first failure first."""
    names_of: dict[str, list[str]] = {}
    for one in sorted(ended.failures, key=lambda one: one.at_s):
        names_of.setdefault(one.text, []).append(plan.nodes[one.node_rank].host.name)
    return [f"{folded(sorted(names, key=_order(plan)))}: {text}" for text, names in names_of.items()]


def _order(plan: Plan) -> Callable[[str], int]:
    places = {node.host.name: node.node_rank for node in plan.nodes}
    return lambda name: places[name]
