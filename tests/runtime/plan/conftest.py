"""The fake device, where plans are held against it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.fake_cuda.build import can_be_built, library

if TYPE_CHECKING:
    from tests.fake_cuda.ranks import Parent


@pytest.fixture(scope="module")
def device() -> Iterator[Parent]:
    """The process that ranks on the fake device are forked from: each row has new ones, without memory."""
    reason = can_be_built()
    if reason is not None:
        pytest.skip(reason)
    from tests.fake_cuda.ranks import Parent

    library()
    parent = Parent()
    yield parent
    parent.stop()
