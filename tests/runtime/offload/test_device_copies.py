"""Whose memory is held until a copy from it is there.

Copies on a GPU's stream are not tested here: these arrivals only say what theirs would.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from dslaunch.runtime.offload.device_copies import Arrival, Copier


class _Fake:
    """A copy whose end the test decides."""

    def __init__(self) -> None:
        self.is_done = False
        self.num_waits = 0

    def wait(self) -> None:
        self.is_done = True
        self.num_waits += 1


def test_the_source_of_the_newest_copy_is_held_and_older_ones_are_waited_for() -> None:
    copier = Copier(cast(Any, None))
    first, second, third = _Fake(), _Fake(), _Fake()
    copier.hold(cast(Arrival, first))
    assert first.num_waits == 0
    copier.hold(cast(Arrival, second))
    assert (first.num_waits, second.num_waits) == (1, 0)
    second.is_done = True
    copier.hold(cast(Arrival, third))
    assert (second.num_waits, third.num_waits) == (1, 0)


def test_on_a_cpu_a_copy_is_there_at_once_and_its_source_is_free() -> None:
    freed: list[bool] = []
    target = torch.zeros(3)
    arrival = Arrival(torch.ones(3), target, then=lambda: freed.append(True))
    assert arrival.is_done
    arrival.wait()
    assert freed == [True]
    assert torch.equal(target, torch.ones(3))
