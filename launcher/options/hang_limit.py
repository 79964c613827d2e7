"""The value of --hang_limit: how long a job may stand still in each section of a training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from .number import MOST_S

START, LOAD, STEP, SAVE, EVALUATION, GENERATION = SECTIONS = (
    "start",
    "load",
    "step",
    "save",
    "evaluation",
    "generation",
)


class GivenLimits(NamedTuple):
    """Limits as the user gives them. `seconds` by section, 0 for none; sections without one are learned, if
    `learns`.
    """

    seconds: Mapping[str, float]
    learns: bool


def read_limits(text: str) -> GivenLimits:
    """Read the value of --hang_limit: `off`, `learned`, or limits such as `step=60,save=600`.

    Errors: ValueError with the allowed values
    """
    if text in ("off", "learned"):
        return GivenLimits({}, learns=text == "learned")
    seconds: dict[str, float] = {}
    for word in text.split(","):
        section, is_given, value = word.partition("=")
        if section in seconds:  # else one would be dropped without a word
            raise ValueError(f"{text!r} has two limits of {section}; leave out one of them")
        try:
            seconds[section] = float(value)
        except ValueError:
            is_given = ""
        if not is_given or section not in SECTIONS or not 0 <= seconds[section] <= MOST_S:
            raise ValueError(
                f"{word!r} is no limit of a section; give off, learned, or seconds for some of "
                f"{', '.join(SECTIONS)}, such as step=60,save=600 (0: no limit; the others are learned)"
            )
    return GivenLimits(seconds, learns=True)
