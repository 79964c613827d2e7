"""What comes out: results as JSON and as a table, and a log."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .line import is_right
from .plan import Step

SHOWN = 4  # last lines of a step that fails
NOT_ENDED = "not ended"


class Report:
    """The results as JSON and as a table, and a log of all steps: each file is there whole, as it was or as
    it is.
    """

    def __init__(self, out: Path, *, name: str) -> None:
        self._out, self._name = out, name
        self._table, self._json, self._log = (
            out / f"results-{name}.md",
            out / f"results-{name}.json",
            out / f"log-{name}.txt",
        )
        self._log.unlink(missing_ok=True)
        self._is_on_disk = True
        self.results: list[dict[str, Any]] = []

    def add(self, step: Step) -> dict[str, Any]:
        """Return the result of a step that begins."""
        what = {"part": step.part, "step": step.name, "asks": step.asks}
        self.results.append({**what, "ok": False, "status": NOT_ENDED, "s": 0.0, "lines": []})
        return self.results[-1]

    def log_of(self, step: Step) -> Path:
        """Where it writes while it runs."""
        path = self._out / f"{step.part}-{re.sub('[^a-z0-9_]+', '-', step.name.lower())}.log"
        path.unlink(missing_ok=True)
        return path

    def keep_log(self, step: Step, log: Path, result: dict[str, Any]) -> None:
        """Put the log of a step that has ended to the others."""
        text = log.read_text(errors="replace")
        result["last"] = text.splitlines()[-SHOWN:]
        with self._going_on(), self._log.open("a") as whole:
            whole.write(f"==== {step.part}: {step.name}: {result['status']}\n{text}\n")
        log.unlink()

    def write(self) -> None:
        """Write what is known."""
        with self._going_on():
            _put(self._json, json.dumps({"results": self.results}, indent=1))
            _put(self._table, self.table())

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        """Around what writes to the folder: a full disk is told once, and the steps go on."""
        try:
            yield
        except OSError as error:
            if self._is_on_disk:
                print(f"{self._out}: {error.strerror}: what follows is here alone, not there", flush=True)
            self._is_on_disk = False

    def table(self) -> str:
        """Return what is known as a table."""
        rows = ["| part | step | asks | result | s |", "|---|---|---|---|---|"]
        for result in self.results:
            what = " | ".join(result[key] for key in ("part", "step", "asks"))
            rows.append(f"| {what} | {outcome(result)} | {result['s']} |")
        rows += ["", "| what | figures |", "|---|---|"]
        for line in (line for result in self.results for line in lines_of(result)):
            figures = ", ".join(
                f"{key} {value}" for key, value in line.items() if key not in ("name", "lines")
            )
            cell = " ".join(figures.split()).replace("|", r"\|")
            rows.append(f"| {line['name']} | {cell} |")
        return "\n".join(rows) + "\n"


def lines_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what a step told; of one that failed without a word in them, the last that it printed."""
    lines = [line for line in result["lines"] if "name" in line]
    if result.get("last") and not result["ok"] and all(map(is_right, lines)):
        lines.append({"name": result["step"], "failed": result["last"][-1]})
    return lines


def outcome(result: dict[str, Any]) -> str:
    """How a step ended, in words."""
    if "left_out" in result:
        return f"left out: {result['left_out']}"
    if result["ok"] or result["status"] == NOT_ENDED:
        return "ok" if result["ok"] else NOT_ENDED
    return f"FAILED ({result['status']})"


def _put(path: Path, text: str) -> None:
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    new.replace(path)
