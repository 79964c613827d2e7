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
        super().__init__()
        self._works = list(works)

    def wait(self, timeout: Any = None) -> bool:
        """Block until all are there. A second call returns at once, which that of a message of gloo's does
        not.
        """
        while self._works:
            self._works.pop(0).wait()
        return True

    def is_completed(self) -> bool:
        """Whether all were waited for."""
        return not self._works
