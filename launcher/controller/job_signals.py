"""The meaning of a signal to the launcher for its job.

    SIGINT, SIGTERM, SIGHUP    the job ends: SIGTERM to the workers, SIGKILL after the grace
    SIGUSR1, SIGUSR2           passed on to the worker processes only: their children may not handle them
    SIGQUIT (Ctrl-\\)          the ranks are asked what they do, and go on
    SIGTSTP (Ctrl-Z)           this process stops; the agents are told to wait for it

Signals that were ignored when we were started, such as SIGHUP under nohup, stay ignored.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from ..job.verdict import signal_name

if TYPE_CHECKING:
    from ..output.console import Console

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
ASKING = signal.SIGQUIT
STOPPING = signal.SIGTSTP
NUM_ENDING_AT_ONCE = 3
LAST_WORDS_S = 1.0  # time for the thread that reports a signal


@contextmanager
def watch(put: Callable[[int], None], *, last_act: Callable[[int], None] = lambda _: None) -> Iterator[None]:
    """Give each signal to `put`. The third signal that ends the job ends this process at once, after a call
    of `last_act` with the exit code; the agents then see their stream end.
    """
    count = 0

    def receive(number: int, _: FrameType | None) -> None:
        nonlocal count
        count += number in ENDING
        if count == NUM_ENDING_AT_ONCE:
            end_at_once(number, last_act)
        put(number)

    # SIGQUIT is received even if it was ignored: a shell without job control ignores it for a command before
    # `&`, only so that the command does not die of it.
    with received((ASKING, *unignored((*ENDING, *PASSED_ON, STOPPING))), receive):
        yield


def end_at_once(number: int, last_act: Callable[[int], None]) -> NoReturn:
    """End this process at once, whatever it is doing."""
    try:
        last_act(128 + number)
    finally:
        os._exit(128 + number)


@contextmanager
def no_worker_signals(console: Console) -> Iterator[None]:
    """Report signals that are meant for workers, and ignore them, while there are no workers. Later `watch`
    handles them.

    The report is made in a thread: a signal may come while this one holds a lock that the report needs.
    """
    numbers: queue.SimpleQueue[int | None] = queue.SimpleQueue()

    def tell() -> None:
        for number in iter(numbers.get, None):
            tell_unheard(number, console)

    thread = threading.Thread(target=tell, name="signals", daemon=True)
    thread.start()
    try:
        with received((ASKING, *unignored(PASSED_ON)), lambda number, _: numbers.put(number)):
            yield
    finally:
        numbers.put(None)
        thread.join(LAST_WORDS_S)


def tell_unheard(number: int, console: Console) -> None:
    """Report a signal that was meant for workers, but came while there were none."""
    name = signal_name(number)
    if number == ASKING:
        console.warn(f"{name}: no worker runs that could be asked what it does")
        console.answered()
    else:
        console.warn(f"{name}: no worker runs that it could be passed on to")


def unignored(numbers: Iterable[int]) -> list[int]:
    """Return the signals that were not ignored when we were started."""
    return [one for one in numbers if signal.getsignal(one) != signal.SIG_IGN]


@contextmanager
def received(numbers: Iterable[int], receive: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Give these signals to `receive`, and afterwards to their former handlers.

    The handlers are kept if a signal came that ends the job: the next one may come just after the job's end,
    and its default action would end this process without report and exit code. So signals go to `receive`
    until the end of this process.
    """
    is_ending = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal is_ending
        is_ending = is_ending or number in ENDING
        receive(number, frame)

    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            if not (is_ending and number in ENDING):
                signal.signal(number, handler)


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Raise SystemExit inside at SIGTERM or SIGHUP, as Ctrl-C raises KeyboardInterrupt: for work with folders
    and processes that its `finally` removes. A job inside handles these signals by itself.
    """

    def end(number: int, _: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    with received(unignored((signal.SIGTERM, signal.SIGHUP)), end):
        yield


def stop_until_continued() -> None:
    """Stop this process as Ctrl-Z normally does; return when it is continued, or at once if no shell could
    continue it.
    """
    handler = signal.signal(STOPPING, signal.SIG_DFL)
    os.kill(os.getpid(), STOPPING)
    signal.signal(STOPPING, handler)
