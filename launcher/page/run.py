"""What is known of one run, put together from its events and its report."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..run_state.values import mapping, number
from .series import Curve, Shares, Spread, single

PHASES = ("forward_s", "backward_s", "optimizer_s", "comm_s", "data_s", "paused_s")
MEMORY_KINDS = ("mem_parameters", "mem_gradients", "mem_optimizer", "mem_activations", "mem_other")
RATES = {"step": "rate", "samples": "samples", "tokens": "tokens"}  # counters, and the curves of their rates
RATE_S, RATE_STEPS = 10.0, 10.0  # until a rate is made of a counter alone, whose ends are rough
LOST_S = 60.0  # after which another rank's counter is taken
KNOWN = ("loss", "lr", "grad_norm", "loss_scale", "skipped", "mem_used", "mem_peak")
_NO_CURVES = frozenset(("step", "total_steps", "samples", "tokens", "steps", "mem_total", *MEMORY_KINDS))
HOST_CURVES = ("cpu", "load1", "mem_used", "net_in", "net_out", "net_wait", "disk_read", "disk_write")
GPU_CURVES = {"gpu_util": "util", "gpu_mem": "mem_used", "gpu_power": "power_w", "gpu_temp": "temp_c"}
MAX_CUSTOM = 12
MAX_RANKS = 4096  # of which totals are kept
MAX_HOSTS = 2048
MAX_STATES = 500
FOLDED = " *"

Row = Mapping[str, Any]


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One start of the job. Times are seconds since the epoch, 0 for what is not known.

    `phases` are when each phase of the start was over; `ended` is how it ended, as in report.json.
    """

    number: int
    began_at: float = 0.0
    running_at: float = 0.0
    last_at: float = 0.0
    hosts: tuple[str, ...] = ()
    host_of: dict[int, str] = field(default_factory=dict)
    log_folder: str = ""
    phases: dict[str, float] = field(default_factory=dict)
    exits: list[Row] = field(default_factory=list)
    ended: Row | None = None
    ended_at: float = 0.0


@dataclass(slots=True)
class Totals:
    """What one rank, or the ranks of one host, told in sum and last."""

    seconds: dict[str, float] = field(default_factory=dict)
    steps: float = 0.0
    memory: dict[str, float] = field(default_factory=dict)
    peak: float = 0.0


@dataclass(slots=True)
class HostFacts:
    """What a host told last, and the means and the greatest of what changes."""

    last: dict[str, float] = field(default_factory=dict)
    sums: dict[str, float] = field(default_factory=dict)
    most: dict[str, float] = field(default_factory=dict)
    num: int = 0
    num_gpus: int = 0


@dataclass(slots=True, kw_only=True)
class Run:
    """All of a page. `curves` are over seconds since the start, `by_step` over steps."""

    label: str
    job: Row = field(default_factory=dict)
    state: str = ""  # what the registry has of it, if it was asked
    attempts: dict[int, Attempt] = field(default_factory=dict)
    report: Row | None = None
    configs: dict[int, Any] = field(default_factory=dict)
    notes: list[Row] = field(default_factory=list)
    num_notes_left_out: int = 0
    stacks: list[Row] = field(default_factory=list)
    hangs: list[Row] = field(default_factory=list)
    stragglers: list[dict[str, Any]] = field(default_factory=list)  # `over_at`: when it was well again
    num_stragglers_left_out: int = 0
    states: list[tuple[float, float, str]] = field(default_factory=list)  # begin, end, what
    end: Row | None = None
    num_lost: int = 0
    began_at: float = 0.0
    last_at: float = 0.0
    curves: dict[str, Curve] = field(default_factory=dict)
    by_step: dict[str, Curve] = field(default_factory=dict)
    hosts_curves: dict[str, Curve] = field(default_factory=dict)
    shares: Shares = field(default_factory=Shares)
    totals: dict[str, Totals] = field(default_factory=dict)
    hosts: dict[str, HostFacts] = field(default_factory=dict)
    step: float = math.nan
    total_steps: float = math.nan  # as the program says
    last_loss: float | None = None
    stepped: float = 0.0  # steps between the first time that one was told and the last, and how long that was
    stepped_s: float = 0.0
    num_lines: int = 0
    problems: list[str] = field(default_factory=list)  # what is missing, in sentences
    sources: list[str] = field(default_factory=list)

    @property
    def last_attempt(self) -> Attempt | None:
        return self.attempts[max(self.attempts)] if self.attempts else None

    @property
    def exit_code(self) -> int | None:
        """None while it is not known."""
        for found in (self.end, self.report, self.last_attempt.ended if self.last_attempt else None):
            code = None if found is None else found.get("exit_code")
            if isinstance(code, int):
                return code
        return None

    @property
    def duration_s(self) -> float:
        """From its first word to its last."""
        told = number(self.end.get("duration_s")) if self.end is not None else None
        return told if told is not None and math.isfinite(told) else max(0.0, self.last_at - self.began_at)

    @property
    def num_ranks(self) -> int:
        last = self.last_attempt
        return len(last.host_of) if last else 0

    @property
    def has_metrics(self) -> bool:
        """Whether ranks told numbers, and not only lines of output."""
        return any(name != "lines" for name in self.curves)


class _Counted(NamedTuple):
    """A counter of one rank when a rate was last made of it."""

    key: str
    at: float
    value: float
    step: float


class Numbers:
    """Puts the numbers of one event after the other into a run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._before: dict[str, tuple[float, float]] = {}  # of counters: when, and what
        self._counted: dict[str, _Counted] = {}
        self._loss_of = ""  # the rank whose loss is the last one
        self._custom: set[str] = set()
        self._doing: dict[str, int] = {}  # by rank that does not train: which of the run's states that is

    def begin_attempt(self) -> None:
        """Counters may go back, and no rank does anything yet."""
        self._before.clear()
        self._counted.clear()
        self._doing.clear()

    def add(self, at: float, attempt: int, event: Row) -> None:
        """An event `metrics`; `at` in seconds since the start of the run."""
        ranks = {key: row for key, row in _rows(event.get("ranks")).items() if _is_rank(key)}
        num_ranks = self._ranks_by_host(attempt)
        spreads: dict[str, list[Spread]] = {}
        seconds: dict[str, float] = {}
        for key, row in ranks.items():
            weight = num_ranks.get(key.removesuffix(FOLDED), 1.0) if key.endswith(FOLDED) else 1.0
            for name, value in row.items():
                one = _spread(key, value, weight)
                if one is not None:
                    spreads.setdefault(str(name), []).append(one)
            loss = _spread(key, row.get("loss"), 1.0)
            if loss is not None and (key == "0" or self._loss_of in ("", key)):
                self._run.last_loss, self._loss_of = loss.mean, key  # as the console's last line says it
            self._add_state(at, key, row.get("state"))
            self._add_totals(key, row, weight, seconds)
        if seconds.get("steps", 0.0) > 0:
            self._run.shares.add(at, attempt, seconds)
            self._add_step_time(at, attempt, spreads)
        step = self._add_counters(at, attempt, spreads)
        self._add_curves(at, attempt, spreads, step)
        self._add_lines(at, attempt, mapping(event.get("lines")))
        for host, row in _rows(event.get("hosts")).items():
            self._add_host(host, row)
        self._add_host_curves(at, attempt, _rows(event.get("hosts")))

    def _add_state(self, at: float, key: str, told: object) -> None:
        """A rank that saves tells so when it begins, and next when it has saved: a state lasts until then."""
        states, before = self._run.states, self._doing.pop(key, None)
        if before is not None:
            begin, _, name = states[before]
            states[before] = begin, at, name
        if not isinstance(told, str) or len(self._doing) >= MAX_RANKS:
            return
        state = told[:40]
        others = self._doing.values() if before is None else (before, *self._doing.values())
        place = next((one for one in others if states[one][2] == state), None)
        if place is None and len(states) < MAX_STATES:
            place = len(states)
            states.append((at, at, state))
        if place is not None:
            self._doing[key] = place

    def _ranks_by_host(self, attempt: int) -> dict[str, float]:
        found: dict[str, float] = {}
        known = self._run.attempts.get(attempt)
        for host in known.host_of.values() if known else ():
            found[host] = found.get(host, 0.0) + 1
        return found

    def _add_totals(self, key: str, row: Row, weight: float, seconds: dict[str, float]) -> None:
        known = self._run.totals
        if key not in known and len(known) >= MAX_RANKS:
            return
        totals = known.setdefault(key, Totals())
        steps = _mean(row.get("steps"))
        totals.steps += steps
        seconds["steps"] = seconds.get("steps", 0.0) + steps * weight
        told_s = 0.0
        for name in (*PHASES, "step_s"):
            value = _mean(row.get(name))
            if name != "step_s":
                told_s += value
                seconds[name] = seconds.get(name, 0.0) + value * weight
            totals.seconds[name] = totals.seconds.get(name, 0.0) + value
        rest = max(0.0, _mean(row.get("step_s")) - told_s)
        totals.seconds["rest"] = totals.seconds.get("rest", 0.0) + rest
        seconds["rest"] = seconds.get("rest", 0.0) + rest * weight
        for name in (*MEMORY_KINDS, "mem_used", "mem_total"):
            if name in row:
                totals.memory[name] = _mean(row[name])
        totals.peak = max(totals.peak, _high(row.get("mem_peak")), _high(row.get("mem_used")))

    def _add_step_time(self, at: float, attempt: int, spreads: Mapping[str, list[Spread]]) -> None:
        """Seconds of a step, and of that what is a rank's own: without its waits for others."""
        steps = {one.key: one.mean for one in spreads.get("steps", ())}
        waits = {one.key: one for one in spreads.get("comm_s", ())}
        known = {one.key: one for one in spreads.get("own_s", ())}
        pauses = {one.key: one.mean for one in spreads.get("paused_s", ())}
        step_s, own = [], []
        for one in spreads.get("step_s", ()):
            count = steps.get(one.key, 0.0)
            if count <= 0:
                continue
            step_s.append(_scaled(one, 1 / count))
            wait = waits.get(one.key)
            if one.key in known:
                own.append(_scaled(known[one.key], 1 / count))
            elif wait is not None:
                rest_s = one.mean - pauses.get(one.key, 0.0)
                low, mean, high = rest_s - wait.high, rest_s - wait.mean, rest_s - wait.low
                least = Spread(one.key, low, mean, high, wait.high_key, wait.low_key, one.weight)
                own.append(_scaled(least, 1 / count))
        self._curve("step_s").add(at, attempt, step_s)
        self._curve("own_s").add(at, attempt, own)

    def _add_counters(self, at: float, attempt: int, spreads: Mapping[str, list[Spread]]) -> float:
        """Rates of what counts up; returns the step."""
        self._add_rates(at, attempt, spreads)
        total = [one.high for one in spreads.get("total_steps", ()) if math.isfinite(one.high)]
        if total:
            self._run.total_steps = max(total)
        told = [one.high for one in spreads.get("step", ()) if math.isfinite(one.high)]
        if not told:
            return math.nan
        now, before = max(told), self._before.get("step")
        self._run.step, self._before["step"] = now, (at, now)
        if before is not None and at > before[0] and now >= before[1]:
            self._run.stepped += now - before[1]
            self._run.stepped_s += at - before[0]
        return now

    def _add_rates(self, at: float, attempt: int, spreads: Mapping[str, list[Spread]]) -> None:
        """Steps, samples and tokens per second, each of one rank's own numbers: ranks tell at other moments,
        and a step may be longer than the time between two.
        """
        seconds = {one.key: one.mean for one in spreads.get("step_s", ()) if one.mean > 0}
        timed = [(one, seconds[one.key]) for one in spreads.get("steps", ()) if one.key in seconds]
        timed_s = sum(passed_s for _, passed_s in timed)
        steps_per_s = sum(one.mean for one, _ in timed) / timed_s if timed else 0.0
        if steps_per_s > 0:
            self._add_rate("rate", at, attempt, steps_per_s, timed_s)
        steps = {one.key: one.high for one in spreads.get("step", ())}
        for name, rate in RATES.items():
            for one in spreads.get(name, ()):
                step = steps.get(one.key, 0.0)
                counted = self._counted.setdefault(name, _Counted(one.key, at, one.high, step))
                if one.key != counted.key and at - counted.at < LOST_S:
                    continue
                passed_s, more, more_steps = at - counted.at, one.high - counted.value, step - counted.step
                if one.key != counted.key or more < 0:
                    self._counted[name] = _Counted(one.key, at, one.high, step)
                elif steps_per_s > 0 and more_steps > 0:
                    self._counted[name] = _Counted(one.key, at, one.high, step)
                    if name != "step":
                        self._add_rate(rate, at, attempt, more / more_steps * steps_per_s, passed_s)
                elif steps_per_s > 0 or more <= 0 or passed_s <= 0:
                    continue
                elif passed_s >= RATE_S or more_steps >= RATE_STEPS:
                    self._counted[name] = _Counted(one.key, at, one.high, step)
                    self._add_rate(rate, at, attempt, more / passed_s, passed_s)

    def _add_rate(self, name: str, at: float, attempt: int, value: float, passed_s: float) -> None:
        if math.isfinite(value):
            self._curve(name).add(at, attempt, [Spread("", value, value, value, "", "", passed_s)])

    def _add_curves(self, at: float, attempt: int, spreads: Mapping[str, list[Spread]], step: float) -> None:
        for name, told in spreads.items():
            if name in _NO_CURVES or name.endswith("_s"):
                continue
            if name not in KNOWN:
                if name not in self._custom and len(self._custom) >= MAX_CUSTOM:
                    continue
                self._custom.add(name)
            self._curve(name).add(at, attempt, told)
            if math.isfinite(step) and not name.startswith("mem_"):
                self._run.by_step.setdefault(name, Curve(width=1.0)).add(step, 0, told)

    def _add_lines(self, at: float, attempt: int, lines: Row) -> None:
        told = sum(value for value in map(number, lines.values()) if value and math.isfinite(value))
        self._run.num_lines += int(told) if math.isfinite(told) else 0
        before = self._before.get("lines")
        self._before["lines"] = at, 0.0
        if before is not None and at > before[0]:
            passed_s = at - before[0]
            rate = told / passed_s
            self._curve("lines").add(at, attempt, [Spread("", rate, rate, rate, "", "", passed_s)])

    def _add_host(self, host: str, row: Row) -> None:
        known = self._run.hosts
        if host not in known and len(known) >= MAX_HOSTS:
            return
        facts = known.setdefault(host, HostFacts())
        facts.num += 1
        told = {name: value for name, value in _host_numbers(row).items() if math.isfinite(value)}
        facts.num_gpus = max(facts.num_gpus, int(told.get("gpus", 0)))
        for name, value in told.items():
            facts.last[name] = value
            facts.sums[name] = facts.sums.get(name, 0.0) + value
            facts.most[name] = max(facts.most.get(name, value), value)

    def _add_host_curves(self, at: float, attempt: int, rows: Mapping[str, Row]) -> None:
        told: dict[str, list[Spread]] = {}
        for host, row in rows.items():
            for name, value in _host_numbers(row).items():
                if name in HOST_CURVES or name in GPU_CURVES:
                    told.setdefault(name, []).append(single(host, value))
        for name, spreads in told.items():
            self._run.hosts_curves.setdefault(name, Curve()).add(at, attempt, spreads)

    def _curve(self, name: str) -> Curve:
        return self._run.curves.setdefault(name, Curve())


def _host_numbers(row: Row) -> dict[str, float]:
    """What a host told, its GPUs put together."""
    found = {str(name): told for name, value in row.items() if (told := number(value)) is not None}
    gpus = row.get("gpus")
    gpus = [one for one in gpus if isinstance(one, dict)] if isinstance(gpus, list) else []
    if gpus:
        found["gpus"] = float(len(gpus))
    for name, key in GPU_CURVES.items():
        values = [value for one in gpus if (value := number(one.get(key))) is not None]
        if values:
            found[name] = {"gpu_power": sum(values), "gpu_temp": max(values), "gpu_mem": max(values)}.get(
                name, sum(values) / len(values)
            )
    totals = [value for one in gpus if (value := number(one.get("mem_total"))) is not None]
    errors = [value for one in gpus if (value := number(one.get("ecc"))) is not None]
    return {
        **found,
        **({"gpu_mem_total": max(totals)} if totals else {}),
        **({"gpu_errors": sum(errors)} if errors else {}),
    }


def _spread(key: str, value: object, weight: float) -> Spread | None:
    if isinstance(value, list):
        told = [number(one) for one in value]
        if len(told) != 5 or any(one is None for one in told):
            return None
        low, mean, high, low_rank, high_rank = (one if one is not None else math.nan for one in told)
        ranks = [str(int(one)) if math.isfinite(one) else "" for one in (low_rank, high_rank)]
        return Spread(key, low, mean, high, ranks[0], ranks[1], weight)
    found = number(value)
    return None if found is None else single(key, found)


def _scaled(one: Spread, factor: float) -> Spread:
    return one._replace(low=one.low * factor, mean=one.mean * factor, high=one.high * factor)


def _mean(value: object) -> float:
    found = number(value[1] if isinstance(value, list) and len(value) == 5 else value)
    return found if found is not None and math.isfinite(found) else 0.0


def _high(value: object) -> float:
    found = number(value[2] if isinstance(value, list) and len(value) == 5 else value)
    return found if found is not None and math.isfinite(found) else 0.0


def _is_rank(key: str) -> bool:
    return key.endswith(FOLDED) or (key.isascii() and key.isdigit())


def _rows(value: object) -> dict[str, Row]:
    return {key: row for key, row in mapping(value).items() if isinstance(row, dict)}
