"""The present facts about a job, as families of numbers with labels, for Prometheus and its like.

Names and units follow Prometheus's rules: base units, `_total` for numbers that only grow. A number of one
rank has the labels `rank` and `host`; of folded ranks `host` and `stat` (min, mean, max).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ..run_state.attempt import AttemptState
from ..run_state.goodput import share_of
from ..run_state.metric_table import (
    COUNTER,
    GAUGE,
    GOODPUT_FAMILY,
    GPU,
    HOST,
    RANK,
    REPORTED_FAMILY,
    SPENT_FAMILY,
    STATE_FAMILY,
    Family,
    Metric,
)
from ..run_state.rank_state import FOLDED, HostNumbers, NumberSource, RankState
from ..run_state.run_state import Observer, SaidNote, Straggler, ToldText
from ..run_state.values import number
from .telemetry import Telemetry

STALE_S = 30.0  # a host without a report for so long, and for ten intervals, has left
MAX_LABEL = 200
INFO = "info"
_SUFFIXES = {COUNTER: "_total", INFO: "_info", GAUGE: ""}  # suffixes of names, by kind
STATS = ("min", "mean", "max")

Labels = dict[str, str]
Sample = tuple[Labels, float]

_JOB = Family("dslaunch_job", "What runs, and by whom.", INFO)
_START = Family("dslaunch_job_start_time_seconds", "When the job began, since the epoch.")
_ATTEMPTS = Family(
    "dslaunch_attempts", "Starts of the job: 1, and one more for each that followed a failure.", COUNTER
)
_FAILED = Family("dslaunch_failed_attempts", "Attempts that ended with another code than 0.", COUNTER)
_WORKERS = Family("dslaunch_workers", "Workers of the present attempt.")
_RUNNING = Family("dslaunch_workers_running", "Of these, started and not ended.")
_NOTES = Family("dslaunch_notes", "Sentences of dslaunch, by level: info, warning, error.", COUNTER)
_STRAGGLERS = Family("dslaunch_stragglers", "How often others were found waiting for this rank.", COUNTER)
_HANGS = Family("dslaunch_hangs", "Collectives that a watchdog of this rank reported.", COUNTER)
_LINES = Family("dslaunch_output_lines", "Lines that the workers wrote.", COUNTER)
_HOST_TIME = Family(
    "dslaunch_host_last_numbers_timestamp_seconds", "When the host last told numbers, since the epoch."
)
_LEVELS = {20: "info", 30: "warning", 40: "error"}
_STEPS = "steps"
_OF_JOB = ("samples", "tokens")  # any rank counts them for the whole job


def shown_name(family: Family) -> str:
    """Return the name with the suffix of its kind."""
    return family.name + _SUFFIXES[family.kind]


class _Growth:
    """The growth of numbers that only grow within an attempt, and may be less at the start of the next one,
    which begins from a checkpoint. Several numbers are those of folded ranks.
    """

    def __init__(self) -> None:
        self.total: list[float] = []
        self._last: list[float] = []

    def take(self, numbers: Sequence[float | None]) -> None:
        """Take a report; values that are no finite numbers change nothing."""
        known = [one for one in numbers if one is not None and math.isfinite(one)]
        if len(known) < len(numbers):
            return
        if len(known) != len(self._last):
            self.total = known[:]
        else:
            steps = zip(known, self._last, strict=True)
            grown = [max(0.0, now - before) for now, before in steps]
            self.total = [before + one for before, one in zip(self.total, grown, strict=True)]
        self._last = known


class Gauges(Observer):
    """The last numbers, and sums over all attempts. `families()` may be called by any thread."""

    def __init__(self, telemetry: Telemetry, *, interval_s: float = 1.0) -> None:
        self._state, self._lock = telemetry.state, telemetry.lock
        self._stale_s = max(STALE_S, 10 * interval_s)
        self._host_of: dict[int, str] = {}
        self._steps: dict[str, list[float]] = {}  # sums by source: of a rank one number, else min, mean, max
        self._lines: dict[int, int] = {}  # sums by rank
        self._heard_at: dict[str, float] = {}  # hosts, on the monotonic clock
        self._counts: dict[Family, dict[tuple[tuple[str, str], ...], int]] = {}
        self._skipped: dict[str, _Growth] = {}  # steps, as `_steps`
        self._trained: dict[str, _Growth] = {}  # samples and tokens
        self._trained_of: dict[str, str] = {}  # the source of these: the first one in this attempt
        self.version = 0  # grows with each event
        with self._lock:
            self._state.observe(self)

    # Counting.

    def began(self, attempt: AttemptState) -> None:
        """Drop hosts and ranks that the attempt does not have."""
        before, self._host_of = self._host_of, {one.rank: one.host for one in self._state.ranks.values()}
        stays = {rank for rank, host in self._host_of.items() if before.get(rank) == host}
        keys = {str(rank) for rank in stays} | {f"{host}{FOLDED}" for host in attempt.hosts}
        self._steps = {key: one for key, one in self._steps.items() if key in keys}
        self._skipped = {key: one for key, one in self._skipped.items() if key in keys}
        self._lines = {rank: one for rank, one in self._lines.items() if rank in stays}
        self._trained_of = {}

    def told(
        self,
        at: float,
        sources: Sequence[NumberSource],
        hosts: Sequence[HostNumbers],
        lines: Mapping[int, int],
    ) -> None:
        for source in sources:
            key, row = source.key, source.told
            steps = [one or 0.0 for one in _numbers(row.get(_STEPS, 0))]
            if all(map(math.isfinite, steps)):
                known = self._steps.get(key, [0.0] * len(steps))
                self._steps[key] = [a + b for a, b in zip(known, steps, strict=False)]
            if "skipped" in row:
                self._skipped.setdefault(key, _Growth()).take(_numbers(row["skipped"]))
            for name in _OF_JOB:
                numbers = _numbers(row.get(name))[-1:]
                if numbers and self._trained_of.setdefault(name, key) == key:
                    self._trained.setdefault(name, _Growth()).take(numbers)
        for host in hosts:
            self._heard_at[host.host] = time.monotonic()
        for rank, num_lines in lines.items():
            self._lines[rank] = self._lines.get(rank, 0) + num_lines

    def noted(self, note: SaidNote) -> None:
        if note.level in _LEVELS:
            self._count(_NOTES, {"level": _LEVELS[note.level]})

    def held_up(self, straggler: Straggler) -> None:
        labels = {"rank": str(straggler.rank), "host": _text(straggler.host)}
        self._count(_STRAGGLERS, {**labels, "cause": _text(straggler.cause)})

    def hung(self, report: ToldText) -> None:
        self._count(_HANGS, self._labels_of(-1 if report.rank is None else report.rank))

    def _count(self, family: Family, labels: Labels) -> None:
        counts, key = self._counts.setdefault(family, {}), tuple(sorted(labels.items()))
        counts[key] = counts.get(key, 0) + 1

    # For readers.

    def families(self) -> dict[Family, list[Sample]]:
        """Return all present numbers."""
        found: dict[Family, list[Sample]] = {}
        with self._lock:
            for family, labels, value in self._samples():
                found.setdefault(family, []).append((labels, value))
        return found

    def _samples(self) -> Iterator[tuple[Family, Labels, float]]:
        state = self._state
        yield from self._of_job()
        for source in state.sources:
            if not isinstance(source, RankState) or source.exit_code is None:
                yield from self._of_source(source)
        for sums, metric in ((self._steps, RANK[_STEPS]), (_totals(self._skipped), RANK["skipped"])):
            for key, totals in sums.items():
                for labels, value in self._each(key, totals):
                    yield from _sample(metric, labels, value)
        yield from self._of_lines()
        now = time.monotonic()
        for host in state.hosts.values():
            if now - self._heard_at.get(host.host, -math.inf) <= self._stale_s:
                yield _HOST_TIME, {"host": _text(host.host)}, host.at
                yield from _of_host(host)

    def _of_job(self) -> Iterator[tuple[Family, Labels, float]]:
        state, job = self._state, self._state.job
        if job.at:
            labels = {"name": job.name, "user": job.user, "launch_host": job.host}
            labels.update(version=job.version, launcher=job.launcher)
            yield _JOB, {name: _text(value) for name, value in labels.items()}, 1.0
            yield _START, {}, job.at
        if state.ranks:
            has_ended = state.attempt is not None and state.attempt.verdict is not None
            running = (
                0
                if has_ended
                else sum(bool(one.pid) and one.exit_code is None for one in state.ranks.values())
            )
            yield _WORKERS, {}, float(len(state.ranks))
            yield _RUNNING, {}, float(running)
        if state.num_attempts:
            yield _ATTEMPTS, {}, float(state.num_attempts)
        if any(one.verdict is not None for one in state.attempts.values()):
            yield _FAILED, {}, float(state.num_failed_attempts)
        spent = state.spent_s
        share = share_of(spent)
        if share is not None:
            yield GOODPUT_FAMILY, {}, share
            for name, seconds in spent.items():
                yield SPENT_FAMILY, {"spent": name}, seconds
        for family, counts in self._counts.items():
            for labels_of, num in counts.items():
                yield family, dict(labels_of), float(num)
        for name, growth in self._trained.items():
            for total in growth.total:
                yield from _sample(RANK[name], {}, total)

    def _of_source(self, source: NumberSource) -> Iterator[tuple[Family, Labels, float]]:
        state = source.told.get("state")
        if isinstance(state, str) and state:
            yield STATE_FAMILY, {**self._labels(source.key), "state": _text(state)}, 1.0
        for name, value in source.values.items():
            metric = RANK.get(name, Metric())
            is_sum = metric.family is not None and (metric.family.kind == COUNTER or name.endswith("_s"))
            if name == "state" or is_sum:
                continue
            for labels, one in self._each(source.key, _numbers(value)):
                yield from _sample(metric, labels, one, name=name)
        row = source.told_of_steps
        steps = [one or 0.0 for one in _numbers(row.get(_STEPS))]
        # The mean of folded ranks: all do the same steps.
        num_steps = steps[len(steps) // 2] if steps else 0.0
        for name, value in row.items():
            if name.endswith("_s") and name in RANK and num_steps > 0:
                for labels, seconds in self._each(source.key, _numbers(value)):
                    yield from _sample(RANK[name], labels, seconds / num_steps)

    def _of_lines(self) -> Iterator[tuple[Family, Labels, float]]:
        """Yield lines by rank, or by host where numbers come by host."""
        if not self._state.folded:
            for rank, num in self._lines.items():
                yield _LINES, self._labels_of(rank), float(num)
            return
        by_host: dict[str, int] = {}
        for rank, num in self._lines.items():
            host = self._host_of.get(rank, "")
            by_host[host] = by_host.get(host, 0) + num
        for host, num in by_host.items():
            yield _LINES, {"host": _text(host)}, float(num)

    def _each(self, key: str, numbers: Sequence[float | None]) -> Iterator[tuple[Labels, float]]:
        """Yield one sample for a rank's number, three for those of folded ranks."""
        labels, is_folded = self._labels(key), key.endswith(FOLDED)
        for stat, one in zip(STATS, numbers if is_folded else numbers[:1], strict=False):
            if one is not None:
                yield ({**labels, "stat": stat} if is_folded else labels), one

    def _labels(self, key: str) -> Labels:
        return (
            {"host": _text(key.removesuffix(FOLDED))} if key.endswith(FOLDED) else self._labels_of(int(key))
        )

    def _labels_of(self, rank: int) -> Labels:
        return {"rank": str(rank), "host": _text(self._host_of.get(rank, ""))}


def _totals(growths: Mapping[str, _Growth]) -> dict[str, list[float]]:
    return {key: one.total for key, one in growths.items()}


def _sample(
    metric: Metric, labels: Labels, value: float, *, name: str = ""
) -> Iterator[tuple[Family, Labels, float]]:
    """Yield a sample of the number's family, or of that of the program's own numbers."""
    if metric.family is not None:
        yield metric.family, {**labels, **dict((metric.series,) if metric.series else ())}, value
    elif name:
        yield REPORTED_FAMILY, {**labels, "name": _text(name)}, value


def _of_host(host: HostNumbers) -> Iterator[tuple[Family, Labels, float]]:
    values = host.values
    for name, metric in HOST.items():
        if name in values:
            yield from _sample(metric, {"host": _text(host.host)}, values[name])
    for place, gpu in enumerate(host.gpus):
        for name, metric in GPU.items():
            if name in gpu:
                yield from _sample(metric, {"host": _text(host.host), "gpu": str(place)}, gpu[name])


def all_names() -> set[str]:
    """Return every name that a series may have, as it is shown."""
    of_job: Iterable[Family] = (
        *(_JOB, _START, _ATTEMPTS, _FAILED, _WORKERS, _RUNNING, _NOTES, _STRAGGLERS, _HANGS, _LINES),
        *(_HOST_TIME, STATE_FAMILY, REPORTED_FAMILY, SPENT_FAMILY, GOODPUT_FAMILY),
    )
    told = (one.family for one in (*RANK.values(), *HOST.values(), *GPU.values()) if one.family is not None)
    return {shown_name(family) for family in (*of_job, *told)}


def _numbers(value: object) -> list[float | None]:
    """Return a number, or of folded ranks the least, the mean and the greatest."""
    if isinstance(value, list):
        return [number(one) for one in value[:3]]
    return [] if value is None else [number(value)]


def _text(value: object) -> str:
    """Return a label: a short text that can be written as UTF-8."""
    return str(value)[:MAX_LABEL].encode("utf-8", "replace").decode()
