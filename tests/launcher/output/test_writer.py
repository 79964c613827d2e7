from __future__ import annotations

import threading
import time
from collections import Counter

from dslaunch.launcher.errors import LaunchError
from dslaunch.launcher.output.writer import BATCH_BYTES, Writer


class Sink:
    """Keeps what is written to it, each write apart; blocks or fails when told to."""

    def __init__(self, *, error: OSError | None = None) -> None:
        self.writes: list[bytes] = []
        self.may_write = threading.Event()
        self.may_write.set()
        self._error = error

    def write(self, data: bytes) -> None:
        self.writes.append(data)
        assert self.may_write.wait(10)
        if self._error is not None:
            raise self._error

    def failure(self, error: OSError) -> LaunchError:
        return LaunchError(f"no: {error}")


def blocked() -> tuple[Writer, Sink]:
    """A writer that hangs in its first write, so that whatever is put next waits together."""
    writer, sink = Writer(), Sink()
    sink.may_write.clear()
    writer.put(sink, b"first")
    deadline = time.monotonic() + 10
    while not sink.writes:
        assert time.monotonic() < deadline
    return writer, sink


def test_what_waits_for_one_sink_is_written_together_and_the_order_stays() -> None:
    writer, first = blocked()
    other = Sink()
    for sink, data in ((first, b"a"), (first, b"b"), (other, b"c"), (first, b"d")):
        writer.put(sink, data)
    first.may_write.set()
    assert writer.drain(10)
    assert first.writes == [b"first", b"ab", b"d"]
    assert other.writes == [b"c"]


def test_what_is_written_together_is_bounded() -> None:
    writer, sink = blocked()
    for _ in range(20):
        writer.put(sink, b"x" * (BATCH_BYTES // 4))
    sink.may_write.set()
    assert writer.drain(10)
    assert max(map(len, sink.writes)) <= 2 * BATCH_BYTES
    assert sum(map(len, sink.writes)) == len(b"first") + 5 * BATCH_BYTES


def test_nothing_is_written_after_an_error_and_everybody_is_told_all_the_same() -> None:
    writer, bad, good = Writer(), Sink(error=OSError("bad")), Sink()
    done: Counter[int] = Counter()
    for number in range(3):
        writer.put(bad, b"x", lambda number=number: done.update([number]))  # type: ignore[misc]
        writer.put(good, b"y", lambda number=number: done.update([number]))  # type: ignore[misc]
        assert writer.drain(10)
    assert bad.writes == [b"x"]
    assert good.writes == [b"y"] * 3
    assert done == {0: 2, 1: 2, 2: 2}
    assert str(writer.failure) == "no: bad"


def test_everybody_is_told_once_when_the_writer_is_given_up() -> None:
    """What was written, what is being written, what waits, and what comes later."""
    writer, first = blocked()
    good, hanging = Sink(), Sink()
    hanging.may_write.clear()
    done: Counter[str] = Counter()
    for name, sink in (("written", good), ("being written", hanging), ("waiting", good)):
        writer.put(sink, b"x", lambda name=name: done.update([name]))  # type: ignore[misc]
    first.may_write.set()
    deadline = time.monotonic() + 10
    while not hanging.writes:
        assert time.monotonic() < deadline
    writer.put(good, b"x", lambda: done.update(["in the queue"]))
    assert done == {"written": 1}
    assert writer.stuck_s > 0
    writer.give_up()
    writer.put(good, b"x", lambda: done.update(["late"]))
    hanging.may_write.set()
    names = ("written", "being written", "waiting", "in the queue", "late")
    assert done == dict.fromkeys(names, 1)
    assert writer.drain(0)
    assert writer.stuck_s == 0
    assert good.writes == [b"x"]
