from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from dslaunch.runtime.comm.process_group import destroy_group


@pytest.fixture(autouse=True)
def _no_group_is_left() -> Iterator[None]:
    """A test in pytest's own process leaves no process group there."""
    yield
    if dist.is_initialized():
        destroy_group()
