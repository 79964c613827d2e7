"""Numbers as little pictures: bars, parts of a whole, and lines over time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ..run_state.metric_table import OTHER, OTHER_LETTER, PHASES
from ..run_state.step_times import StepTimes
from .spans import Line, StyledText, line


class Glyphs(NamedTuple):
    """The signs of bars: `rising` from nothing to a full cell, upwards; `growing` to the right."""

    rising: str
    growing: str
    rest: str  # the rest of a bar


BLOCKS = Glyphs(" ▁▂▃▄▅▆▇█", " ▏▎▍▌▋▊▉█", "░")
ASCII = Glyphs(" ._-=+*#", " -#", ".")  # where a terminal or a file has no others
LETTERS = {**{name: one.letter for name, one in PHASES.items()}, OTHER: OTHER_LETTER}


def bar(share: float, width: int, glyphs: Glyphs) -> str:
    """Draw a part of a whole, 0 to 1, in so many columns."""
    per_cell = len(glyphs.growing) - 1
    eighths = round(min(1.0, max(0.0, share)) * width * per_cell)
    full, part = divmod(eighths, per_cell)
    text = glyphs.growing[-1] * full + (glyphs.growing[part] if part else "")
    return text + glyphs.rest * (width - len(text))


def step_bar(times: StepTimes, width: int) -> Line:
    """Draw the phases of a step, each as long as its part, by its letter."""
    shares = [times.share(one) for one in LETTERS]
    total = sum(shares) or 1.0
    exact = [share / total * width for share in shares]
    cells = [int(one) for one in exact]
    by_rest = sorted(range(len(cells)), key=lambda place: cells[place] - exact[place])
    for place in by_rest[: width - sum(cells)]:
        cells[place] += 1
    return line(*(StyledText(LETTERS[one] * count, one) for one, count in zip(LETTERS, cells, strict=True)))


def spark(values: Sequence[float], width: int, height: int, glyphs: Glyphs, *, low: float) -> list[str]:
    """Draw values in equal distances as a line of `height` rows, `low` at the bottom and the highest at the
    top; a value that is no finite number is a gap.
    """
    columns = _resampled(values, width)
    known = [one for one in columns if math.isfinite(one)]
    if not known:
        return [" " * width] * height
    high = max(known)
    steps = len(glyphs.rising) - 1
    rows = []
    for row in range(height):  # from the top
        base = (height - 1 - row) * steps
        rows.append("".join(_cell(one, low, high, height * steps, base, glyphs) for one in columns))
    return rows


def _cell(value: float, low: float, high: float, levels: int, base: int, glyphs: Glyphs) -> str:
    if not math.isfinite(value):
        return " "
    share = (value - low) / (high - low) if high > low else 0.5 if value else 0.0
    level = 1 + round(share * (levels - 1)) - base
    return glyphs.rising[min(len(glyphs.rising) - 1, max(0, level))]


def _resampled(values: Sequence[float], width: int) -> list[float]:
    """Return one value for each column: the mean of those that fall there; the newest is at the right."""
    if len(values) <= width:
        return [math.nan] * (width - len(values)) + list(values)
    found = []
    for column in range(width):
        part = values[column * len(values) // width : (column + 1) * len(values) // width]
        finite = [one for one in part if math.isfinite(one)]
        found.append(sum(finite) / len(finite) if finite else math.nan)
    return found
