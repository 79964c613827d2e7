"""What is known of a job now, as families of numbers with labels: what Prometheus and its like ask for.

Names and units follow Prometheus's rules: base units, `_total` for what only grows. A number of one rank has
the labels `rank` and `host`; of folded ranks `host` and `stat` (min, mean, max).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ..node.metrics import FOLDED
from .telemetry import METRICS

STALE_S = 30.0  # a host that told nothing for so long, and for ten intervals, has left
MAX_LABEL = 200
SUFFIXES = {"counter": "_total", "info": "_info", "gauge": ""}  # of names, by kind
STATS = ("min", "mean", "max")

Labels = dict[str, str]
Sample = tuple[tuple[str, str, str], Labels, float]  # name, kind and meaning of its family


class Family(NamedTuple):
    """`name` is without `_total` or `_info`, which what is shown has by its kind: gauge, counter, info."""

    name: str
    kind: str
    about: str
    samples: list[tuple[Labels, float]]


_OF_JOB = {
    "dslaunch_job": ("info", "What runs, and by whom."),
    "dslaunch_job_start_time_seconds": ("gauge", "When the job began, since the epoch."),
    "dslaunch_attempts": ("counter", "Starts of the job: 1, and one more for each that followed a failure."),
    "dslaunch_failed_attempts": ("counter", "Attempts that ended with another code than 0."),
    "dslaunch_workers": ("gauge", "Workers of the present attempt."),
    "dslaunch_workers_running": ("gauge", "Of these, started and not ended."),
    "dslaunch_notes": ("counter", "Sentences of dslaunch, by level: info, warning, error."),
    "dslaunch_stragglers": ("counter", "How often others were found waiting for this rank."),
    "dslaunch_hangs": ("counter", "Collectives that a watchdog of this rank reported."),
    "dslaunch_samples": ("counter", "Samples trained by the whole job."),
    "dslaunch_tokens": ("counter", "Tokens trained by the whole job."),
}
_OF_RANK = {
    "step": ("dslaunch_step", "gauge", "Optimizer steps done, skipped ones too."),
    "loss": ("dslaunch_loss", "gauge", "Loss of the last step."),
    "lr": ("dslaunch_learning_rate", "gauge", "Learning rate of the last step."),
    "grad_norm": ("dslaunch_gradient_norm", "gauge", "Norm of the gradients of the last step."),
    "loss_scale": ("dslaunch_loss_scale", "gauge", "Factor of the loss."),
}
_SKIPPED = ("dslaunch_skipped_steps", "counter", "Steps skipped because of gradients without a value.")
_STEPS = ("dslaunch_steps", "counter", "Steps that were told since the launcher began.")
_STEP_SECONDS = ("dslaunch_step_seconds", "gauge", "Seconds a step took, by phase, in the last interval.")
_PHASES = {
    "step_s": "whole",
    "forward_s": "forward",
    "backward_s": "backward",
    "optimizer_s": "optimizer",
    "comm_s": "communication",
    "data_s": "data",
}
_MEMORY = ("dslaunch_memory_bytes", "gauge", "Memory of the device that the rank trains on, by kind.")
_MEMORY_KINDS = ("used", "peak", "total", "parameters", "gradients", "optimizer", "activations", "other")
_STATE = ("dslaunch_state", "gauge", "1 for what the rank does instead of training, such as saving.")
_REPORTED = ("dslaunch_reported", "gauge", "What the program tells by dslaunch.report(), by name.")
_LINES = ("dslaunch_output_lines", "counter", "Lines that the workers wrote.")
_OF_HOST = {
    "cpu": ("dslaunch_host_cpu_ratio", "gauge", "Use of the host's processors, 0 to 1.", {}),
    "cores": ("dslaunch_host_cores", "gauge", "Processors of the host.", {}),
    "load1": ("dslaunch_host_load1", "gauge", "Load average of a minute.", {}),
    "mem_used": ("dslaunch_host_memory_bytes", "gauge", "Memory of the host, by kind.", {"kind": "used"}),
    "mem_total": ("dslaunch_host_memory_bytes", "gauge", "", {"kind": "total"}),
    "net_in": (
        "dslaunch_host_network_bytes_per_second",
        "gauge",
        "Bytes a second over the network.",
        {"direction": "in"},
    ),
    "net_out": ("dslaunch_host_network_bytes_per_second", "gauge", "", {"direction": "out"}),
    "disk_read": (
        "dslaunch_host_disk_bytes_per_second",
        "gauge",
        "Bytes a second of the disks.",
        {"direction": "read"},
    ),
    "disk_write": ("dslaunch_host_disk_bytes_per_second", "gauge", "", {"direction": "write"}),
}
_HOST_TIME = (
    "dslaunch_host_last_numbers_timestamp_seconds",
    "gauge",
    "When the host last told numbers, since the epoch.",
)
_OF_GPU = {
    "util": ("dslaunch_gpu_utilization_ratio", "gauge", "Use of the GPU, 0 to 1.", {}),
    "mem_used": ("dslaunch_gpu_memory_bytes", "gauge", "Memory of the GPU, by kind.", {"kind": "used"}),
    "mem_total": ("dslaunch_gpu_memory_bytes", "gauge", "", {"kind": "total"}),
    "power_w": ("dslaunch_gpu_power_watts", "gauge", "What the GPU draws.", {}),
    "temp_c": ("dslaunch_gpu_temperature_celsius", "gauge", "How warm the GPU is.", {}),
    "ecc": ("dslaunch_gpu_uncorrected_ecc_errors", "counter", "Errors of its memory since the boot.", {}),
}
_LEVELS = {20: "info", 30: "warning", 40: "error"}


class _Growth:
    """How far numbers have grown that only grow within an attempt, and may be less at the start of the next
    one, which begins from a checkpoint. Several are those of folded ranks.
    """

    def __init__(self) -> None:
        self.total: list[float] = []
        self._last: list[float] = []

    def take(self, numbers: list[float | None]) -> None:
        """What was told now; numbers that are none, or not finite, change nothing."""
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


class Gauges:
    """A sink that keeps the last numbers. `families()` may be called by any thread."""

    def __init__(self, *, interval_s: float = 1.0) -> None:
        self._stale_s = max(STALE_S, 10 * interval_s)
        self._lock = threading.Lock()
        self._job: Mapping[str, Any] = {}
        self._host_of: dict[str, str] = {}  # by rank
        self._rows: dict[str, dict[str, Any]] = {}  # the last numbers, by rank or "HOST *"
        self._times: dict[str, Mapping[str, Any]] = {}  # the last row that told of steps
        self._steps: dict[str, list[float]] = {}  # in all: of a rank one number, else min, mean, max
        self._lines: dict[str, int] = {}  # in all, by rank
        self._hosts: dict[str, tuple[float, float, Mapping[str, Any]]] = {}  # heard at: monotonic, epoch
        self._running: set[str] = set()
        self._ended: set[str] = set()
        self._counts: dict[tuple[str, tuple[tuple[str, str], ...]], int] = {}
        self._skipped: dict[str, _Growth] = {}  # steps, as `_steps`
        self._trained: dict[str, _Growth] = {}  # samples and tokens
        self._trained_of: dict[str, str] = {}  # who tells of these: the first one in this attempt
        self.version = 0  # grows with each event

    # For the launcher.

    def take(self, event: Mapping[str, Any]) -> None:
        with self._lock:
            self.version += 1
            if event["event"] == METRICS:
                self._take_metrics(event)
            else:
                self._take_other(event)

    def close(self) -> None:
        """It has nothing to write."""

    def _take_other(self, event: Mapping[str, Any]) -> None:
        kind, rank = event["event"], str(event.get("rank", ""))
        if kind == "job":
            self._job = event
        elif kind == "attempt":
            self._begin(event)
        elif kind == "started":
            self._running.add(rank)
        elif kind == "exited":
            self._running.discard(rank)
            self._ended.add(rank)
            self._rows.pop(rank, None)
            self._times.pop(rank, None)
        elif kind == "verdict":
            self._running.clear()
            self._count("dslaunch_failed_attempts", by=int(event.get("exit_code") != 0))
        elif kind == "note" and event.get("level") in _LEVELS:
            self._count("dslaunch_notes", {"level": _LEVELS[event["level"]]})
        elif kind == "straggler":
            labels = {"rank": rank, "host": _text(event.get("host", ""))}
            self._count("dslaunch_stragglers", {**labels, "cause": _text(event.get("cause", ""))})
        elif kind == "hang":
            self._count("dslaunch_hangs", self._labels(rank))

    def _begin(self, event: Mapping[str, Any]) -> None:
        """Of hosts and ranks that the attempt does not have nothing is left."""
        before, self._host_of = self._host_of, {str(one[2]): str(one[0]) for one in event["workers"]}
        hosts = set(self._host_of.values())
        self._rows, self._times, self._running, self._ended = {}, {}, set(), set()
        self._hosts = {name: one for name, one in self._hosts.items() if name in hosts}
        stays = {rank for rank, host in self._host_of.items() if before.get(rank) == host}
        stays |= {f"{host} {FOLDED}" for host in hosts}
        self._steps = {key: one for key, one in self._steps.items() if key in stays}
        self._skipped = {key: one for key, one in self._skipped.items() if key in stays}
        self._lines = {rank: one for rank, one in self._lines.items() if rank in stays}
        self._trained_of = {}
        self._count("dslaunch_attempts")

    def _take_metrics(self, event: Mapping[str, Any]) -> None:
        now = time.monotonic()
        for key, row in event["ranks"].items():
            steps = [_number(one) or 0.0 for one in _values(row.get("steps", 0))]
            if all(map(math.isfinite, steps)):
                known = self._steps.get(key, [0.0] * len(steps))
                self._steps[key] = [a + b for a, b in zip(known, steps, strict=False)]
            self._take_growth(key, row)
            if key in self._ended:  # what it told at its end
                continue
            self._rows[key] = {**self._rows.get(key, {}), "state": "", **row}
            if any(steps):
                self._times[key] = row
        for host, numbers_of_host in event["hosts"].items():
            self._hosts[host] = (now, event["at"], numbers_of_host)
        for rank, number_of_lines in event["lines"].items():
            self._lines[rank] = self._lines.get(rank, 0) + number_of_lines

    def _take_growth(self, key: str, row: Mapping[str, Any]) -> None:
        """What counts up: steps that were skipped, by rank, and what the whole job has trained."""
        if "skipped" in row:
            self._skipped.setdefault(key, _Growth()).take([_number(one) for one in _values(row["skipped"])])
        for name in ("samples", "tokens"):
            numbers = [_number(one) for one in _values(row.get(name))][-1:]
            if numbers and self._trained_of.setdefault(name, key) == key:
                self._trained.setdefault(name, _Growth()).take(numbers)

    def _count(self, name: str, labels: Labels | None = None, *, by: int = 1) -> None:
        key = name, tuple(sorted((labels or {}).items()))
        self._counts[key] = self._counts.get(key, 0) + by

    # For those who ask.

    def families(self) -> list[Family]:
        """All numbers there are, each family once."""
        found: dict[str, Family] = {}
        with self._lock:
            for (name, kind, about), labels, value in self._samples():
                if name not in found:
                    found[name] = Family(name, kind, about, [])
                found[name].samples.append((labels, value))
        return list(found.values())

    def _samples(self) -> Iterator[Sample]:
        yield from self._of_job()
        for key, row in self._rows.items():
            yield from self._of_row(key, row)
        for key, times in self._times.items():
            yield from self._of_times(key, times)
        for key, totals in self._steps.items():
            for labels, value in self._each(key, totals):
                yield _STEPS, labels, value
        for key, growth in self._skipped.items():
            for labels, value in self._each(key, growth.total):
                yield _SKIPPED, labels, value
        yield from self._of_lines()
        now = time.monotonic()
        for host, (heard_at, at, numbers) in self._hosts.items():
            if now - heard_at <= self._stale_s:
                yield _HOST_TIME, {"host": _text(host)}, at
                yield from _of_host(host, numbers)

    def _of_job(self) -> Iterator[Sample]:
        def one(name: str) -> tuple[str, str, str]:
            return (name, *_OF_JOB[name])

        if self._job:
            names = ("name", "user", "host", "version", "launcher")
            labels = {f"launch_{name}" if name == "host" else name: self._job.get(name, "") for name in names}
            yield one("dslaunch_job"), {name: _text(value) for name, value in labels.items()}, 1.0
            yield one("dslaunch_job_start_time_seconds"), {}, float(self._job["at"])
        if self._host_of:
            yield one("dslaunch_workers"), {}, float(len(self._host_of))
            yield one("dslaunch_workers_running"), {}, float(len(self._running))
        for (name, labels_of), number in self._counts.items():
            yield one(name), dict(labels_of), float(number)
        for name, growth in self._trained.items():
            for total in growth.total:
                yield one(f"dslaunch_{name}"), {}, total

    def _of_row(self, key: str, row: Mapping[str, Any]) -> Iterator[Sample]:
        for name, value in row.items():
            if name == "state":
                if value and isinstance(value, str):
                    yield _STATE, {**self._labels(key), "state": _text(value)}, 1.0
                continue
            more: Labels = {}
            if name in _OF_RANK:
                family = _OF_RANK[name]
            elif name.startswith("mem_") and name[4:] in _MEMORY_KINDS:
                family, more = _MEMORY, {"kind": name[4:]}
            elif name in _PHASES or name in ("steps", "samples", "tokens", "skipped"):
                continue
            else:
                family, more = _REPORTED, {"name": _text(name)}
            for labels, number in self._each(key, value):
                yield family, {**labels, **more}, number

    def _of_times(self, key: str, row: Mapping[str, Any]) -> Iterator[Sample]:
        steps = [_number(one) or 0.0 for one in _values(row["steps"])]
        number_of_steps = steps[len(steps) // 2]  # of folded ranks the mean: all do the same steps
        for name, phase in _PHASES.items():
            if name in row and number_of_steps > 0:
                for labels, seconds in self._each(key, row[name]):
                    yield _STEP_SECONDS, {**labels, "phase": phase}, seconds / number_of_steps

    def _of_lines(self) -> Iterator[Sample]:
        """By rank, or by host where numbers come by host."""
        is_folded = any(key.endswith(FOLDED) for key in self._rows)
        by_host: dict[str, int] = {}
        for rank, number in self._lines.items():
            if is_folded:
                host = self._host_of.get(rank, "")
                by_host[host] = by_host.get(host, 0) + number
            else:
                yield _LINES, self._labels(rank), float(number)
        for host, number in by_host.items():
            yield _LINES, {"host": _text(host)}, float(number)

    def _each(self, key: str, value: Any) -> Iterator[tuple[Labels, float]]:
        """Of a rank's number one sample, of folded ranks' three."""
        numbers = [_number(one) for one in _values(value)]
        labels = self._labels(key)
        if not key.endswith(FOLDED):
            numbers = numbers[:1]
        for stat, number in zip(STATS, numbers, strict=False):
            if number is not None:
                yield ({**labels, "stat": stat} if key.endswith(FOLDED) else labels), number

    def _labels(self, key: str) -> Labels:
        if key.endswith(FOLDED):
            return {"host": _text(key.removesuffix(f" {FOLDED}"))}
        return {"rank": key, "host": _text(self._host_of.get(key, ""))}


def _of_host(host: str, numbers: Mapping[str, Any]) -> Iterator[Sample]:
    for name, (family, kind, about, more) in _OF_HOST.items():
        if (number := _number(numbers.get(name))) is not None:
            yield (family, kind, about), {"host": _text(host), **more}, number
    gpus = numbers.get("gpus")
    for place, gpu in enumerate(gpus if isinstance(gpus, list) else ()):
        for name, (family, kind, about, more) in _OF_GPU.items():
            if isinstance(gpu, dict) and (number := _number(gpu.get(name))) is not None:
                yield (family, kind, about), {"host": _text(host), "gpu": str(place), **more}, number


def all_names() -> set[str]:
    """Every name that a series may have, as it is shown."""
    families = [(name, kind) for name, (kind, _) in _OF_JOB.items()]
    families += [one[:2] for one in _OF_RANK.values()]
    families += [(name, kind) for name, kind, _, _ in (*_OF_HOST.values(), *_OF_GPU.values())]
    families += [
        one[:2] for one in (_STEPS, _SKIPPED, _STEP_SECONDS, _MEMORY, _STATE, _REPORTED, _LINES, _HOST_TIME)
    ]
    return {name + SUFFIXES[kind] for name, kind in families}


def _values(value: Any) -> list[Any]:
    """Of folded ranks the least, the mean and the greatest."""
    return value[:3] if isinstance(value, list) else [] if value is None else [value]


def _number(value: Any) -> float | None:
    """A number as events have it: infinity and NaN are words. None for what is none."""
    if isinstance(value, str):
        return float(value) if value in ("nan", "inf", "-inf") else None
    if type(value) not in (int, float):
        return None
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def _text(value: Any) -> str:
    """A label: a short text that can be written as UTF-8."""
    return str(value)[:MAX_LABEL].encode("utf-8", "replace").decode()
