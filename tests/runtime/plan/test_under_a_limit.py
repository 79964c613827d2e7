"""A job that is said to fit barely trains under its cgroup's limit; one that is said not to fit does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.plan.under_a_limit import PROGRAM, Training, needed_bytes, run_under, why_no_limit

BARELY, TOO_SMALL = 1.04, 0.85
TRAINING = Training(num_layers=96, stage=1)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_trains_where_it_fits_barely_and_is_killed_where_it_does_not_fit(tmp_path: Path) -> None:
    reason = why_no_limit()
    if reason:
        pytest.skip(reason)
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    needed, _ = needed_bytes(program, TRAINING)
    for part, fits in ((BARELY, True), (TOO_SMALL, False)):
        limit = int(needed * part)
        assert needed_bytes(program, TRAINING, f"--host_memory={limit}B") == (needed, 0 if fits else 1)
        ended = run_under(limit, program, TRAINING)
        assert (ended.has_trained, ended.is_killed) == (fits, not fits), ended.output
