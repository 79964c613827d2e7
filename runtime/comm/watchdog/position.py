"""Position of a rank: the collective that it waits for, its last one, and the place of its program."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass
from typing import Any

from ..flight_recorder import Collective, FlightRecorder, Turns

_NUM_FRAMES = 5
_NUM_RECENT = 64  # collectives, more than two ranks can be apart
_LEFT_OUT = (
    __name__.partition(".")[0] + ".runtime",
    "torch.nn.modules",
    "torch._compile",
    "torch._dynamo",
    "torch._tensor",
    "torch.autograd",
    "torch.utils.checkpoint",
)  # modules that are not to blame


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """A collective that has not come to its end."""

    label: Collective
    s: float  # seconds since it began
    is_awaited: bool  # the program stands still for it


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Position of one rank at one moment."""

    rank: int
    host: str
    pid: int
    step: int
    issued: tuple[int, ...]  # number of the last collective, by lane
    waits: tuple[Wait, ...]  # the oldest first
    recent: tuple[Collective, ...]  # the oldest first
    quiet_s: float  # since the last collective began or was waited for
    stack: tuple[str, ...]  # stack of the main thread, the innermost last
    turns: tuple[Turns, ...] = ()  # number of the last one of each line of ranks
    elsewhere: str = ""  # the wait of another engine of its program

    def has_begun(self, label: Collective) -> bool:
        """Whether this rank, one of those that do it together, has come to it."""
        if not label.ranks:
            return self.issued[label.lane] >= label.number
        line = (label.axis, label.ranks)
        return any(one.number >= label.turn for one in self.turns if (one.axis, one.ranks) == line)

    def to_json(self) -> str:
        """The text that `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Position:
        """Read the text of another rank's `to_json`."""
        fields = json.loads(text)
        fields["waits"] = tuple(
            Wait(label=_label(one["label"]), s=one["s"], is_awaited=one["is_awaited"])
            for one in fields["waits"]
        )
        fields["recent"] = tuple(_label(one) for one in fields["recent"])
        fields["turns"] = tuple(Turns(axis, tuple(ranks), number) for axis, ranks, number in fields["turns"])
        return cls(**fields | {name: tuple(fields[name]) for name in ("issued", "stack")})


def _label(fields: list[Any]) -> Collective:
    """JSON has lists only."""
    label = Collective(*fields)
    return label._replace(ranks=tuple(label.ranks))


def take_position(recorder: FlightRecorder, *, rank: int) -> Position:
    """Look where this rank stands; any thread may ask."""
    now = time.monotonic()
    elsewhere = recorder.awaited_elsewhere()
    return Position(
        rank=rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        step=recorder.step,
        issued=recorder.issued,
        waits=tuple(
            Wait(label=flight.label, s=now - flight.began, is_awaited=flight.is_awaited)
            for flight in recorder.under_way()
        ),
        recent=recorder.recent()[-_NUM_RECENT:],
        quiet_s=now - recorder.quiet_since,
        stack=_main_stack(),
        turns=recorder.turns,
        elsewhere="" if elsewhere is None else f"{elsewhere} (step {elsewhere.step}) of another engine",
    )


def _main_stack() -> tuple[str, ...]:
    """The last frames of the main thread; ours, and those of a module's call, only if there are no others."""
    innermost = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = list(traceback.walk_stack(innermost))[::-1] if innermost else []
    others = [one for one in frames if not one[0].f_globals.get("__name__", "").startswith(_LEFT_OUT)]
    return tuple(
        f'File "{frame.f_code.co_filename}", line {line}, in {frame.f_code.co_name}'
        for frame, line in (others or frames)[-_NUM_FRAMES:]
    )
