from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import given, strategies as st

from dslaunch.launcher.output.line_folding import (
    MAX_UNWRITTEN_BYTES,
    MAX_WAITING_BYTES,
    WINDOW_S,
    Fold,
    Folded,
    Folding,
)

LONG = 100.0  # seconds, after which everything is due


def folded(given: list[tuple[int, str]], num_ranks: int = 3) -> list[tuple[str, tuple[int, ...]]]:
    """Lines that arrive at one moment, in this order, and how they come out."""
    one = Fold(num_ranks)
    out = []
    for rank, line in given:
        one.add(rank, 1, line.encode(), 0.0)
        out += one.take(0.0)
    out += one.take(LONG)
    return [(group.line.decode(), group.ranks) for group in out]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], []),
        ([(0, "a")], [("a", (0,))]),
        ([(0, "a"), (1, "a"), (2, "a")], [("a", (0, 1, 2))]),
        ([(2, "a"), (0, "a")], [("a", (2, 0))]),
        # The same line twice by one rank is two lines.
        ([(0, "a"), (0, "a")], [("a", (0,)), ("a", (0,))]),
        ([(0, "a"), (0, "a"), (1, "a"), (1, "a")], [("a", (0, 1)), ("a", (0, 1))]),
        # Different lines stay in the order of arrival.
        ([(0, "a"), (1, "b"), (2, "c")], [("a", (0,)), ("b", (1,)), ("c", (2,))]),
        ([(0, "a"), (0, "b"), (1, "a"), (1, "b")], [("a", (0, 1)), ("b", (0, 1))]),
        ([(0, "a"), (0, "b"), (1, "a"), (1, "x"), (1, "b")],
         [("a", (0, 1)), ("b", (0,)), ("x", (1,)), ("b", (1,))]),
        # b, then a: rank 1's a must not move in front of its b.
        ([(0, "a"), (0, "b"), (1, "b"), (1, "a")], [("a", (0,)), ("b", (0, 1)), ("a", (1,))]),
        ([(0, ""), (1, ""), (2, "")], [("", (0, 1, 2))]),
    ],
)  # fmt: skip
def test_the_same_line_of_several_ranks_is_one(
    given: list[tuple[int, str]], expected: list[tuple[str, tuple[int, ...]]]
) -> None:
    assert folded(given) == expected


def test_lines_wait_no_longer_than_the_window() -> None:
    one = Fold(3, window_s=WINDOW_S)
    assert one.due_at == float("inf")
    one.add(0, 1, b"a", 10.0)
    one.add(1, 1, b"a", 10.1)
    assert one.due_at == 10.0 + WINDOW_S
    assert one.take(10.19) == []
    assert one.take(10.21) == [Folded(1, b"a", (0, 1), 10.0)]
    one.add(2, 1, b"a", 10.22)  # too late to be folded
    assert one.take(10.5) == [Folded(1, b"a", (2,), 10.22)]
    assert one.due_at == float("inf")


def test_a_line_that_all_wrote_does_not_wait() -> None:
    one = Fold(2)
    one.add(0, 1, b"a", 0.0)
    assert one.take(0.0) == []
    one.add(1, 1, b"a", 0.0)
    assert one.take(0.0) == [Folded(1, b"a", (0, 1), 0.0)]


def test_stdout_and_stderr_are_not_the_same_line() -> None:
    one = Fold(2)
    one.add(0, 1, b"a", 0.0)
    one.add(1, 2, b"a", 0.0)
    assert one.take(LONG) == [Folded(1, b"a", (0,), 0.0), Folded(2, b"a", (1,), 0.0)]


def test_what_waits_is_bounded() -> None:
    one = Fold(2)
    line = b"x" * 1000
    num_taken = 0
    for number in range(5000):
        one.add(0, 1, b"%d " % number + line, 0.0)
        num_taken += len(one.take(0.0))
    assert (5000 - num_taken) * len(line) <= MAX_WAITING_BYTES


def test_a_line_that_is_written_again_and_again_costs_neither_memory_nor_time() -> None:
    one = Fold(2)
    for number in range(20_000):
        one.add(0, 1, b"", number / 1000)
        one.take(number / 1000)
    assert max(map(len, one._places.values())) < 1000


lines = st.lists(st.sampled_from(["a", "b", "c", ""]), max_size=12)


@given(
    of_ranks=st.lists(lines, min_size=1, max_size=4),
    order=st.randoms(use_true_random=False),
    steps_s=st.lists(st.sampled_from([0.0, 0.05, 0.3]), min_size=1),
)
def test_every_line_of_every_rank_comes_out_in_its_order(
    of_ranks: list[list[str]], order: object, steps_s: list[float]
) -> None:
    """For any interleaving: none is lost, none invented, none moved within its rank."""
    turns = [rank for rank, own in enumerate(of_ranks) for _ in own]
    order.shuffle(turns)  # type: ignore[attr-defined]
    rest = [list(own) for own in of_ranks]
    one = Fold(len(of_ranks), window_s=WINDOW_S)
    out: list[Folded] = []
    now = 0.0
    for place, rank in enumerate(turns):
        now += steps_s[place % len(steps_s)]
        one.add(rank, 1, rest[rank].pop(0).encode(), now)
        out += one.take(now)
    out += one.take(now, is_all=True)
    assert all(len(set(group.ranks)) == len(group.ranks) for group in out)
    for rank, own in enumerate(of_ranks):
        assert [group.line.decode() for group in out if rank in group.ranks] == own
    assert one._places == {}
    assert one._num_bytes == 0


@given(of_ranks=st.lists(st.lists(st.sampled_from(["a", "b", "c"]), max_size=6), min_size=1, max_size=3))
def test_ranks_that_write_the_same_are_folded_completely(of_ranks: list[list[str]]) -> None:
    """One rank after the other within the window, all with the first one's lines:
    as many lines as that one wrote.
    """
    own = of_ranks[0]
    given = [(rank, line) for rank in range(len(of_ranks)) for line in own]
    assert folded(given, len(of_ranks)) == [(line, tuple(range(len(of_ranks)))) for line in own]


class Written:
    """Takes what is handed on, and says that it is written when told to."""

    def __init__(self) -> None:
        self.lines: list[Folded] = []
        self.unconfirmed: list[Callable[[], None]] = []
        self.has_more = threading.Event()

    def __call__(self, lines: list[Folded], on_done: Callable[[], None]) -> None:
        self.lines += lines
        self.unconfirmed.append(on_done)
        self.has_more.set()

    def confirm(self) -> None:
        while self.unconfirmed:
            self.unconfirmed.pop()()


def begun(num_ranks: int, written: Written) -> Folding:
    folding = Folding(written)
    folding.begin(num_ranks)
    return folding


def test_a_line_comes_by_itself_when_the_window_has_passed() -> None:
    written = Written()
    folding = begun(2, written)
    began = time.monotonic()
    folding.add(0, 1, b"a\n", None)
    assert written.has_more.wait(10)
    assert time.monotonic() - began >= WINDOW_S
    assert [(one.line, one.ranks) for one in written.lines] == [(b"a", (0,))]


def test_a_flush_hands_on_everything_at_once() -> None:
    written = Written()
    folding = begun(3, written)
    folding.add(0, 1, b"a\nb\n", None)
    folding.add(1, 1, b"a\n", None)
    folding.flush()
    assert [(one.line, one.ranks) for one in written.lines] == [(b"a", (0, 1)), (b"b", (0,))]


def test_who_gives_lines_may_go_on_until_too_much_is_unwritten() -> None:
    written = Written()
    folding = begun(1, written)
    done: list[int] = []
    text = (b"x" * 999 + b"\n") * 1000
    num_given = 0
    while len(done) == num_given:
        folding.add(0, 1, text, lambda number=num_given: done.append(number))  # type: ignore[misc]
        num_given += 1
    assert num_given == MAX_UNWRITTEN_BYTES // len(text) + 1
    for number in range(num_given, num_given + 3):
        folding.add(0, 1, text, lambda number=number: done.append(number))  # type: ignore[misc]
    assert len(done) == num_given - 1
    written.confirm()
    assert done == list(range(num_given + 3))
