"""Things that all attempts of a job share, in the launcher's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ..job.section_limits import SectionLimits

if TYPE_CHECKING:  # it takes 10 ms, and the first hosts are being connected meanwhile
    from .kept_agents import KeptAgents


class Lasting(NamedTuple):
    """`kept` has agents of the attempt before, and gets those that the next one can have; None: agents end
    with each attempt. `limits`: None if a job that hangs is left alone.
    """

    kept: KeptAgents | None = None
    limits: SectionLimits | None = None
