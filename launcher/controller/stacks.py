"""The present stacks of all ranks: one question to all hosts, one answer from each rank, and equal answers
shown once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from ..inputs.rank_set import format_ranks
from ..wire.frames import Stacks

TIMEOUT_S = 20.0  # for the answers of all hosts; py-spy on a host takes longest
STOPPED = "stopped"  # a state, as `node/workers/stack_dump.py` calls it
MAX_NAMED = 8  # ranks with equal stacks that are named one by one, with their places
_THREAD = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+", re.MULTILINE)


class Block(NamedTuple):
    """A sentence, and the lines that stand below it."""

    title: str
    lines: tuple[str, ...] = ()


class StackWatch:
    """The question for stacks: its time, the asked ranks, their answers. Times are monotonic."""

    def __init__(
        self, silence_limit_s: float | None, *, place_of: Callable[[int], str] = lambda rank: ""
    ) -> None:
        """The limit is that of --stack_on_hang; None or 0 means not to ask because of silence. `place_of`
        returns the known place of a rank along the job's axes; the rank's own answer goes before it.
        """
        self._limit_s, self._place_of = silence_limit_s, place_of
        self.last_output_at = 0.0  # output of any rank; set by the threads that read
        # Time of the last output before the silence for which we asked
        self._asked_after: float | None = None
        self._why = ""
        self._processes: dict[int, str] = {}  # processes of the asked ranks
        self._answers: dict[int, Stacks] = {}
        self._until = 0.0

    def silence_to_ask_about(self, now: float, *, started_at: float) -> float:
        """Return the seconds without output if that is too long, once for each silence; else 0."""
        last_at = self.last_output_at
        silent_s = now - max(last_at, started_at)
        if not self._limit_s or silent_s <= self._limit_s or self._asked_after == last_at:
            return 0.0
        self._asked_after = last_at
        return silent_s

    def ask(self, why: str, processes: dict[int, str], *, now: float) -> bool:
        """Note the ranks to ask, with `HOST, pid`; False if there are none, or answers are on their way."""
        if not processes or self._processes:
            return False
        self._why, self._processes, self._answers, self._until = why, processes, {}, now + TIMEOUT_S
        return True

    @property
    def is_asked(self) -> bool:
        """Tell whether answers are on their way, or wait to be shown."""
        return bool(self._processes)

    @property
    def stopped(self) -> set[int]:
        """Ranks that the kernel had stopped, as the last answers say."""
        return {rank for rank, answer in self._answers.items() if answer.state == STOPPED}

    def take(self, answer: Stacks) -> None:
        if answer.rank in self._processes:
            self._answers[answer.rank] = answer

    def blocks(self, now: float, *, ended: set[int]) -> list[Block]:
        """Return the blocks to show once all possible answers are there or the time is up, which ends the
        question; before that none.
        """
        if not self._processes or (
            self._processes.keys() - self._answers.keys() - ended and now < self._until
        ):
            return []
        blocks = self._all_blocks()
        self._processes = {}
        return blocks

    def _all_blocks(self) -> list[Block]:
        """Return first the ranks without a stack, then each different stack with its ranks."""
        num = len(self._processes)
        who = f"{num} ranks do" if num > 1 else "the one rank does"
        blocks = [Block(f"{self._why}: what {who}")]
        silent = self._processes.keys() - self._answers.keys()
        if silent:
            blocks.append(Block(f"{self._named(silent)} did not answer: ended, or the host is busy"))
        groups: dict[str, list[int]] = {}
        for rank, answer in sorted(self._answers.items()):
            if answer.text:
                text = _THREAD.sub(r"\1", answer.text).rstrip("\n")
                groups.setdefault(text, []).append(rank)
            else:
                blocks.append(Block(f"{self._alone(rank)} has no stack: {answer.problem}"))
        for text, ranks in groups.items():
            state = " or ".join(sorted({self._answers[rank].state for rank in ranks}))
            who = self._alone(ranks[0]) if len(ranks) == 1 else self._named(ranks)
            blocks.append(Block(f"{who}, {state}:", tuple(text.split("\n"))))
        return blocks

    def _place(self, rank: int) -> str:
        answer = self._answers.get(rank)
        return (answer and answer.place) or self._place_of(rank)

    def _alone(self, rank: int) -> str:
        place = self._place(rank)
        return f"rank {rank} ({f'{place}; ' if place else ''}{self._processes[rank]})"

    def _named(self, ranks: Iterable[int]) -> str:
        """Name each rank with its place; of many, the part that all places have in common."""
        numbers = sorted(ranks)
        places = [self._place(rank) for rank in numbers]
        if all(places) and len(numbers) <= MAX_NAMED:
            return ", ".join(f"rank {rank} ({place})" for rank, place in zip(numbers, places, strict=True))
        parts = [place.split(", ") for place in places]
        common = ", ".join(part for part in parts[0] if part and all(part in one for one in parts))
        what = f"rank{'s' if len(numbers) > 1 else ''} {format_ranks(numbers)}"
        return f"{what} ({common})" if common else what
