from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runtime.metrics.told import Reader


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    """What is told in this test."""
    made = Reader(tmp_path)
    yield made
    made.close()
