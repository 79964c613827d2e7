"""The summary of a look at hosts: problems and warnings as sentences, differences, common values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...shared.table import table, terminal_columns
from ..controller.master_search import first_reached
from ..errors import EXIT_HOST
from ..inputs.host_list import folded
from ..output.screen_text import screen_text
from ..wording import count
from .check_facts import ClusterFacts, Finding
from .check_findings import findings_of
from .check_rows import FactRow, rows_of


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckSummary:
    """All sections of the summary."""

    findings: tuple[Finding, ...]
    rows: tuple[FactRow, ...]
    master: str  # where rank 0 is reached, as text; empty if it was not tried
    master_addr: str | None
    num_usable: int

    @property
    def exit_code(self) -> int:
        return EXIT_HOST if any(one.is_problem for one in self.findings) else 0


def summary_of(cluster: ClusterFacts) -> CheckSummary:
    """Return the summary of the facts."""
    findings = findings_of(cluster)
    bad = {host for one in findings if one.is_problem for host in one.hosts}
    master_addr, master = _master(cluster)
    return CheckSummary(
        findings=findings,
        rows=tuple(rows_of(cluster)),
        master=master,
        master_addr=master_addr,
        num_usable=len(cluster.hosts) - len(bad),
    )


def _master(cluster: ClusterFacts) -> tuple[str | None, str]:
    """Return the MASTER_ADDR of a job, and a sentence on it."""
    problems = cluster.reach
    if not problems:
        return None, ""
    found = first_reached(cluster.candidates, problems)
    if found is None:
        return None, ""
    text = f"{found}, port {cluster.port}: reached by all that were asked"
    tried = cluster.candidates[: cluster.candidates.index(found)]
    for place, candidate in enumerate(tried):
        failed = [cluster.name_of(rank) for rank, of_node in problems.items() if of_node[place]]
        text += f"; {candidate} is not reached by {folded(failed)}"
    return found, text


def as_text(cluster: ClusterFacts, summary: CheckSummary) -> str:
    """Write the summary as text, problems first."""
    num_hosts = len(cluster.hosts)
    usable = count(num_hosts, "host")
    if summary.num_usable < num_hosts:
        usable = f"{summary.num_usable} of {usable}"
    elif num_hosts > 1:
        usable = f"all {usable}"
    lines = [f"{usable} can be used (looked at in {cluster.took_s:.1f} s)"]
    for title, is_problem in (("Problems", True), ("Warnings", False)):
        found = [one for one in summary.findings if one.is_problem is is_problem]
        if found:
            lines += ["", f"{title}:", *(f"  {folded(one.hosts)}: {one.text}" for one in found)]
    different = [row for row in summary.rows if not row.is_same]
    same = [(row.label, row.values[0][0]) for row in summary.rows if row.is_same]
    if summary.master:
        same.append(("MASTER_ADDR", summary.master))
    if different:
        cells = [
            ("" if place else row.label, f"{'!' if is_odd else ' '} {value}", folded(names))
            for row in different
            for place, (value, names, is_odd) in enumerate(row.values)
        ]
        lines += ["", "Different (! marks the odd ones):", *_shown(cells)]
    if same:
        title = "The same everywhere:" if num_hosts > 1 else "Found:"
        lines += ["", title, *_shown(same)]
    return screen_text(lines)


def _shown(rows: Sequence[Sequence[str]]) -> list[str]:
    columns = terminal_columns()
    return [f"  {line}" for line in table(rows, columns=columns and columns - 2)]


def as_dict(cluster: ClusterFacts, summary: CheckSummary) -> dict[str, Any]:
    """Return the summary as JSON has it."""
    bad = {host for one in summary.findings if one.is_problem for host in one.hosts}
    return {
        "exit_code": summary.exit_code,
        "took_s": round(cluster.took_s, 3),
        "problems": [
            {"hosts": list(one.hosts), "text": one.text} for one in summary.findings if one.is_problem
        ],
        "warnings": [
            {"hosts": list(one.hosts), "text": one.text} for one in summary.findings if not one.is_problem
        ],
        "master": {
            "address": summary.master_addr,
            "port": cluster.port,
            "port_problem": cluster.listening_problem,
            "candidates": list(cluster.candidates),
        },
        "same": {row.label: row.values[0][0] for row in summary.rows if row.is_same},
        "different": {
            row.label: {value: list(names) for value, names, _ in row.values}
            for row in summary.rows
            if not row.is_same
        },
        "hosts": [
            {
                "host": host.name,
                "node_rank": host.node_rank,
                "can_be_used": host.name not in bad,
                "slots": host.num_slots,
                "clock_offset_s": host.clock_offset_s,
                "clock_error_s": host.clock_error_s,
                "reach": None
                if host.reach is None
                else dict(zip(cluster.candidates, host.reach, strict=True)),
                "facts": {question: dict(facts) for question, facts in host.answers.items()},
            }
            for host in cluster.hosts
        ],
    }
