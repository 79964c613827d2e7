"""Fixtures for whole jobs on this machine."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launcher.local_job import WORKER, Job, Start


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a job of this worker text; the words are the options before the script and,
    after '--', its own.
    """
    jobs: list[Job] = []

    def start_one(worker: str, *words: str, **given: Any) -> Job:
        (tmp_path / "train.py").write_text(WORKER + textwrap.dedent(worker))
        place = words.index("--") if "--" in words else len(words)
        jobs.append(Job(tmp_path, [*words[:place], "train.py", *words[place + 1 :]], **given))
        return jobs[-1]

    yield start_one
    for job in jobs:
        job.end()


@pytest.fixture
def start_words(tmp_path: Path) -> Iterator[Start]:
    """Starts a job of exactly these words."""
    jobs: list[Job] = []

    def start_one(*words: str, **given: Any) -> Job:
        jobs.append(Job(tmp_path, words, **given))
        return jobs[-1]

    yield start_one
    for job in jobs:
        job.end()
