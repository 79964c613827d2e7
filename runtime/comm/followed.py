"""Collectives under way that are more than torch's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist


class Work(Protocol):
    """What a collective returns with `async_op=True`, torch's own or one of these."""

    def wait(self, timeout: timedelta = ...) -> bool:
        """Block (NCCL: make the current stream wait) until the result is in place."""

    def is_completed(self) -> bool:
        """Whether nothing is to wait for."""


class Followed:
    """One of torch's and what this rank does afterwards, which is done by the first wait()."""

    def __init__(self, work: dist.Work | None, finish: Callable[[], None]) -> None:
        """None: it is done, and so is what follows."""
        self._work = work
        self._finish: Callable[[], None] | None = finish
        if work is None:
            self._follow()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until the result is in place. A `timeout` of 0 is the group's."""
        if self._work is not None:
            self._work.wait(timeout)
        self._follow()
        return True

    def is_completed(self) -> bool:
        """Whether wait() has been here."""
        return self._finish is None

    def _follow(self) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


class Together:
    """Several, waited for as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = tuple(works)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until all results are in place. A `timeout` of 0 is the group's, for each."""
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        """Whether all are."""
        return all(work.is_completed() for work in self._works)
