"""One start of the job, and its end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from .values import items, mapping, number, numbers, text, whole

MAX_WORKERS = 1_000_000
MAX_EXITS = 200  # kept of an attempt; all are counted
MAX_PHASES = 30


class AttemptWorker(NamedTuple):
    """One process of an attempt; `role` is empty for a rank, and that of a server."""

    host: str
    node_rank: int
    rank: int
    local_rank: int
    role: str = ""


class StartPhase(NamedTuple):
    """A part of the start that all hosts or ranks have completed. Units: seconds since the epoch."""

    name: str
    ended_at: float


class Exit(NamedTuple):
    """A worker that ended; `signal` is 0 if none ended it."""

    at: float
    rank: int
    host: str
    code: int
    signal: int


class AttemptVerdict(NamedTuple):
    """The end of an attempt: `text` is a sentence on it; `keys` are those of `report.json`, as reported."""

    at: float
    exit_code: int
    duration_s: float
    text: str
    decision: str  # on the next attempt
    keys: Mapping[str, Any]

    @property
    def culprit(self) -> Mapping[str, Any]:
        """Return the first failure; empty if there was none."""
        return mapping(self.keys.get("culprit"))


class AttemptState:
    """One start. Times are seconds since the epoch, 0 for unknown ones."""

    def __init__(self, number: int, began_at: float) -> None:
        self.number, self.began_at = number, began_at
        self.has_begun = False  # its event has come, with its workers
        self.hosts: tuple[str, ...] = ()  # in the order of their ranks
        self.num_ranks = 0
        self.log_folder = ""
        self.phases: list[StartPhase] = []
        self.running_at = 0.0  # when all workers ran
        self.last_at = began_at
        self.exits: list[Exit] = []
        self.num_exits = 0
        self.verdict: AttemptVerdict | None = None
        self.resumed_step: int | None = None  # the step from which it went on
        self.last_step: int | None = None  # the last one that was told

    @property
    def end_s(self) -> dict[str, float]:
        """Seconds from its beginning to the moments of an end by a failure."""
        return {} if self.verdict is None else numbers(self.verdict.keys.get("end_s"))

    @property
    def fault_at(self) -> float:
        """The time of the failure that ended it; 0 if none did."""
        fault_s = self.end_s.get("fault")
        return 0.0 if fault_s is None else self.began_at + fault_s

    @property
    def ended_at(self) -> float:
        return 0.0 if self.verdict is None else self.verdict.at

    def begin(self, workers: tuple[AttemptWorker, ...], log_folder: str) -> None:
        self.has_begun = True
        self.hosts = tuple(dict.fromkeys(one.host for one in workers))
        self.num_ranks, self.log_folder = sum(not one.role for one in workers), log_folder

    def end(self, verdict: AttemptVerdict) -> None:
        """Take the verdict; its hosts and phases count where no other event of the attempt has them."""
        self.verdict = verdict
        self.hosts = self.hosts or tuple(filter(None, map(text, items(verdict.keys.get("hosts")))))
        for name, seconds in {} if self.phases else mapping(verdict.keys.get("phases_s")).items():
            self.add_phase(name, self.began_at + (number(seconds) or 0.0))

    def add_phase(self, name: str, ended_at: float) -> None:
        if name and name != "ended" and len(self.phases) < MAX_PHASES:
            self.phases.append(StartPhase(name[:40], ended_at))


def workers_of(value: Any) -> tuple[AttemptWorker, ...]:
    """Return the workers of the event `attempt`; entries in another form are left out."""
    found = []
    for one in items(value)[:MAX_WORKERS]:
        row = items(one)
        if len(row) not in (4, 5):
            continue
        node_rank, rank, local_rank = (whole(word) for word in row[1:4])
        role = text(row[4]) if len(row) > 4 else ""
        if node_rank is not None and rank is not None and local_rank is not None and text(row[0]):
            found.append(AttemptWorker(text(row[0]), node_rank, rank, local_rank, role))
    return tuple(found)


def verdict_of(at: float, event: Mapping[str, Any]) -> AttemptVerdict:
    """Return the verdict of the event `verdict`, or of an attempt in `report.json`."""
    exit_code = whole(event.get("exit_code")) or 0
    return AttemptVerdict(
        at=at,
        exit_code=exit_code,
        duration_s=number(event.get("duration_s")) or 0.0,
        text=text(event.get("text")) or failure_text(event.get("culprit")) or f"exit code {exit_code}",
        decision=text(event.get("decision")),
        keys=event,
    )


def failure_text(value: Any) -> str:
    """Return the launcher's sentence on the failure; where an older one has made none, its rank and the known
    facts. Empty without a failure.
    """
    keys = mapping(value)
    who = f"rank {keys.get('rank')} on {text(keys.get('host'))}" if "rank" in keys else text(keys.get("host"))
    what = text(keys.get("message")) or (f"exit code {keys['code']}" if "code" in keys else "")
    return text(keys.get("text")) or ": ".join(filter(None, (who, what)))
