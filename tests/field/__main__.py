"""Run reports with dslaunch and DeepSpeed, and write what they give into results.json and the page.

    python -m tests.field [IDS ...] [--tool dslaunch|DeepSpeed] [--only-page]

Without ids all of them run, in half an hour. DeepSpeed is the package in the folder deepspeed/ of the virtual
environment; without it, its column stays as it is.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import dslaunch
from tests.field import page, run
from tests.field.reports import REPORTS, Report
from tests.field.verdict import verdict


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ids", nargs="*", help="such as DeepSpeed#8262, or names of programs")
    parser.add_argument("--tool", choices=run.TOOLS, help="only this one")
    parser.add_argument(
        "--only-page", action="store_true", help="run nothing, write the page of results.json"
    )
    given = parser.parse_args()
    unknown = set(given.ids) - {name for one in REPORTS for name in (one.id, one.program)}
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: no such report; tests/field/reports.py lists them")
    chosen = [one for one in REPORTS if not given.ids or {one.id, one.program} & set(given.ids)]
    tools = [given.tool] if given.tool else list(run.TOOLS)
    if "DeepSpeed" in tools and not given.only_page:
        missing = run.why_no_deepspeed()
        if missing:
            print(f"without DeepSpeed: {missing}", file=sys.stderr)
            tools.remove("DeepSpeed")
    ranks = run.DeepSpeedRanks()
    for report in [] if given.only_page else chosen:
        for tool in tools:
            _run_one(report, tool, ranks)
    page.PAGE.write_text(page.text(page.load()), encoding="utf-8")


def _run_one(report: Report, tool: str, ranks: run.DeepSpeedRanks) -> None:
    """Run it, and keep the result at once: another run of all of them may be at work on other reports."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        done = run.run(
            report.program, report.launches, tool, Path(folder), limit_s=report.limit_s, ranks=ranks
        )
    status, given = verdict(report, done)
    version = dslaunch.__version__ if tool == "dslaunch" else run.deepspeed_version()
    result = page.Result(status=status, given=given, version=version, date=time.strftime("%Y-%m-%d"))
    results = page.load()
    results.setdefault(report.id, {})[tool] = result
    page.store(results)
    print(f"{report.id} {tool}, {time.monotonic() - began:.0f} s: {status} {given}", flush=True)


if __name__ == "__main__":
    main()
