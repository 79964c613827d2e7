"""Messages from one rank to another, several of which are one collective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist


class Messages(dist.Work):
    """Several messages, as torch's Work is one collective. It has ended when all were waited for:
    gloo does not tell it before.
    """

    def __init__(self, works: Sequence[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._works = works

    def wait(self, timeout: Any = None) -> bool:
        """Block until all are there."""
        for work in self._works:
            work.wait()
        return True

    def is_completed(self) -> bool:
        """Whether all were waited for."""
        return all(work.is_completed() for work in self._works)
