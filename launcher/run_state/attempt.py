"""One start of the job, and how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from .values import items, mapping, number, text, whole

MAX_WORKERS = 1_000_000


class Worker(NamedTuple):
    """One process of an attempt."""

    host: str
    node_rank: int
    rank: int
    local_rank: int


class Phase(NamedTuple):
    """A part of the start that all hosts or ranks have behind them. Units: seconds since the epoch."""

    name: str
    began_at: float
    ended_at: float


class Exit(NamedTuple):
    """A worker that ended; `signal` is 0 if none ended it."""

    at: float
    rank: int
    host: str
    code: int
    signal: int


class Verdict(NamedTuple):
    """How an attempt ended: the keys of `report.json`, and the sentences that a screen needs.

    `keys` are all of them, as they were told.
    """

    at: float
    exit_code: int
    duration_s: float
    culprit: str  # a sentence; empty if nothing failed
    decision: str  # on the next attempt
    keys: Mapping[str, Any]


class Attempt:
    """One start."""

    def __init__(self, number: int, began_at: float, workers: tuple[Worker, ...] = ()) -> None:
        self.number, self.began_at, self.workers = number, began_at, workers
        self.log_folder = ""
        self.phases: list[Phase] = []
        self.running_at = 0.0  # 0: not all workers run
        self.exits: list[Exit] = []
        self.verdict: Verdict | None = None

    @property
    def hosts(self) -> tuple[str, ...]:
        """In the order of their ranks."""
        return tuple(dict.fromkeys(one.host for one in self.workers))


def workers_of(value: Any) -> tuple[Worker, ...]:
    """As the event `attempt` has them; what is none is left out."""
    found = []
    for one in items(value)[:MAX_WORKERS]:
        row = items(one)
        if len(row) != 4:
            continue
        node_rank, rank, local_rank = (whole(word) for word in row[1:])
        if node_rank is not None and rank is not None and local_rank is not None and text(row[0]):
            found.append(Worker(text(row[0]), node_rank, rank, local_rank))
    return tuple(found)


def verdict_of(at: float, event: Mapping[str, Any]) -> Verdict:
    """As the event `verdict` has it."""
    return Verdict(
        at=at,
        exit_code=whole(event.get("exit_code")) or 0,
        duration_s=number(event.get("duration_s")) or 0.0,
        culprit=culprit_of(event.get("culprit")),
        decision=text(event.get("decision")),
        keys=event,
    )


def culprit_of(value: Any) -> str:
    """A sentence on what failed first; empty for nothing."""
    keys = mapping(value)
    kind, host = text(keys.get("kind")), text(keys.get("host"))
    if kind == "rank":
        return f"rank {whole(keys.get('rank'))} on {host} {_how(keys)}"
    message = text(keys.get("message"))
    return f"{host}: {message}" if host and message else message or host


def _how(keys: Mapping[str, Any]) -> str:
    if keys.get("is_out_of_memory") is True:
        return "was killed: out of memory"
    if whole(keys.get("signal")):
        return f"was ended by {text(keys.get('signal_name')) or 'signal ' + str(keys.get('signal'))}"
    said = _last_of(keys.get("traceback")) or text(keys.get("message")).split("\n", 1)[0]
    code = f"ended with exit code {whole(keys.get('code'))}"
    return f"{code}: {said}" if said else code


def _last_of(lines: Any) -> str:
    """The last line of a traceback, which names the error."""
    found = [text(one).strip() for one in items(lines)]
    return next((one for one in reversed(found) if one), "")
