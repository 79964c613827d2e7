"""A host that is a channel in this process: it answers as an agent would, or as a test says instead."""

from __future__ import annotations

import queue
import sys
import time
from collections.abc import Callable, MutableSequence, Sequence

from dslaunch.launcher.backends.channel import Channel
from dslaunch.launcher.inputs.hostfile import Host
from dslaunch.launcher.inputs.selection import Selected
from dslaunch.launcher.job.plan import Endpoint, NodePlan, Plan, plan_nodes, plan_program
from dslaunch.launcher.node.observe.inspection import answer
from dslaunch.launcher.wire.frames import (
    MAGIC,
    Decoder,
    Done,
    Exited,
    Frame,
    Hello,
    Inspect,
    Listen,
    Listening,
    Ping,
    Pong,
    Prepare,
    Reach,
    Reached,
    Ready,
    Start,
    Started,
    Stop,
    encode,
)

Change = Callable[[Frame | None], list[Frame | bytes] | None]
HELLO = Hello(hostname="memory", python="3.11.2", reached_at="10.0.0.1", num_devices=0, pid=7)


def plan_of(num_hosts: int, *, slots: int = 2, heartbeat_s: float = 60.0, kill_grace_s: float = 0.0) -> Plan:
    """A job of train.py on the hosts n0, n1, ... with so many slots each."""
    devices = tuple(str(device) for device in range(slots))
    hosts = tuple(
        Selected(host=Host(name=f"n{number}", slots=slots), devices=devices) for number in range(num_hosts)
    )
    program = plan_program("train.py", (), python=sys.executable)
    return Plan(
        nodes=plan_nodes(hosts, program, local_names=frozenset()),
        master=Endpoint(address=None, port=29500, is_port_fixed=False),
        program=program,
        cwd="/job",
        venv_script=None,
        environment=(),
        kill_grace_s=kill_grace_s,
        heartbeat_s=heartbeat_s,
    )


def way_to(hosts: Sequence[Channel | Exception]) -> Callable[[NodePlan], Channel]:
    """What connects a launcher to these hosts, by node rank; an exception is what the attempt ends with."""

    def connect(node: NodePlan) -> Channel:
        host = hosts[node.node_rank]
        if isinstance(host, Exception):
            raise host
        return host

    return connect


def after(kind: type, *answers: Frame | bytes) -> Change:
    """These answers instead of the honest one to a frame of that kind."""
    return lambda frame: list(answers) if isinstance(frame, kind) else None


def first(*answers: Frame | bytes) -> Change:
    """These are the first bytes, instead of Hello."""
    return lambda frame: list(answers) if frame is None else None


class MemoryHost:
    """Its workers end with `code`; None means that they run until they are stopped.

    `change` is asked first: with None for what comes at the beginning, then with each frame that arrives. Its
    answer is sent instead of the honest one, unless it is None. b"" ends the stream.
    """

    local_address = "10.0.0.9"

    def __init__(
        self, ranks: tuple[int, ...] = (), change: Change = lambda frame: None, *, code: int | None = 0
    ) -> None:
        self._ranks = ranks
        self._change = change
        self._code = code
        self._decoder = Decoder()
        self._has_source = False
        self._to_read: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.heard: MutableSequence[Frame] = []
        self.is_closed = False
        changed = change(None)
        self._say([MAGIC, HELLO] if changed is None else changed)

    def read(self) -> bytes:
        return self._to_read.get()

    def write(self, data: bytes) -> None:
        if not self._has_source:  # the first that is written, as a whole
            self._has_source = True
            return
        for frame in self._decoder.feed(data):
            self.heard.append(frame)
            changed = self._change(frame)
            self._say(self._honest(frame) if changed is None else changed)

    def error_text(self) -> str:
        return ""

    def exit_status(self) -> int | None:
        return None

    def close(self) -> None:
        self.is_closed = True
        self._to_read.put(b"")

    def _say(self, answers: list[Frame | bytes]) -> None:
        for one in answers:
            self._to_read.put(one if isinstance(one, bytes) else encode(one))

    def _honest(self, frame: Frame) -> list[Frame | bytes]:
        if isinstance(frame, Ping):
            return [Pong(frame.number, time.monotonic())]
        if isinstance(frame, Prepare):
            return [Ready(29500, [])]
        if isinstance(frame, Inspect):
            return [answer(*frame)]
        if isinstance(frame, Listen):
            return [Listening(29500, ["10.0.0.1"], "")]
        if isinstance(frame, Reach):
            return [Reached([""] * len(frame.addresses))]
        if isinstance(frame, Start):
            started: list[Frame | bytes] = [Started(rank, 100 + rank) for rank in self._ranks]
            return started if self._code is None else [*started, *self._ends(self._code, 0)]
        return self._ends(143, 15) if isinstance(frame, Stop) else []

    def _ends(self, code: int, signum: int) -> list[Frame | bytes]:
        return [*(Exited(rank, code, signum, time.monotonic()) for rank in self._ranks), Done(0)]
