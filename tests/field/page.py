"""Write docs/reference/faults-of-the-field.md of the table of reports and the results of the last runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.field.reports import CLUSTERS, LIMIT_S, REPORTS, RIGHT, SAID, WRONG, Report

RESULTS = Path(__file__).with_name("results.json")
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "faults-of-the-field.md"

INTRODUCTION = """\
# Faults of the field

{count} public reports of training with ZeRO, each as a small program that runs on CPUs.
A program imports `deepspeed`, trains, saves or generates with a tiny model, and prints what came out; the same file runs with dslaunch and with DeepSpeed {version}.
What is right is computed by plain torch in the same program, where it is a number.

    make field                                # all of them, with both, and this page
    python -m tests.field DeepSpeed#8262      # one of them; what it gives is printed

The programs are in `tests/field/programs`, and `tests/field/reports.py` says of each how it is judged.
`pytest -m "" tests/field` holds dslaunch to its column, and `make test` to three rows of it.

- **right** is what the column before says.
- **says so**: the job ends by itself, with an error that names the cause.
- **wrong** is everything else: other numbers, no end, or an error from which the cause cannot be seen.

{counts}

Run on {dates}, on CPUs over gloo, with two ranks where nothing else is said.
`dslaunch` starts its ranks; those of DeepSpeed are forked from a process that has imported it, and start with its own launcher where the launcher is what a report is about.
A job that has not ended by itself within {limit_s:g} seconds is ended.
Over gloo, ranks that come to different collectives end with an error of gloo's about the sizes; over NCCL they wait for each other.
Many reports come from older versions of DeepSpeed, and from GPUs: a fault that DeepSpeed {version} does not have here is mended, or needs what a CPU does not show.
"""  # noqa: E501


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One report with one tool: `status` is right, says so or wrong; `given` says what is not right."""

    status: str
    given: str
    version: str
    date: str


Results = dict[str, dict[str, Result]]
"""Report's id -> tool -> result."""


def load() -> Results:
    stored = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return {id: {tool: Result(**one) for tool, one in tools.items()} for id, tools in stored.items()}


def store(results: Mapping[str, Mapping[str, Result]]) -> None:
    """Write the results of the reports that the table has, in its order."""
    kept = {
        report.id: {tool: asdict(one) for tool, one in results[report.id].items()}
        for report in REPORTS
        if report.id in results
    }
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n")


def text(results: Mapping[str, Mapping[str, Result]]) -> str:
    """Return the page."""
    all_of = [one for tools in results.values() for one in tools.values()]
    dates = sorted({one.date for one in all_of})
    version = next((tools["DeepSpeed"].version for tools in results.values() if "DeepSpeed" in tools), "")
    parts = [
        INTRODUCTION.format(
            count=len(REPORTS),
            version=version,
            limit_s=LIMIT_S,
            counts=_counts(results, version),
            dates=" and ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else "",
        )
    ]
    for letter, name in CLUSTERS.items():
        reports = [one for one in REPORTS if one.cluster == letter]
        if reports:
            parts += [f"## {name}\n", _table(reports, results, version)]
    return "\n".join(parts)


def _counts(results: Mapping[str, Mapping[str, Result]], version: str) -> str:
    lines = [f"| | {RIGHT} | {SAID} | {WRONG} |", "|---|---|---|---|"]
    for tool, name in (("dslaunch", "dslaunch"), ("DeepSpeed", f"DeepSpeed {version}")):
        given = [tools[tool].status for tools in results.values() if tool in tools]
        lines.append(f"| {name} | {given.count(RIGHT)} | {given.count(SAID)} | {given.count(WRONG)} |")
    return "\n".join(lines)


def _table(reports: list[Report], results: Mapping[str, Mapping[str, Result]], version: str) -> str:
    lines = [
        f"| report | what it tells | what is right | dslaunch | DeepSpeed {version} |",
        "|---|---|---|---|---|",
    ]
    for report in reports:
        tools = results.get(report.id, {})
        cells = [_cell(tools.get(tool)) for tool in ("dslaunch", "DeepSpeed")]
        first = f"[{report.id}]({report.link}): {report.command}"
        lines.append(f"| {first} | {report.happens} | {report.right} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(result: Result | None) -> str:
    if result is None:
        return "not run"
    given = result.given.replace("|", "\\|").replace("`", "'").replace("<", "&lt;")
    return f"**{result.status}**" + (f": {given}" if given else "")
