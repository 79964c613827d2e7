"""Messages from one rank to another, several of which are one collective, or one message of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist


class Messages(dist.Work):
    """Several messages, as torch's Work is one collective.

    Where one fails the others are given up: they would be received into memory that is freed then.
    """

    def __init__(self, starts: Iterable[Callable[[], Any]], *, tells_its_end: bool) -> None:
        """Begin them. `tells_its_end`: whether that is known before it is waited for, which gloo does not
        tell.
        """
        super().__init__()
        self.tells_its_end = tells_its_end
        self._works: list[Any] = []
        self._num_awaited = 0  # a second wait for a message of gloo's would not return
        try:
            for start in starts:
                self._works.append(start())
        except BaseException:
            self._works.clear()
            raise

    def wait(self, timeout: Any = None) -> bool:
        """Block (NCCL: make the current stream wait) until all are there; a second call returns at once."""
        try:
            while self._num_awaited < len(self._works):
                self._num_awaited += 1
                self._works[self._num_awaited - 1].wait()
        except BaseException:
            self._works.clear()
            raise
        return True

    def is_completed(self) -> bool:
        """Whether all have come to their end; of gloo's, whether all were waited for."""
        return all(work.is_completed() for work in self._works)
