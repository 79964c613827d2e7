from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.runtime.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Processes to run ranks in: `ranks(function, world_size=2)`."""
    pool = Ranks()
    yield pool
    pool.stop()
