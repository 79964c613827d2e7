"""The workers of this folder, run, and the comparison of what they found."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
WORLD_SIZES = [pytest.param(1, marks=pytest.mark.exhaustive), 2]
DEADLINE_S = 540.0  # below the time limit of these tests

Found = dict[int, list[dict[str, Any]]]
"""World size -> for each rank: case -> what it found."""


def asked_for(request: pytest.FixtureRequest, name: str) -> list[Any]:
    """The values of a parameter for which tests of this file are to be run:
    those with a marker may have been left out.
    """
    values = [
        item.callspec.params[name]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == request.path and hasattr(item, "callspec")
        if name in item.callspec.params
    ]
    return list(dict.fromkeys(values))


def run(
    worker: str,
    folder: Path,
    request: pytest.FixtureRequest,
    *,
    cases: Sequence[str] = (),
    sizes: Sequence[int] = (),
) -> Found:
    """Run all cases of a worker, or those that are named, with `sizes` processes, or as many as tests ask
    for: one, and two.
    """
    sizes = sizes or asked_for(request, "world_size")
    env = {
        name: value for name, value in os.environ.items() if not name.startswith(("DSLAUNCH_", "ACCELERATE_"))
    }
    env |= {
        "DSLAUNCH_DROP_IN": "always",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "cache"),
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    log = folder / "log"
    with log.open("w") as output:
        job = subprocess.Popen(
            [
                *(sys.executable, str(HERE / worker)),
                *(f"--world_size={size}" for size in sizes),
                *(str(folder), *cases),
            ],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            code: object = job.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            code = f"nothing within {DEADLINE_S:.0f} s"
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()
    if code != 0:
        pytest.fail(f"{worker} ended with {code}:\n{log.read_text()[-4000:]}", pytrace=False)
    return {
        size: [json.loads((folder / str(size) / f"{rank}.json").read_text()) for rank in range(size)]
        for size in sizes
    }


def of_case(found: Found, world_size: int, case: str) -> list[dict[str, Any]]:
    """Return what each rank found in a case; fail with its traceback if it failed."""
    results = [rank.get(case, {"failure": "a case before this one has failed"}) for rank in found[world_size]]
    for rank, result in enumerate(results):
        if "failure" in result:
            pytest.fail(f"rank {rank} of {world_size}, {case}:\n{result['failure']}", pytrace=False)
    return results


def assert_close(
    values: list[float], expected: list[float], *, relative: float, absolute: float = 0.0
) -> None:
    """Each number, with one tolerance for all."""
    assert values, "nothing to compare"
    assert values == pytest.approx(expected, rel=relative, abs=absolute)


def assert_same_weights(
    values: dict[str, list[float]], expected: dict[str, list[float]], *, absolute: float
) -> None:
    """Each element of each weight."""
    assert values.keys() == expected.keys()
    for name, numbers in values.items():
        assert len(numbers) == len(expected[name]), name
        differences = [abs(one - other) for one, other in zip(numbers, expected[name], strict=True)]
        assert max(differences) <= absolute, name
