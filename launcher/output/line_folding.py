"""One line instead of many, if several ranks write the same line at about the same time."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

WINDOW_S = 0.2
MAX_WAITING_BYTES = 1 << 20  # above this the oldest lines go on early
MAX_UNWRITTEN_BYTES = 4 << 20  # above this the callers that bring lines are held back


class Folded(NamedTuple):
    """A line without its newline, and the ranks that wrote it, in the order of arrival."""

    stream: int
    line: bytes
    ranks: tuple[int, ...]
    first_at: float

    @property
    def num_bytes(self) -> int:
        return len(self.ranks) * (len(self.line) + 1)


class _Group:
    """A line that waits for other ranks to write it too."""

    __slots__ = ("first_at", "key", "ranks")

    def __init__(self, key: tuple[int, bytes], first_at: float) -> None:
        self.key = key
        self.first_at = first_at
        self.ranks: list[int] = []


class Fold:
    """Takes lines and gives them back in order, the same line of several ranks once.

    Groups wait in a row. A rank's line may join any group behind the one that its last line is in, so that
    every rank's lines come out in its own order; else it makes a new group at the end. Only the front of the
    row is given back: when the window has passed, when all ranks are in it, or when too much waits.
    """

    def __init__(self, num_ranks: int, *, window_s: float = WINDOW_S) -> None:
        self._num_ranks = num_ranks
        self._window_s = window_s
        self._groups: deque[_Group] = deque()
        self._num_given = 0  # groups that left the row: group n stands at place n - _num_given
        self._num_bytes = 0
        self._places: dict[tuple[int, bytes], list[int]] = {}  # numbers of the groups of a line, ascending
        self._last_of: dict[int, int] = {}  # rank: the group of its last line

    @property
    def due_at(self) -> float:
        """Time at which the front of the row has waited long enough; infinity if no line waits."""
        return self._groups[0].first_at + self._window_s if self._groups else float("inf")

    def add(self, rank: int, stream: int, line: bytes, now: float) -> None:
        key = (stream, line)
        places = self._places.setdefault(key, [])
        num_gone = bisect_left(places, self._num_given)
        # Remove many at once: one by one would be slow for a line that is written all the time
        if num_gone > len(places) // 2:
            del places[:num_gone]
        at = bisect_right(places, max(self._last_of.get(rank, -1), self._num_given - 1))
        if at == len(places):
            places.append(self._num_given + len(self._groups))
            self._groups.append(_Group(key, now))
        number = places[at]
        self._last_of[rank] = number
        self._groups[number - self._num_given].ranks.append(rank)
        self._num_bytes += len(line) + 1

    def take(self, now: float, *, is_all: bool = False) -> list[Folded]:
        """Return the lines that need not wait any more."""
        taken = []
        while self._groups:
            group = self._groups[0]
            if not (
                is_all
                or now >= group.first_at + self._window_s
                or len(group.ranks) == self._num_ranks
                or self._num_bytes > MAX_WAITING_BYTES
            ):
                break
            self._groups.popleft()
            self._num_given += 1
            if self._places[group.key][-1] < self._num_given:
                del self._places[group.key]
            taken.append(Folded(*group.key, tuple(group.ranks), group.first_at))
            self._num_bytes -= taken[-1].num_bytes
        return taken


class Folding:
    """A fold with its clock: hands lines on from a thread of its own when they are due.

    `write(lines, on_done)` must not block; it calls `on_done` when they are written.
    """

    def __init__(self, write: Callable[[list[Folded], Callable[[], None]], None]) -> None:
        self._fold = Fold(0)
        self._write = write
        self._changed = threading.Condition()
        self._unwritten_bytes = 0
        self._held: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None

    def begin(self, num_ranks: int) -> None:
        """From now on, a line is complete when so many ranks wrote it. No line may be waiting."""
        with self._changed:
            self._fold = Fold(num_ranks)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="fold", daemon=True)
                self._thread.start()

    def add(self, rank: int, stream: int, text: bytes, on_done: Callable[[], None] | None) -> None:
        """Take whole lines, the last newline included. `on_done` is called as soon as more may come."""
        with self._changed:
            now = time.monotonic()
            was_empty = self._fold.due_at == float("inf")
            for line in text[:-1].split(b"\n"):
                self._fold.add(rank, stream, line, now)
            self._unwritten_bytes += len(text)
            if on_done is not None:
                self._held.append(on_done)
            self._hand_on(self._fold.take(now))
            self._release()
            if was_empty:
                self._changed.notify()

    def flush(self) -> None:
        """Hand all waiting lines on now."""
        with self._changed:
            self._hand_on(self._fold.take(0.0, is_all=True))

    def _run(self) -> None:
        with self._changed:
            while True:
                now = time.monotonic()
                self._hand_on(self._fold.take(now))
                due_at = self._fold.due_at
                self._changed.wait(None if due_at == float("inf") else due_at - now)

    def _hand_on(self, lines: list[Folded]) -> None:
        if lines:
            num_bytes = sum(one.num_bytes for one in lines)
            self._write(lines, lambda: self._written(num_bytes))

    def _written(self, num_bytes: int) -> None:
        with self._changed:
            self._unwritten_bytes -= num_bytes
            self._release()

    def _release(self) -> None:
        while self._held and self._unwritten_bytes <= MAX_UNWRITTEN_BYTES:
            self._held.popleft()()
