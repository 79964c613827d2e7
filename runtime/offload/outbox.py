"""Gradients on their way out of memory, over all sub-buffers of a model."""

from __future__ import annotations

from collections import deque
from typing import Protocol

AT_ONCE = 2  # one value is written while the next is averaged and lands in host memory


class OutgoingCopy(Protocol):
    """A value that goes to a file in two steps: to host memory, then to the file."""

    def go_on(self) -> None:
        """Bring the value into host memory, and begin to write it."""

    def settle(self) -> None:
        """Wait until the value is written, and give its memory back."""


class Outbox:
    """At most AT_ONCE values on their way, the oldest first: the backward waits for the disk only if writing
    one takes longer than two units of the backward.
    """

    def __init__(self) -> None:
        self._leaving: deque[OutgoingCopy] = deque()

    def make_room(self) -> None:
        """Make room for one more value, and begin to write all that are in."""
        while len(self._leaving) >= AT_ONCE:
            self._leaving.popleft().settle()
        for one in self._leaving:
            one.go_on()

    def enter(self, one: OutgoingCopy) -> None:
        """Take in a value, whose memory is already there."""
        self._leaving.append(one)

    def leave(self, one: OutgoingCopy) -> None:
        """Drop a value that is written, or wanted again."""
        if one in self._leaving:
            self._leaving.remove(one)

    def flush(self) -> None:
        """Wait until all values are written."""
        while self._leaving:
            self._leaving.popleft().settle()
