"""What is left to say of a job at its end: how far it came, how fast, where it ran, how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..node.metrics import FOLDED
from .telemetry import METRICS

_OF_STREAM = ("at", "event")  # keys of an event that are not the verdict's


class Summary:
    """A sink that keeps what the last attempt told."""

    def __init__(self) -> None:
        self.name = ""
        self.command: list[str] = []
        self.hosts: tuple[str, ...] = ()  # in the order of their ranks
        self.num_ranks = 0
        self.num_attempts = 0
        self.log_folder = ""
        self.verdict: dict[str, Any] | None = None
        self.step: int | float | None = None
        self.loss: float | str | None = None
        self._loss_of = ""
        self._steps_of = ""  # of one rank, or of the ranks of one host: all do the same
        self._steps = self._steps_s = 0.0

    @property
    def steps_per_s(self) -> float | None:
        return self._steps / self._steps_s if self._steps and self._steps_s > 0 else None

    def take(self, event: Mapping[str, Any]) -> None:
        kind = event["event"]
        if kind == METRICS:
            for key, row in event["ranks"].items():
                self._take_row(key, row)
        elif kind == "job":
            self.name, self.command = event.get("name", ""), event.get("command", [])
        elif kind == "attempt":
            self.hosts = tuple(dict.fromkeys(str(one[0]) for one in event["workers"]))
            self.num_ranks = len(event["workers"])
            self.num_attempts += 1
            self.log_folder = event["log_folder"]
            self._steps_of, self._steps, self._steps_s = "", 0.0, 0.0
        elif kind == "verdict":
            self.verdict = {name: value for name, value in event.items() if name not in _OF_STREAM}
            self.hosts = self.hosts or tuple(event.get("hosts", ()))  # where nothing is known of workers
            self.num_attempts = max(self.num_attempts, 1)

    def close(self) -> None:
        """It has nothing to write."""

    def _take_row(self, key: str, row: Mapping[str, Any]) -> None:
        step, loss = _mean(row.get("step"), key), _mean(row.get("loss"), key)
        if isinstance(step, int | float):
            self.step = int(step) if step == step and abs(step) < 1e15 else step
        if loss is not None and (key == "0" or self._loss_of in ("", key)):
            self.loss, self._loss_of = loss, key
        steps, seconds = _mean(row.get("steps"), key), _mean(row.get("step_s"), key)
        if (
            self._steps_of in ("", key)
            and isinstance(steps, int | float)
            and isinstance(seconds, int | float)
        ):
            self._steps_of = key
            self._steps += steps
            self._steps_s += seconds

    def progress(self) -> str:
        """How far it came, in words; empty if no rank told of it: `step 500, 13.2 steps/s, loss 2.31`."""
        words = []
        if self.step is not None:
            words.append(f"step {self.step}")
            if self.steps_per_s is not None:
                words.append(f"{self.steps_per_s:.3g} steps/s")
            if self.loss is not None:
                words.append(f"loss {self.loss if isinstance(self.loss, str) else format(self.loss, '.4g')}")
        return ", ".join(words)

    def end(self, *, exit_code: int, duration_s: float, at: float, error: str) -> dict[str, Any]:
        """The event `end` with all of this: what --on_end and --webhook give.

        `error`: why there is no verdict, or why it did not come to another attempt; else empty.
        """
        return {
            "at": at,
            "event": "end",
            "exit_code": exit_code,
            "duration_s": duration_s,
            "name": self.name,
            "command": self.command,
            "hosts": list(self.hosts),
            "ranks": self.num_ranks,
            "attempts": self.num_attempts,
            "step": self.step,
            "loss": self.loss,
            "steps_per_s": self.steps_per_s,
            "verdict": self.verdict,
            "error": error or None,
            "log_folder": self.log_folder or None,
        }


def _mean(value: Any, key: str) -> Any:
    """Of folded ranks the mean."""
    return value[1] if key.endswith(FOLDED) and isinstance(value, list) and len(value) > 1 else value
