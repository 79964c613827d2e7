"""Schedule of a backward's averages: a rule by which every rank averages the gradients of the sub-buffers in
the same order.

[Note: one order on all ranks]
A rank that waits for a collective must know that the others come to it without anything that this rank does
only later; else all stand still. What a rank's data reaches, and when, says nothing about the other ranks.
What they have in common is the sequence in which units are gathered: it is the same on all ranks, or the step
ends with an error (comm/order_check.py). So that sequence is the clock.

The gathers of a backward cut it into segments. A segment is known by the gathers before it, and has a list of
places, which are averaged in this order. This rank may ask for the next place of the list as soon as it has
finished its gradients. Before the next gather it asks for all of them, finished or not. So there is one order
of gathers and reductions, all ranks ask for them in it, and a rank waits for one only after it has asked for
all before. Proof that no state is stuck: of the collectives that some rank has not asked for, take the first.
That rank waits for one that comes earlier, which all ranks have asked for; so its wait ends.

The lists are learnt. After a backward that comes to a new segment the ranks tell each other in which segment
each of them was given the last gradient of a place, and the last of these segments gets the place. Below
stage 3 nothing is gathered, and the whole backward is one segment.

A new segment has a guessed list (guessed_order.py), or all whole gradients of the model would be in memory at
once. It is a function of the gathers before, and obeys the same rule, so the proof holds for it. What is on
no list at all is averaged at the end. A guess may be too early: the gradients that come after it are averaged
when the ranks tell each other, and what they learn does not depend on it.

Gradients that every rank keeps whole are averaged in one backward of a step, which then stands for the step:
what is left when it ends is asked for there, and a rank that runs none asks for all before the step. Ranks
may run other numbers of backwards; each asks for the same places in the same order, once for a step.

A gradient that comes after its place was averaged is kept, and averaged with the place the next time. Before
a step, ranks tell each other whether that is left to do (`Reducer.catch_up`). If it came in the same backward
as the others, and no guess was the cause, the place is averaged at the end of a backward from then on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple
from zlib import crc32

from .guessed_order import GuessedOrder

_START = 0
# Backwards after which ranks tell each other. A model that gathers other units in every batch
# goes by guesses then.
_MAX_LEARNT = 64


class HandedIn(NamedTuple):
    """The gradients of a place in one backward, on one rank."""

    segment: int  # segment of the last gradient, counted from 0
    number: int


class Schedule:
    """Schedule of one model. Places number its trained sub-buffers."""

    def __init__(self, num_indices: int, guess: GuessedOrder | None = None) -> None:
        """`guess` is for what is on no list; None: it is averaged at the end."""
        self._num_indices, self._guess = num_indices, guess
        self._lists: dict[int, tuple[int, ...]] = {}  # segment's key -> places in order
        self._num_expected = [
            0
        ] * num_indices  # gradients; reentrant checkpointing makes them more than parameters
        self._at_end: set[int] = set()
        self._guessed: list[int] = []  # places of this backward that were due by a guess
        self._untold: set[int] = set()  # the same, of all backwards since the ranks told each other
        self._guessed_early: set[int] = set()  # places that got gradients after a guess
        self._num_learnt = 0
        self.is_guess = False  # what is due in this segment is due by a guess
        self._is_outdated = False  # the same on all ranks
        self.is_behind = False  # this rank has gradients of a place that is on no list and could be
        self.begin()

    def begin(self) -> None:
        """A backward begins."""
        self._path = [_START]  # keys of segments
        # Per index: number, segment and turn of the gradients that were handed in.
        self._numbers = [0] * self._num_indices
        self._segments = [0] * self._num_indices  # segment of the last gradient
        self._turns = [0] * self._num_indices  # place of the last gradient among all, counted from 1
        self._num_handed_in = 0
        self._is_new = False  # some segment was
        self._asked = [False] * self._num_indices
        self._guessed = []
        self._last: int | None = None  # place of the last gradient
        if self._guess is not None:
            self._guess.begin()
        self._enter_segment()

    def _enter_segment(self) -> None:
        due: Sequence[int] | None = self._lists.get(self._path[-1])
        self.is_guess = due is None
        if due is None:
            self._is_new = True
            due = self._guess_due()
        self._due = [index for index in reversed(due) if not self._asked[index]]

    def _guess_due(self) -> list[int]:
        if self._guess is None:
            return []
        no_guess = self._at_end | self._guessed_early
        left = self._guess.take_left()
        due = [index for index in left if not (self._asked[index] or index in no_guess)]
        self._guessed += due
        self._untold.update(due)
        return due

    def hand_in(self, index: int) -> None:
        """Note that autograd has finished one gradient of the place `index`."""
        self._last = index
        self._num_handed_in += 1
        self._turns[index] = self._num_handed_in
        self._numbers[index] += 1
        self._segments[index] = len(self._path) - 1

    def has_all(self, index: int) -> bool:
        """Whether as many gradients are there as were seen before; where the place is due by a guess, whether
        the backward has come to another one, and the guess is not for the next gather.
        """
        if self.is_guess:
            return self._guess is not None and not self._guess.only_at_gathers and self._last != index
        return self._numbers[index] >= self._num_expected[index]

    def was_asked(self, index: int) -> bool:
        """True if this rank has asked for the place in this backward."""
        return self._asked[index]

    @property
    def next_due(self) -> int | None:
        """The place that is asked for next in this segment, once it is finished."""
        return self._due[-1] if self._due else None

    def take_due(self) -> int:
        """Return the place that is due; it is asked for now."""
        index = self._due.pop()
        self._asked[index] = True
        return index

    def pass_gather(self, what: str) -> None:
        """This is about to be gathered; nothing is due any more."""
        self._path.append(crc32(what.encode(), self._path[-1] + 1))
        if self._guess is not None:
            self._guess.pass_gather(what)
        self._enter_segment()

    def take_rest(self) -> tuple[int, ...]:
        """Return the places that are on no list; they are asked for now, at the end."""
        rest = tuple(index for index in reversed(range(self._num_indices)) if not self._asked[index])
        self._asked = [True] * self._num_indices
        return rest

    # ---- between backwards

    @property
    def is_to_learn(self) -> bool:
        """Whether the ranks should tell each other what they saw in this backward; the same on all ranks."""
        return (self._is_new or self._is_outdated) and self._num_learnt < _MAX_LEARNT

    @property
    def seen(self) -> dict[int, HandedIn]:
        """Gradients that this rank saw, by index, in the order of the last ones."""
        handed_in = sorted((turn, index) for index, turn in enumerate(self._turns) if turn)
        return {index: HandedIn(self._segments[index], self._numbers[index]) for _, index in handed_in}

    def late_guesses(self, late: Iterable[int]) -> list[int]:
        """Return which of the `late` places got gradients in this backward after a guess."""
        return [index for index in late if index in self._guessed]

    def learn(
        self, seen: Sequence[dict[int, HandedIn]], rest: Iterable[int], late_guesses: Iterable[int]
    ) -> None:
        """Put on a list what was averaged at the end or by a guess; `seen` and `late_guesses` are
        every rank's.
        """
        self._num_learnt += 1
        self._guessed_early.update(late_guesses)
        self._untold.clear()
        rest = (*self._guessed, *rest)
        for index, last in (item for one in seen for item in one.items()):
            self._num_expected[index] = max(last.number, self._num_expected[index])
        in_order = [*seen[0], *(index for index in rest if index not in seen[0])]
        wanted = set(rest) - self._at_end
        added: dict[int, list[int]] = {key: [] for key in self._path}
        for index in in_order:
            segments = [one[index].segment for one in seen if index in one]
            if index in wanted and segments:
                added[self._key(max(segments))].append(index)
        for key, indices in added.items():
            self._lists[key] = (*self._lists.get(key, ()), *indices)
        self._is_outdated = self._is_outdated and not any(added.values())

    def _key(self, segment: int) -> int:
        """Return the key of this segment, or of the next new one if an old one's list has been right
        for another backward.
        """
        later = self._path[segment:]
        return next((key for key in later if key not in self._lists), later[0])

    def note_missed(self, rest: Iterable[int]) -> None:
        """Note a backward that taught nothing: of the gradients averaged at its end,
        some may have a better place.
        """
        is_missed = any(self._numbers[index] and index not in self._at_end for index in rest)
        self.is_behind = self.is_behind or (is_missed and self._num_learnt < _MAX_LEARNT)

    def note_outdated(self, late: Iterable[int]) -> None:
        """Some rank was behind, or got gradients of these places after they were averaged."""
        self._is_outdated, self.is_behind = True, False
        late = set(late)
        self._guessed_early |= late & self._untold
        self._at_end |= late - self._untold
        self._untold.clear()
        self._lists = {
            key: tuple(index for index in indices if index not in self._at_end)
            for key, indices in self._lists.items()
        }
