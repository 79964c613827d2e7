"""Lengths of samples: what a data loader pads micro batches to, how often the longest is among them, and what
that says of a plan. Reading, then arithmetic only.

A file has one length a line, or a length and how many samples have it; or it is a JSON list of lengths.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import LaunchError
from ..inputs.named_file import read_named
from .verdict import gib

_MOST = 10**9  # tokens of a sample, and samples of a length
_FORM = "write one length a line, or a length and a number of samples, such as 512 1200"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """The number of samples of each length, the shortest first."""

    counts: tuple[tuple[int, int], ...]

    @property
    def num_samples(self) -> int:
        """Return the number of all samples."""
        return sum(number for _, number in self.counts)

    @property
    def longest(self) -> int:
        """Return the most tokens of a sample."""
        return self.counts[-1][0]

    def cut(self, most: int) -> Lengths:
        """Return the lengths of samples that are cut to so many tokens."""
        found: Counter[int] = Counter()
        for length, number in self.counts:
            found[min(length, most)] += number
        return Lengths(counts=tuple(sorted(found.items())))

    def share_up_to(self, length: int) -> float:
        """Return the share of the samples that are no longer."""
        return sum(number for one, number in self.counts if one <= length) / self.num_samples

    def padded(self, micro_batch_size: int) -> float:
        """Return the mean length of micro batches of samples that are drawn at random, as padded."""
        total, below = 0.0, 0.0
        for length, number in self.counts:
            up_to = below + number / self.num_samples
            total += length * (min(1.0, up_to) ** micro_batch_size - below**micro_batch_size)
            below = min(1.0, up_to)
        return total

    def chance_of_longest(self, num_samples: int) -> float:
        """Return how probably one of so many samples is of the longest."""
        return 1.0 - (1.0 - self.counts[-1][1] / self.num_samples) ** num_samples


def read_lengths(path: Path) -> Lengths:
    """Return the lengths of a file.

    Errors: LaunchError for a file that cannot be read, and with the number of a line that has another form
    """
    try:
        text = read_named(path).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise LaunchError(f"--lengths={path}: it cannot be read ({why}); give a file that can") from None
    counts: Counter[int] = Counter()
    for place, words in _rows(text, path):
        numbers = [int(word) if word.isdecimal() and len(word) < 19 else 0 for word in words]
        if len(numbers) not in (1, 2) or not all(0 < one <= _MOST for one in numbers):
            raise LaunchError(f"--lengths={path}: {place}: {' '.join(words)[:40]!r} is no length; {_FORM}")
        counts[numbers[0]] += numbers[1] if len(numbers) == 2 else 1
    if not counts:
        raise LaunchError(f"--lengths={path}: it has no length; {_FORM}")
    return Lengths(counts=tuple(sorted(counts.items())))


def _rows(text: str, path: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the words of each row, with its place for messages."""
    if not text.lstrip().startswith("["):
        for number, line in enumerate(text.splitlines(), 1):
            words = line.replace(",", " ").split()
            if words:
                yield f"line {number}", words
        return
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LaunchError(f"--lengths={path}: it is not JSON ({error}); {_FORM}") from None
    for number, one in enumerate(found, 1):
        yield f"item {number}", [str(word) for word in one] if isinstance(one, list) else [str(one)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLengths:
    """A plan for micro batches of the longest samples, and one for those of the usual length.

    Units: bytes of the fullest GPU, or of a rank's host memory without GPUs; `room_bytes` None: not known
    """

    lengths: Lengths
    micro_batch_size: int
    num_samples: int  # in a step, of all ranks
    usual: int  # tokens
    usual_bytes: int
    longest_bytes: int
    room_bytes: int | None

    def notes(self) -> tuple[str, ...]:
        """Return what is said below the verdict."""
        lengths = self.lengths
        longest, share = lengths.longest, 1 - lengths.share_up_to(lengths.longest - 1)
        notes = [
            f"lengths: {lengths.num_samples:,} samples of {lengths.counts[0][0]:,} to {longest:,} tokens; "
            f"the peak is that of a micro batch with one of the longest: {_percent(share)} of the samples, "
            f"in {_percent(lengths.chance_of_longest(self.num_samples))} of the steps",
            f"lengths: times are for {self.usual:,} tokens, to which micro batches of "
            f"{self.micro_batch_size} are padded in the mean; such a one needs {gib(self.usual_bytes)}",
        ]
        room = self.room_bytes
        if room is not None and self.longest_bytes > room:
            most = self.longest_that_fits()
            if most is None:
                notes.append("lengths: micro batches of the usual length do not fit, either")
            else:
                notes.append(
                    f"lengths: up to about {most:,} tokens fit; {_percent(lengths.share_up_to(most))} of the "
                    "samples are no longer"
                )
        return tuple(notes)

    def longest_that_fits(self) -> int | None:
        """Return the tokens that should fit, by a straight line between the two plans; None: not even the
        usual.
        """
        room, slope = self.room_bytes, 0.0
        if self.lengths.longest > self.usual:
            slope = (self.longest_bytes - self.usual_bytes) / (self.lengths.longest - self.usual)
        if room is None or slope <= 0 or self.usual_bytes > room:
            return None
        return self.usual + int((room - self.usual_bytes) / slope)

    def as_data(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {
            "samples": self.lengths.num_samples,
            "longest": self.lengths.longest,
            "share_of_longest": 1 - self.lengths.share_up_to(self.lengths.longest - 1),
            "steps_with_longest": self.lengths.chance_of_longest(self.num_samples),
            "usual": self.usual,
            "usual_bytes": self.usual_bytes,
        }


def _percent(share: float) -> str:
    """Return a share in percent with two digits: "12 %", "0.034 %"."""
    return f"{100 * share:.2g} %" if share < 0.995 else f"{100 * share:.4g} %"
