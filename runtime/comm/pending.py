"""A collective that is under way."""

from __future__ import annotations

from collections.abc import Generator

from .flight_recorder import Flight

Steps = Generator[Flight, None, None]  # yields what must be waited for before it may go on


class Pending:
    """A collective under way. Its first message is sent at once, the rest as `wait` follows it up."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._flight = next(steps, None)

    @classmethod
    def done(cls) -> Pending:
        """Return a pending collective that has nothing to do."""
        return cls(_no_steps())

    def wait(self) -> None:
        """Block (NCCL: make the current stream wait) until the result is in place."""
        while self._flight is not None:
            self._flight.wait()
            self._flight = next(self._steps, None)


def _no_steps() -> Steps:
    """Yield no step."""
    yield from ()
