"""Limits of the sections of a training: how long a job may stand still in each.

A job stands still while no step ends, no section begins or ends, and no forward of an evaluation is told. A
limit is given, or learned: ten times the longest standstill so far in that section, of this job and of the
same program before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..options.hang_limit import SECTIONS, STEP, GivenLimits
from ..wording import count

FACTOR = 10
MIN_STEPS = 10  # the first steps compile, allocate and connect, and are no measure yet
# Seconds that a learned limit has at least: a program may do something long for the first time, such as an
# evaluation by one rank, for which the others wait.
SHORTEST_S = 600.0


class SectionLimit(NamedTuple):
    """`reason` says where it comes from. One that is learned counts only where a rank waits for others: a
    program may do anything else for as long as it likes.
    """

    seconds: float
    reason: str
    is_learned: bool = False


class SectionLimits:
    """The limits of one job, with all its attempts."""

    def __init__(self, given: GivenLimits, known: Mapping[str, float] | None = None) -> None:
        """`known` are the longest standstills of the same program before, in seconds by section."""
        self._given = given
        self._known = dict(known or {})
        self.longest: dict[str, float] = {}  # standstills of this job, in seconds by section
        self.num_steps = 0

    def note(self, section: str, seconds: float) -> None:
        """Note a standstill that has ended."""
        self.num_steps += section == STEP
        self.longest[section] = max(seconds, self.longest.get(section, 0.0))

    def limit_of(self, section: str) -> SectionLimit | None:
        """Return the limit of a section; None if there is none, or nothing to learn it from yet."""
        given = self._given.seconds.get(section)
        if given is not None:
            return SectionLimit(given, "as --hang_limit says") if given else None
        if not self._given.learns:
            return None
        is_new = section == STEP and self.num_steps < MIN_STEPS
        own = 0.0 if is_new else self.longest.get(section, 0.0)
        longest = max(own, self._known.get(section, 0.0))
        if not longest:
            return None
        seconds = max(FACTOR * longest, SHORTEST_S)
        seen = f"of {count(self.num_steps, 'step')}" if section == STEP and own == longest else "so far"
        reason = f"{FACTOR} times the longest {seen}, {longest:.3g} s"
        if seconds > FACTOR * longest:
            reason = f"the shortest that is learned; the longest {seen} took {longest:.3g} s"
        more = f"--hang_limit {section}=S allows more or less"
        return SectionLimit(seconds, f"{reason}; {more}", is_learned=True)

    @property
    def all(self) -> dict[str, float]:
        """Return the seconds of the limits that there are now, by section."""
        found = {section: self.limit_of(section) for section in SECTIONS}
        return {section: round(one.seconds, 1) for section, one in found.items() if one is not None}

    @property
    def learned(self) -> dict[str, float]:
        """Return what a later job may know: the longest standstills, of earlier ones too."""
        own = {name: s for name, s in self.longest.items() if name != STEP or self.num_steps >= MIN_STEPS}
        return {name: max(own.get(name, 0.0), self._known.get(name, 0.0)) for name in {**self._known, **own}}
