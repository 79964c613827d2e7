"""The state of a run, by the events of its job."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from .attempt import MAX_EXITS, AttemptState, Exit, verdict_of, workers_of
from .goodput import Goodput
from .rank_state import FOLDED, HostNumbers, NumberSource, RankState
from .rates import Rates
from .recovery import Recovery, recoveries
from .series import Curve, Kept, single
from .step_times import StepTimes
from .values import items, mapping, mean_of, number, numbers, text, whole, whole_or

# Numbers of entries that are kept of a long list: the first and the last.
NOTES = (200, 800)
STRAGGLERS = (1000, 1000)
REPORTS = (25, 25)  # reports of watchdogs, and of stacks; each may be long
MAX_ATTEMPTS = 400  # the newest
MAX_CONFIGS = 16
MAX_PRESENT = 50  # stragglers
MAX_UNKNOWN = 20  # kinds of events whose names are kept
RECENT_S = 600.0
MAX_NOTE = 4000  # characters


class JobEvent(NamedTuple):
    """The first event of every file."""

    at: float = 0.0
    name: str = ""
    command: tuple[str, ...] = ()
    cwd: str = ""
    user: str = ""
    host: str = ""
    version: str = ""
    launcher: str = ""


class SaidNote(NamedTuple):
    """A sentence of dslaunch. `level` is that of Python's logging."""

    at: float
    level: int
    text: str


class Straggler:
    """A rank that others wait for. `share` is their waiting part of a step, 0 to 1, `text` the printed
    sentence; `over_at` is 0 while the rank is not known to be well again.
    """

    def __init__(self, at: float, rank: int, event: Mapping[str, Any]) -> None:
        self.at, self.rank = at, rank
        self.host, self.cause = text(event.get("host")), text(event.get("cause"))
        self.share = number(event.get("share")) or 0.0
        self.text = text(event.get("text")) or f"rank {rank} on {self.host} holds up the others: {self.cause}"
        self.over_at = 0.0


class ToldText(NamedTuple):
    """Text that was asked for or reported: a watchdog's, with its rank, or stacks, with their title."""

    at: float
    rank: int | None
    title: str
    lines: tuple[str, ...]


class Observer:
    """Keeps more of a run than its state does. Each method is called when the state has the fact."""

    def began(self, attempt: AttemptState) -> None:
        """An attempt begins."""

    def told(
        self,
        at: float,
        sources: Sequence[NumberSource],
        hosts: Sequence[HostNumbers],
        lines: Mapping[int, int],
    ) -> None:
        """These ranks and hosts have reported numbers, and ranks have written so many lines."""

    def made(self, at: float, name: str, value: float, passed_s: float) -> None:
        """A rate of the run as a whole, over so many seconds, was made."""

    def noted(self, note: SaidNote) -> None:
        """A note of dslaunch has come."""

    def held_up(self, straggler: Straggler) -> None:
        """Others wait for this rank."""

    def hung(self, report: ToldText) -> None:
        """A watchdog has reported a collective that takes too long."""


class RunState:
    """All facts about a run; bounded in size."""

    def __init__(self) -> None:
        self._observers: list[Observer] = []
        self.job = JobEvent()
        self.began_at = 0.0  # time of the first event
        self.at = 0.0  # time of the newest event
        self.attempts: dict[int, AttemptState] = {}
        self.attempt: AttemptState | None = None  # the last one; None before the first
        self.num_attempts = self.num_failed_attempts = 0
        self.ranks: dict[int, RankState] = {}
        self.servers: dict[int, RankState] = {}  # by their numbers, which follow those of the ranks
        self.folded: dict[str, NumberSource] = {}  # by host
        self.hosts: dict[str, HostNumbers] = {}
        self.configs: dict[int, Any] = {}  # by rank
        self.trials: dict[int, Any] = {}  # by rank: times of steps, in a run of `dslaunch plan --tune`
        self.loss = Curve()  # the mean of all ranks
        self.last_loss: float | None = None  # rank 0's, or that of the rank that reported one first
        self.last_step: float | None = None  # the last of any attempt
        self.total_steps: int | None = None  # as the program says, by dslaunch.report(total_steps=...)
        self.notes: Kept[SaidNote] = Kept(*NOTES)
        self.stragglers: Kept[Straggler] = Kept(*STRAGGLERS)
        self.hangs: Kept[ToldText] = Kept(*REPORTS)
        self.stacks: Kept[ToldText] = Kept(*REPORTS)
        self.last_hang: ToldText | None = None
        self.limits: dict[str, float] = {}  # seconds that the job may stand still, by section
        self.has_numbers = False  # numbers of ranks: without them there are only lines of output
        self.num_lines = 0
        self.num_lost = 0  # events that are not in the file
        self.num_unknown = 0  # events of kinds that are not known here
        self.unknown: set[str] = set()  # some of these kinds
        self.exit_code: int | None = None  # the job's; None: it has not ended
        self.duration_s = 0.0
        self._present: dict[tuple[int, str], Straggler] = {}  # those that are not well again
        self._recent: dict[str, deque[tuple[float, float]]] = {}
        self._metrics_at = 0.0
        self._rates = Rates()
        self._goodput = Goodput()
        self._loss_of = ""
        self._take: dict[str, Callable[[float, Mapping[str, Any]], None]] = {
            "job": self._job,
            "attempt": self._begin_attempt,
            "phase": self._phase,
            "started": self._started,
            "running": self._running,
            "healthy": self._healthy,
            "server_restart": self._server_restart,
            "metrics": self._metrics,
            "config": self._config,
            "trial": self._trial,
            "hang": self._hang,
            "note": self._note,
            "limits": self._limits,
            "stacks": self._stacks,
            "straggler": self._straggler,
            "straggler_over": self._straggler_over,
            "exited": self._exited,
            "verdict": self._verdict,
            "lost": self._lost,
            "end": self._end,
        }

    def observe(self, observer: Observer) -> None:
        """Call the observer from now on."""
        self._observers.append(observer)

    # Questions.

    @property
    def sources(self) -> list[NumberSource]:
        """Sources of numbers, in the order of ranks."""
        return [*self.ranks.values(), *self.folded.values()]

    @property
    def step(self) -> int | None:
        """Number of optimizer steps that the rank furthest ahead has done; None if no rank reports them."""
        return max((one.step for one in self.sources if one.step is not None), default=None)

    @property
    def step_s(self) -> float | None:
        """Seconds of a step, in the mean of the last ones."""
        told = sorted(one.step_s for one in self.all_times())
        if told:
            return told[len(told) // 2]
        rate = self.last("steps_per_s")
        return 1 / rate if rate else None

    def all_times(self) -> list[StepTimes]:
        """Parts of steps, of each source that reports them."""
        return [one for source in self.sources if (one := source.times) is not None]

    @property
    def left_s(self) -> float | None:
        """Time that the remaining steps will take; None if it is not known."""
        total, step, step_s = self.total_steps, self.step, self.step_s
        if total is None or step is None or step_s is None or self.exit_code is not None:
            return None
        return max(0, total - step) * step_s

    @property
    def step_at(self) -> float:
        """Time of the last report of a step; 0: none."""
        return max((one.step_at for one in self.sources), default=0.0)

    @property
    def straggler(self) -> Straggler | None:
        """The straggler that others wait for most, as far as reported; None if there is none now."""
        return max(self._present.values(), key=lambda one: (one.share, one.at), default=None)

    @property
    def recoveries(self) -> list[Recovery]:
        """The ways back into training, one for each start after a failure."""
        return recoveries(self.attempts.values())

    @property
    def spent_s(self) -> dict[str, float]:
        """Seconds of the job by what they were spent on, as far as that is known."""
        return self._goodput.spent(self.attempts.values(), began_at=self.began_at, at=self.at)

    def recent(self, name: str) -> tuple[tuple[float, float], ...]:
        """Return time and value of a rate of the run in the last ten minutes."""
        return tuple(self._recent.get(name, ()))

    def last(self, name: str) -> float | None:
        """Return the newest value of a rate of the run."""
        found = self._recent.get(name)
        return found[-1][1] if found else None

    # Events.

    def take(self, event: Mapping[str, Any]) -> None:
        """Take one event. Unknown parts are left out; no event raises an error."""
        at = number(event.get("at"))
        if at is None or not math.isfinite(at):
            at = self.at
        kind = text(event.get("event"))
        take = self._take.get(kind)
        if take is None:
            self.num_unknown += 1
            if len(self.unknown) < MAX_UNKNOWN:
                self.unknown.add(kind[:40])
            return
        self.began_at = self.began_at or at
        self.at = max(self.at, at)
        take(at, event)

    def _job(self, at: float, event: Mapping[str, Any]) -> None:
        if not self.job.name:  # a file that begins later repeats it
            words = {name: text(event.get(name)) for name in JobEvent._fields[3:]}
            command = tuple(map(text, items(event.get("command"))))
            self.job = JobEvent(at, text(event.get("name")), command, **words)

    def _attempt_of(
        self, at: float, event: Mapping[str, Any], *, began_at: float | None = None
    ) -> AttemptState:
        """Return the attempt of an event. Processes that MPI or Slurm starts report only its end."""
        current = -1 if self.attempt is None else self.attempt.number
        place = max(0, whole_or(event.get("attempt"), current))
        attempt = self.attempts.get(place)
        if attempt is None:
            attempt = self.attempts[place] = AttemptState(place, at if began_at is None else began_at)
            self.num_attempts += 1
            self.began_at = min(self.began_at, attempt.began_at)
            if len(self.attempts) > MAX_ATTEMPTS:
                oldest = self.attempts.pop(next(iter(self.attempts)))
                self._goodput.drop(oldest, self.attempts.values(), began_at=self.began_at)
            if place > current:
                self.attempt = attempt
        attempt.last_at = max(attempt.last_at, at)
        return attempt

    def _begin_attempt(self, at: float, event: Mapping[str, Any]) -> None:
        attempt = self._attempt_of(at, event)
        if attempt.has_begun:
            return  # repeated
        workers = workers_of(event.get("workers"))
        attempt.began_at = at
        attempt.begin(workers, text(event.get("log_folder")))
        self.attempt = attempt
        states = {one.rank: RankState(one.rank, one.host, one.local_rank) for one in workers}
        for one in workers:
            states[one.rank].role = one.role
        self.ranks = {rank: one for rank, one in states.items() if not one.role}
        self.servers = {rank: one for rank, one in states.items() if one.role}
        self.folded, self._present, self._rates, self._metrics_at = {}, {}, Rates(), 0.0
        self.hosts = {host: self.hosts.get(host, HostNumbers(host)) for host in attempt.hosts}
        for observer in self._observers:
            observer.began(attempt)

    def _phase(self, at: float, event: Mapping[str, Any]) -> None:
        self._attempt_of(at, event).add_phase(text(event.get("phase")), at)

    def _started(self, at: float, event: Mapping[str, Any]) -> None:
        self._attempt_of(at, event)
        rank = self._rank_of(event)
        if rank is not None:
            rank.pid = whole(event.get("pid")) or 0

    def _healthy(self, _: float, event: Mapping[str, Any]) -> None:
        server = self._rank_of(event)
        if server is not None:
            server.is_healthy = True

    def _server_restart(self, _: float, event: Mapping[str, Any]) -> None:
        server = self._rank_of(event)
        if server is not None:
            server.num_restarts += 1
            server.is_healthy, server.pid, server.exit_code, server.signal = False, 0, None, 0

    def _running(self, at: float, event: Mapping[str, Any]) -> None:
        attempt = self._attempt_of(at, event)
        attempt.running_at = attempt.running_at or at

    def _config(self, _: float, event: Mapping[str, Any]) -> None:
        rank = whole_or(event.get("rank"))
        if rank in self.configs or len(self.configs) < MAX_CONFIGS:
            self.configs[rank] = event.get("config")

    def _trial(self, _: float, event: Mapping[str, Any]) -> None:
        rank = whole(event.get("rank"))
        if rank in self.ranks:
            self.trials[rank] = event.get("trial")

    def _hang(self, at: float, event: Mapping[str, Any]) -> None:
        rank = whole(event.get("rank"))
        report = ToldText(at, rank, "", tuple(text(event.get("report")).split("\n")))
        self.hangs.append(report)
        self._goodput.hang(at, self.attempt)
        self.last_hang = report
        if rank in self.ranks:
            self.ranks[rank].has_hang = True
        for observer in self._observers:
            observer.hung(report)

    def _note(self, at: float, event: Mapping[str, Any]) -> None:
        note = SaidNote(at, whole_or(event.get("level"), 20), text(event.get("text"))[:MAX_NOTE])
        self.notes.append(note)
        for observer in self._observers:
            observer.noted(note)

    def _limits(self, at: float, event: Mapping[str, Any]) -> None:
        self.limits = numbers(event.get("limits"))

    def _stacks(self, at: float, event: Mapping[str, Any]) -> None:
        self.stacks.append(
            ToldText(at, None, text(event.get("title")), tuple(map(text, items(event.get("lines")))))
        )

    def _straggler(self, at: float, event: Mapping[str, Any]) -> None:
        rank = whole(event.get("rank"))
        if rank is None:
            return
        found = Straggler(at, rank, event)
        self.stragglers.append(found)
        if len(self._present) < MAX_PRESENT:
            self._present[rank, found.cause] = found
        for observer in self._observers:
            observer.held_up(found)

    def _straggler_over(self, at: float, event: Mapping[str, Any]) -> None:
        found = self._present.pop((whole_or(event.get("rank")), text(event.get("cause"))), None)
        if found is not None:
            found.over_at = at

    def _exited(self, at: float, event: Mapping[str, Any]) -> None:
        attempt, rank = self._attempt_of(at, event), self._rank_of(event)
        if rank is None:
            return
        rank.exit_code, rank.signal = whole(event.get("code")) or 0, whole(event.get("signal")) or 0
        attempt.num_exits += 1
        if len(attempt.exits) < MAX_EXITS:
            attempt.exits.append(Exit(at, rank.rank, rank.host, rank.exit_code, rank.signal))

    def _verdict(self, at: float, event: Mapping[str, Any]) -> None:
        verdict = verdict_of(at, event)
        attempt = self._attempt_of(at, event, began_at=at - verdict.duration_s)
        self.num_failed_attempts += bool(verdict.exit_code)
        attempt.end(verdict)

    def _lost(self, _: float, event: Mapping[str, Any]) -> None:
        self.num_lost += max(0, whole_or(event.get("events"), 0))

    def _end(self, _: float, event: Mapping[str, Any]) -> None:
        self.exit_code = whole(event.get("exit_code")) or 0
        self.duration_s = number(event.get("duration_s")) or 0.0

    def _rank_of(self, event: Mapping[str, Any]) -> RankState | None:
        rank = whole(event.get("rank"))
        return None if rank is None else self.ranks.get(rank, self.servers.get(rank))

    # Numbers.

    def _metrics(self, at: float, event: Mapping[str, Any]) -> None:
        self._attempt_of(at, event)
        hosts = []
        for name, row in mapping(event.get("hosts")).items():
            if name in self.hosts:
                self.hosts[name].take(at, mapping(row))
                hosts.append(self.hosts[name])
        sources = []
        for name, row in mapping(event.get("ranks")).items():
            source = self._source(name)
            if source is not None:
                source.take(at, mapping(row))
                sources.append(source)
        self.has_numbers = self.has_numbers or bool(sources)
        lines = {
            int(name): whole_or(one, 0)
            for name, one in mapping(event.get("lines")).items()
            if name.isascii() and name.isdigit() and len(name) < 10
        }
        for observer in self._observers:
            observer.told(at, sources, hosts, lines)
        self._count_lines(at, lines)
        self._goodput.take(at, self.attempt, sources)
        self._follow_steps(at, sources)

    def _source(self, name: str) -> NumberSource | None:
        """Return the source of this name."""
        if name.endswith(FOLDED):
            host = name.removesuffix(FOLDED)
            if host in self.hosts and host not in self.folded:
                num_ranks = sum(one.host == host for one in self.ranks.values())
                self.folded[host] = NumberSource(name, host, num_ranks)
            return self.folded.get(host)
        return self.ranks.get(int(name)) if name.isascii() and name.isdigit() and len(name) < 10 else None

    def _count_lines(self, at: float, lines: Mapping[int, int]) -> None:
        passed_s = at - self._metrics_at if self._metrics_at else 0.0
        self._metrics_at = at
        for rank in (*self.ranks.values(), *self.servers.values()):
            told = lines.get(rank.rank, 0)
            rank.num_lines += told
            rank.lines_per_s = told / passed_s if passed_s > 0 else 0.0
        total = sum(lines.values())
        self.num_lines += total
        if passed_s > 0:
            self._make(at, "lines_per_s", total / passed_s, passed_s)

    def _follow_steps(self, at: float, sources: Sequence[NumberSource]) -> None:
        """Update the numbers of the run as a whole. Its loss is the mean of all ranks, also of those that
        report later than others: the ranks' losses differ, and the mean of a part of them would jump to and
        fro.
        """
        for rate in self._rates.of(at, sources):
            if math.isfinite(rate.value):
                self._make(at, *rate)
        losses = [(one.key, loss) for one in sources if (loss := mean_of(one.told.get("loss"))) is not None]
        for key, loss in losses:
            if key == "0" or self._loss_of in ("", key):
                self.last_loss, self._loss_of = loss, key
        if losses:
            everyone = [loss for one in self.sources if (loss := one.value("loss")) is not None]
            number_ = 0 if self.attempt is None else self.attempt.number
            self.loss.add(at, number_, [single("", sum(everyone) / len(everyone))])
        for name in ("step", "total_steps"):
            told = [value for one in sources if (value := mean_of(one.told.get(name))) is not None]
            greatest = max(filter(math.isfinite, told), default=None)
            if greatest is not None and name == "step":
                self.last_step = greatest
            elif greatest is not None and greatest >= 1:
                self.total_steps = int(greatest)

    def _make(self, at: float, name: str, value: float, passed_s: float) -> None:
        recent = self._recent.setdefault(name, deque(maxlen=int(RECENT_S)))
        recent.append((at, value))
        while recent[0][0] < at - RECENT_S:
            recent.popleft()
        for observer in self._observers:
            observer.made(at, name, value, passed_s)
