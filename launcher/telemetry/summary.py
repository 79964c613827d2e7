"""The summary of a job at its end: its progress, speed, hosts and result."""

from __future__ import annotations

import math
from typing import Any

from ..run_state.goodput import share_of
from ..run_state.run_state import RunState

_OF_STREAM = ("at", "event")  # keys of an event that are not the verdict's


def steps_per_s(state: RunState) -> float | None:
    """Return the rate of the whole last attempt, of one rank, or of the ranks of one host: all do the same
    steps.
    """
    recent = next((one.recent for one in state.sources if one.recent.num_steps > 0), None)
    return None if recent is None else recent.num_steps / recent.seconds


def progress(state: RunState) -> str:
    """Describe its progress; empty if no rank reported it: `step 500, 13.2 steps/s, loss 2.31`."""
    if state.last_step is None:
        return ""
    rate, words = steps_per_s(state), [f"step {_whole(state.last_step)}"]
    if rate is not None:
        words.append(f"{rate:.3g} steps/s")
    if state.last_loss is not None:
        words.append(f"loss {state.last_loss:.4g}")
    return ", ".join(words)


def course_of(state: RunState) -> dict[str, Any]:
    """Return the keys of the report on the whole job: its time by use, and its recoveries."""
    spent = state.spent_s
    share = share_of(spent)
    return {
        "goodput": None if share is None else round(share, 4),
        "spent_s": {name: round(seconds, 3) for name, seconds in spent.items()},
        "recoveries": [one.as_data() for one in state.recoveries],
    }


def end_event(state: RunState, *, exit_code: int, duration_s: float, at: float, error: str) -> dict[str, Any]:
    """Return the event `end` with all of this, for --on_end and --webhook.

    `error`: why there is no verdict, or why it did not come to another attempt; else empty.
    """
    attempt, loss = state.attempt, state.last_loss
    verdict = None if attempt is None or attempt.verdict is None else attempt.verdict.keys
    return {
        "at": at,
        "event": "end",
        "exit_code": exit_code,
        "duration_s": duration_s,
        "name": state.job.name,
        "command": list(state.job.command),
        "hosts": [] if attempt is None else list(attempt.hosts),
        "ranks": 0 if attempt is None else attempt.num_ranks,
        "attempts": state.num_attempts,
        "step": None if state.last_step is None else _whole(state.last_step),
        "loss": loss if loss is None or math.isfinite(loss) else str(loss),
        "steps_per_s": steps_per_s(state),
        "goodput": share_of(state.spent_s),
        "verdict": verdict and {name: one for name, one in verdict.items() if name not in _OF_STREAM},
        "error": error or None,
        "log_folder": (None if attempt is None else attempt.log_folder) or None,
    }


def _whole(step: float) -> float:
    return int(step) if abs(step) < 1e15 else step
