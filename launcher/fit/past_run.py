"""A run that was, beside the plan of its job: what each part of a step took, and the factors that follow.

A run tells less than a plan has: what it waits for others is one number, and so is its optimizer step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from ...shared.table import table
from ..errors import LaunchError
from ..run_state.run_state import RunState
from ..run_state.step_times import StepTimes
from ..wording import count
from .step_time import (
    BUBBLE,
    COMMUNICATION,
    COMPUTE,
    OFFLOAD,
    OPTIMIZER,
    TimeRange,
    shown_range,
    shown_seconds,
    whole_step,
)
from .verdict import gib

# What a run tells, and the parts of a plan that are in it.
WAITING, UPDATE = "communication and bubble", "optimizer, copies and disk"
KINDS = {COMPUTE: (COMPUTE,), WAITING: (COMMUNICATION, BUBBLE), UPDATE: (OPTIMIZER, OFFLOAD)}
_SMALL = 0.05  # share of a step below which a part says nothing of its factor
_FEW_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ToldRun:
    """The last steps of a run, in the mean of its ranks."""

    job: str
    day: str
    num_ranks: int
    num_steps: int
    seconds: Mapping[str, float]  # by KINDS
    rest_s: float  # data, and what no part names
    step_s: float  # without saving, loading and evaluating
    peak_bytes: int  # the fullest rank's; 0: not told


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareRun:
    """Times that a run took, beside those predicted by speeds alone: kept with the speeds of its cluster."""

    job: str
    day: str
    predicted: Mapping[str, float]  # seconds, by KINDS
    measured: Mapping[str, float]


def told_run(state: RunState, *, job: str) -> ToldRun:
    """Return what the events of a run tell of its last steps.

    Errors: LaunchError if they tell of no steps
    """
    settled = [one.recent.settled() for one in state.sources]
    mean = StepTimes.mean([times for _, times in settled if times is not None])
    steps = max((number for number, _ in settled), default=0.0)
    if mean is None or not mean.has_phases or steps < _FEW_STEPS:
        raise LaunchError(
            f"--from_run={job}: its events tell of {count(int(steps), 'step')} of an engine, and it takes "
            f"{_FEW_STEPS}; run it longer, with dslaunch"
        )
    paused_s = mean.seconds("paused")
    seconds = {
        COMPUTE: mean.seconds("forward") + mean.seconds("backward"),
        WAITING: mean.seconds("comm"),
        UPDATE: mean.seconds("optimizer"),
    }
    step_s = max(0.0, mean.step_s - paused_s)
    return ToldRun(
        job=job,
        day=datetime.fromtimestamp(state.began_at, tz=timezone.utc).date().isoformat(),
        num_ranks=0 if state.attempt is None else state.attempt.num_ranks,
        num_steps=int(steps),
        seconds=seconds,
        rest_s=max(0.0, step_s - sum(seconds.values())),
        step_s=step_s,
        peak_bytes=int(max((one.value("mem_peak") or 0.0 for one in state.sources), default=0.0)),
    )


def by_kind(parts: Mapping[str, TimeRange]) -> dict[str, TimeRange]:
    """Return the parts of a step as a run tells them."""
    return {kind: whole_step({name: parts[name] for name in names}) for kind, names in KINDS.items()}


def compare(run: ToldRun, parts: Mapping[str, TimeRange]) -> CompareRun:
    """Return the run beside parts that were predicted by measured speeds, without factors of other runs."""
    predicted = {kind: time.high for kind, time in by_kind(parts).items()}
    return CompareRun(job=run.job, day=run.day, predicted=predicted, measured=run.seconds)


def factors_of(runs: Sequence[CompareRun]) -> dict[str, float]:
    """Return by part of a step what all these runs together took of what was predicted.

    A part that is small in what was predicted says nothing, and has no factor.
    """
    whole_s = sum(sum(one.predicted.values()) for one in runs)
    found = {}
    for kind, names in KINDS.items():
        predicted_s = sum(one.predicted[kind] for one in runs)
        if predicted_s > _SMALL * whole_s:
            factor = sum(one.measured[kind] for one in runs) / predicted_s
            found.update(dict.fromkeys(names, factor))
    return found


def lines_beside(
    run: ToldRun,
    parts: Mapping[str, TimeRange] | None,
    *,
    peak_bytes: int,
    columns: int | None = None,
) -> list[str]:
    """Return the table of the run beside its plan. `parts` None: no speeds are known; `peak_bytes`: what was
    planned for a rank.
    """
    planned = {} if parts is None else by_kind(parts)
    rows = [
        [kind, *_beside(planned.get(kind), run.seconds[kind])]
        for kind in KINDS
        if run.seconds[kind] or kind in planned
    ]
    rows.append(["data, and what no part names", "-", shown_seconds(run.rest_s), ""])
    rows.append(["a step", *_beside(whole_step(planned) if planned else None, run.step_s)])
    if run.peak_bytes:
        share = f"{run.peak_bytes / peak_bytes:.2f}" if peak_bytes else ""
        rows.append(["memory of a rank at its peak", gib(peak_bytes), gib(run.peak_bytes), share])
    who = f"{run.job}, the last {count(run.num_steps, 'step')} of {count(run.num_ranks, 'rank')} on {run.day}"
    head = ["", "planned", "measured", "measured / planned"]
    return [
        "",
        f"Beside the run {who}:",
        *(f"  {line}" for line in table(rows, head=head, numbers=(1, 2, 3), columns=columns)),
    ]


def _beside(planned: TimeRange | None, measured_s: float) -> list[str]:
    if planned is None or not planned.high:
        return ["-", shown_seconds(measured_s), ""]
    share = f"{measured_s / planned.high:.2f}" if planned.is_number else ""
    return [shown_range(planned), shown_seconds(measured_s), share]


def as_data_beside(run: ToldRun, parts: Mapping[str, TimeRange] | None, *, peak_bytes: int) -> dict[str, Any]:
    """Return the same for JSON."""
    planned = {} if parts is None else by_kind(parts)
    return {
        "job": run.job,
        "day": run.day,
        "ranks": run.num_ranks,
        "steps": run.num_steps,
        "measured_seconds": {**run.seconds, "rest": run.rest_s, "step": run.step_s},
        "planned_seconds": {kind: {"low": one.low, "high": one.high} for kind, one in planned.items()},
        "measured_peak_bytes": run.peak_bytes or None,
        "planned_peak_bytes": peak_bytes,
    }


def run_as_data(run: CompareRun) -> dict[str, Any]:
    """Return it as the file of the speeds has it."""
    return {
        "job": run.job,
        "day": run.day,
        "predicted": dict(run.predicted),
        "measured": dict(run.measured),
    }


def run_of(given: Mapping[str, Any]) -> CompareRun:
    """Read it. Errors: KeyError, TypeError, ValueError for another form"""
    predicted, measured = (
        {kind: float(given[name][kind]) for kind in KINDS} for name in ("predicted", "measured")
    )
    return CompareRun(job=str(given["job"]), day=str(given["day"]), predicted=predicted, measured=measured)
