"""What the events of a job say of its run."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .attempt import Attempt, Exit, Phase, verdict_of, workers_of
from .rank_state import FoldedRanks, HostState, RankState
from .series import Series
from .values import items, mapping, number, text, whole

MAX_NOTES = 1000
MAX_ATTEMPTS = 200  # the newest; what came before is counted
MAX_REPORTS = 50  # of watchdogs, of stacks, of stragglers
MAX_PHASES = 100
RECENT_S = 600.0
_FOLDED = " *"


class Job(NamedTuple):
    """The first event of every file."""

    at: float = 0.0
    name: str = ""
    command: tuple[str, ...] = ()
    cwd: str = ""
    user: str = ""
    host: str = ""
    version: str = ""
    launcher: str = ""


class Note(NamedTuple):
    """A sentence of dslaunch. `level` is that of Python's logging."""

    at: float
    level: int
    text: str


class Straggler(NamedTuple):
    """A rank that others wait for. `share` is the part of a step that they do, 0 to 1."""

    at: float
    rank: int
    host: str
    cause: str  # compute, data or link
    share: float
    text: str


class Report(NamedTuple):
    """Text that was asked for or told: a watchdog's, with its rank, or stacks, with their title."""

    at: float
    rank: int | None
    title: str
    lines: tuple[str, ...]


class RunState:
    """Everything that is known of a run; bounded in size.

    `num_points` is how many points of the run's numbers are kept over the whole time, and `num_rank_points`
    of each rank's, of each host's and of those of a host's ranks together; 0: none.
    """

    def __init__(self, *, num_points: int = 512, num_rank_points: int = 0) -> None:
        self.job = Job()
        self.at = 0.0  # of the newest event
        self.attempts: deque[Attempt] = deque(maxlen=MAX_ATTEMPTS)
        self.ranks: dict[int, RankState] = {}
        self.folded: dict[str, FoldedRanks] = {}
        self.hosts: dict[str, HostState] = {}
        self.config: dict[int, Mapping[str, Any]] = {}  # by rank; of the lowest rank that told it
        self.series: dict[str, Series] = {}
        self.notes: deque[Note] = deque(maxlen=MAX_NOTES)
        self.stragglers: deque[Straggler] = deque(maxlen=MAX_REPORTS)
        self.present_stragglers: dict[int, Straggler] = {}  # by rank: those that are not well again
        self.hangs: deque[Report] = deque(maxlen=MAX_REPORTS)
        self.stacks: deque[Report] = deque(maxlen=MAX_REPORTS)
        self.num_stacks = 0  # reports of stacks so far
        self.has_numbers = False  # of ranks: else there are lines of output only
        self.num_lines = 0
        self.num_lost = 0  # events that are not in the file
        self.num_unknown = 0  # events of kinds that are not known here
        self.exit_code: int | None = None  # of the job; None: it has not ended
        self.duration_s = 0.0
        self._recent: dict[str, deque[tuple[float, float]]] = {}
        self._num_points, self._num_rank_points = num_points, num_rank_points
        self._metrics_at = 0.0
        self._progress: dict[str, tuple[float, float]] = {}  # of samples and tokens: when, and how many
        self._take: dict[str, Callable[[float, Mapping[str, Any]], None]] = {
            "job": self._job,
            "attempt": self._attempt,
            "phase": self._phase,
            "started": self._started,
            "running": self._running,
            "metrics": self._metrics,
            "config": self._config,
            "hang": self._hang,
            "note": self._note,
            "stacks": self._stacks,
            "straggler": self._straggler,
            "straggler_over": self._straggler_over,
            "exited": self._exited,
            "verdict": self._verdict,
            "lost": self._lost,
            "end": self._end,
        }

    # What it says.

    @property
    def attempt(self) -> Attempt | None:
        """The last one; None before the first."""
        return self.attempts[-1] if self.attempts else None

    @property
    def step(self) -> int | None:
        """Optimizer steps that the rank furthest ahead has done; None if no rank tells them."""
        steps = [one.step for one in (*self.ranks.values(), *self.folded.values()) if one.step is not None]
        return max(steps, default=None)

    @property
    def step_s(self) -> float | None:
        """Seconds of a step, in the mean of the last ones."""
        sources = (*self.ranks.values(), *self.folded.values())
        told = sorted(one.times.step_s for one in sources if one.times is not None)
        if told:
            return told[len(told) // 2]
        rate = self.last("steps_per_s")
        return 1 / rate if rate else None

    @property
    def total_steps(self) -> int | None:
        """As many as the program says that it will do, by `dslaunch.report(total_steps=...)`."""
        total = self._whole_of("total_steps")
        return total if total is not None and total > 0 else None

    @property
    def left_s(self) -> float | None:
        """How long the steps that are left will take; None if that is not known."""
        total, step, step_s = self.total_steps, self.step, self.step_s
        if total is None or step is None or step_s is None or self.exit_code is not None:
            return None
        return max(0, total - step) * step_s

    @property
    def step_at(self) -> float:
        """When a step was told last; 0: none."""
        return max((one.step_at for one in (*self.ranks.values(), *self.folded.values())), default=0.0)

    def recent(self, name: str) -> tuple[tuple[float, float], ...]:
        """Time and value of a number of the run in the last ten minutes."""
        return tuple(self._recent.get(name, ()))

    def last(self, name: str) -> float | None:
        """The newest value of a number of the run."""
        found = self.series.get(name)
        return None if found is None or not len(found) else found.last

    def _whole_of(self, name: str) -> int | None:
        told = [one.value(name) for one in (*self.ranks.values(), *self.folded.values())]
        finite = [int(one) for one in told if one is not None and math.isfinite(one)]
        return max(finite, default=None)

    # What it is told.

    def take(self, event: Mapping[str, Any]) -> None:
        """One event. What is not known is left out; nothing is raised, whatever it has."""
        at = number(event.get("at"))
        if at is None or not math.isfinite(at):
            at = self.at
        self.at = max(self.at, at)
        take = self._take.get(text(event.get("event")))
        if take is None:
            self.num_unknown += 1
            return
        take(at, event)

    def _job(self, at: float, event: Mapping[str, Any]) -> None:
        if self.job.name:  # a file that begins later repeats it
            return
        words = {name: text(event.get(name)) for name in Job._fields[3:]}
        command = tuple(map(text, items(event.get("command"))))
        self.job = Job(at, text(event.get("name")), command, **words)

    def _attempt(self, at: float, event: Mapping[str, Any]) -> None:
        number_ = whole(event.get("attempt")) or 0
        if self.attempt is not None and self.attempt.number == number_:
            return  # repeated
        attempt = Attempt(number_, at, workers_of(event.get("workers")))
        attempt.log_folder = text(event.get("log_folder"))
        self.attempts.append(attempt)
        size = self._num_rank_points
        self.ranks = {
            one.rank: RankState(one.rank, one.host, one.local_rank, num_points=size)
            for one in attempt.workers
        }
        self.folded, self._progress, self.present_stragglers = {}, {}, {}
        self.hosts = {host: self.hosts.get(host, HostState(host, num_points=size)) for host in attempt.hosts}

    def _phase(self, at: float, event: Mapping[str, Any]) -> None:
        attempt = self.attempt
        if attempt is None or len(attempt.phases) >= MAX_PHASES:
            return
        began_at = number(event.get("began_at"))
        if began_at is None:
            began_at = attempt.phases[-1].ended_at if attempt.phases else attempt.began_at
        attempt.phases.append(Phase(text(event.get("phase")), began_at, at))

    def _started(self, _: float, event: Mapping[str, Any]) -> None:
        rank = self._rank_of(event)
        if rank is not None:
            rank.pid = whole(event.get("pid")) or 0

    def _running(self, at: float, _: Mapping[str, Any]) -> None:
        if self.attempt is not None:
            self.attempt.running_at = at

    def _config(self, _: float, event: Mapping[str, Any]) -> None:
        rank = whole(event.get("rank")) or 0
        if not self.config or rank <= min(self.config):
            self.config = {rank: mapping(event.get("config"))}

    def _hang(self, at: float, event: Mapping[str, Any]) -> None:
        rank = whole(event.get("rank"))
        self.hangs.append(Report(at, rank, "", tuple(text(event.get("report")).split("\n"))))
        if rank in self.ranks:
            self.ranks[rank].has_hang = True

    def _note(self, at: float, event: Mapping[str, Any]) -> None:
        self.notes.append(Note(at, whole(event.get("level")) or 20, text(event.get("text"))))

    def _stacks(self, at: float, event: Mapping[str, Any]) -> None:
        lines = tuple(map(text, items(event.get("lines"))))
        self.num_stacks += 1
        self.stacks.append(Report(at, None, text(event.get("title")), lines))

    def _straggler(self, at: float, event: Mapping[str, Any]) -> None:
        rank = whole(event.get("rank"))
        if rank is None:
            return
        words = {name: text(event.get(name)) for name in ("host", "cause", "text")}
        found = Straggler(at, rank, share=number(event.get("share")) or 0.0, **words)
        self.stragglers.append(found)
        if rank in self.present_stragglers or len(self.present_stragglers) < MAX_REPORTS:
            self.present_stragglers[rank] = found

    def _straggler_over(self, _: float, event: Mapping[str, Any]) -> None:
        rank = whole(event.get("rank"))
        if rank is not None:
            self.present_stragglers.pop(rank, None)

    def _exited(self, at: float, event: Mapping[str, Any]) -> None:
        rank = self._rank_of(event)
        if rank is None or self.attempt is None:
            return
        code, signal = whole(event.get("code")) or 0, whole(event.get("signal")) or 0
        rank.exit_code, rank.signal = code, signal
        if len(self.attempt.exits) < len(self.ranks):
            self.attempt.exits.append(Exit(at, rank.rank, rank.host, code, signal))

    def _verdict(self, at: float, event: Mapping[str, Any]) -> None:
        if self.attempt is not None:
            self.attempt.verdict = verdict_of(at, event)

    def _lost(self, _: float, event: Mapping[str, Any]) -> None:
        self.num_lost += whole(event.get("events")) or 0

    def _end(self, _: float, event: Mapping[str, Any]) -> None:
        self.exit_code = whole(event.get("exit_code")) or 0
        self.duration_s = number(event.get("duration_s")) or 0.0

    def _rank_of(self, event: Mapping[str, Any]) -> RankState | None:
        rank = whole(event.get("rank"))
        return None if rank is None else self.ranks.get(rank)

    # Numbers.

    def _metrics(self, at: float, event: Mapping[str, Any]) -> None:
        since_s = at - self._metrics_at if self._metrics_at else 0.0
        self._metrics_at = at
        for name, row in mapping(event.get("hosts")).items():
            if name in self.hosts:
                self.hosts[name].take(at, mapping(row))
        told: list[RankState | FoldedRanks] = []
        has_steps = False
        for name, row in mapping(event.get("ranks")).items():
            source = self._source(name)
            if source is None:
                continue
            before = source.step_at
            source.take(at, mapping(row))
            has_steps = has_steps or source.step_at != before
            told.append(source)
        self.has_numbers = self.has_numbers or bool(told)
        self._count_lines(at, mapping(event.get("lines")), since_s)
        if has_steps:
            self._follow_run(at, told)

    def _source(self, name: str) -> RankState | FoldedRanks | None:
        """Who tells the numbers of this name."""
        if name.endswith(_FOLDED):
            host = name.removesuffix(_FOLDED)
            if host not in self.hosts:
                return None
            if host not in self.folded:
                self.folded[host] = FoldedRanks(host, num_points=self._num_rank_points)
            return self.folded[host]
        return self.ranks.get(int(name)) if name.isascii() and name.isdigit() and len(name) < 10 else None

    def _count_lines(self, at: float, lines: Mapping[str, Any], since_s: float) -> None:
        told = {
            int(name): whole(one) or 0 for name, one in lines.items() if name.isascii() and name.isdigit()
        }
        for rank in self.ranks.values():
            number_ = told.get(rank.rank, 0)
            rank.num_lines += number_
            rank.lines_per_s = number_ / since_s if since_s > 0 else 0.0
        total = sum(told.values())
        self.num_lines += total
        if since_s > 0:
            self._add(at, "lines_per_s", total / since_s)

    def _follow_run(self, at: float, told: list[RankState | FoldedRanks]) -> None:
        """The numbers of the run as a whole. A mean is that of all, also of those that tell later than
        others: the ranks' losses differ, and the mean of a part of them would jump to and fro.
        """
        for name in ("loss", "lr", "grad_norm", "loss_scale"):
            if not any(name in one.values for one in told):
                continue
            everyone = (*self.ranks.values(), *self.folded.values())
            values = [one.values[name] for one in everyone if name in one.values]
            if values:
                self._add(at, name, sum(values) / len(values))
        times = [one.times for one in told if one.times is not None]
        if times:
            step_s = sorted(one.step_s for one in times)[len(times) // 2]
            self._add(at, "step_s", step_s)
            self._add(at, "steps_per_s", 1 / step_s)
        for name in ("samples", "tokens", *(() if times else ("step",))):
            values = [one.values[name] for one in told if name in one.values]
            if values:
                self._add_rate(at, name, max(values))

    def _add_rate(self, at: float, name: str, done: float) -> None:
        """Of what is counted up: how much it grows in a second."""
        before_at, before = self._progress.get(name, (at, done))
        self._progress[name] = (at, done)
        if at > before_at and done >= before:
            shown = "steps" if name == "step" else name
            self._add(at, f"{shown}_per_s", (done - before) / (at - before_at))

    def _add(self, at: float, name: str, value: float) -> None:
        self.series.setdefault(name, Series(self._num_points)).add(at, value)
        recent = self._recent.setdefault(name, deque(maxlen=int(RECENT_S)))
        recent.append((at, value))
        while recent[0][0] < at - RECENT_S:
            recent.popleft()
