"""Put a run into one of three words: right, says so, wrong."""

from __future__ import annotations

import re

from tests.field.reports import RIGHT, SAID, WRONG, Report
from tests.field.run import Run, without_paths


def verdict(report: Report, run: Run) -> tuple[str, str]:
    """Return the word, and in words what is not right, or the error that is."""
    fault = report.judge(run)
    if not fault:
        return RIGHT, ""
    if report.said and run.code and (message := re.search(report.said, run.output)):
        word = RIGHT if report.is_error_right else SAID
        return word, without_paths(" ".join(message[0].split()))
    return WRONG, fault
