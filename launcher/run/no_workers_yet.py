"""A signal that ends the job while it has no workers: before its first start, or between two."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from ..controller.job_signals import ENDING, NUM_ENDING_AT_ONCE, end_at_once, received, unignored
from ..errors import LaunchError
from ..job.verdict import signal_name


class InterruptedJob(LaunchError):
    """A signal ended the job while it had no workers."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message, exit_code=128 + number)
        self.number = number


def interruption(number: int, *, is_first: bool) -> InterruptedJob:
    """Return the error for such a signal."""
    what = "nothing was started" if is_first else "the job is not started again"
    return InterruptedJob(f"{signal_name(number)}: {what}", number)


class _Interrupted(BaseException):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def no_workers_yet(*, is_first: bool, last_act: Callable[[int], None]) -> Iterator[None]:
    """End the work inside at such a signal, and report other signals. `last_act`: as for job_signals.watch.

    Errors: InterruptedJob
    """
    try:
        with _ending_at_signal(last_act=last_act):
            yield
    except _Interrupted as interrupted:
        raise interruption(interrupted.number, is_first=is_first) from None


@contextmanager
def given_up_at_signal(*, last_act: Callable[[int], None]) -> Iterator[list[InterruptedJob]]:
    """End the work inside, after the workers of an attempt, at such a signal. The list then has one error,
    which is raised if the job would start again.
    """
    signals: list[InterruptedJob] = []
    try:
        with _ending_at_signal(last_act=last_act):
            yield signals
    except _Interrupted as interrupted:
        signals.append(interruption(interrupted.number, is_first=False))


@contextmanager
def _ending_at_signal(*, last_act: Callable[[int], None]) -> Iterator[None]:
    """Errors: _Interrupted"""
    count = 0

    def receive(number: int, _: FrameType | None) -> None:
        nonlocal count
        count += 1
        if count == NUM_ENDING_AT_ONCE:
            end_at_once(number, last_act)
        if count == 1:
            raise _Interrupted(number)

    with received(unignored(ENDING), receive):
        yield
