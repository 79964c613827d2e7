"""Whose memory is held until a copy from it is there.

Copies on a GPU's stream are not tested here: these arrivals only say what theirs would.
"""

from __future__ import annotations

import threading
from typing import Any, cast

import torch

from dslaunch.runtime.offload.device_copies import _HELD_BYTES, Arrival, Copier


class _Fake:
    """A copy whose end the test decides."""

    def __init__(self) -> None:
        self.is_done = False
        self.num_waits = 0

    def wait(self) -> None:
        self.is_done = True
        self.num_waits += 1


def test_sources_are_held_and_the_oldest_is_waited_for_where_they_are_too_much() -> None:
    copier = Copier(cast(Any, None))
    first, second, third, fourth = (_Fake() for _ in range(4))
    copier.hold(cast(Arrival, first), _HELD_BYTES)
    copier.hold(cast(Arrival, second), 0)
    assert first.num_waits == 0
    copier.hold(cast(Arrival, third), 1)
    assert (first.num_waits, second.num_waits, third.num_waits) == (1, 0, 0)
    second.is_done = True
    copier.hold(cast(Arrival, fourth), 2 * _HELD_BYTES)  # held, though it is more by itself
    assert (second.num_waits, third.num_waits, fourth.num_waits) == (1, 1, 0)


class _Event:
    """Of a copy that ends when the test says so; how often the host asked for it."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.is_asked, self.is_asked_twice, self.has_happened = (threading.Event() for _ in range(3))

    def query(self) -> bool:
        self.num_asked += 1
        (self.is_asked if self.num_asked == 1 else self.is_asked_twice).set()
        return False

    def synchronize(self) -> None:
        self.has_happened.wait(10)


def test_of_two_threads_that_wait_for_a_copy_one_frees_its_source() -> None:
    """The thread of a step and that of a hook, whichever comes first."""
    freed: list[bool] = []
    arrival, event = Arrival(torch.ones(3), torch.zeros(3)), _Event()
    arrival._event, arrival._then = cast(Any, event), lambda: freed.append(True)
    threads = [threading.Thread(target=arrival.wait) for _ in range(2)]
    threads[0].start()
    assert event.is_asked.wait(10)
    threads[1].start()
    assert not event.is_asked_twice.wait(0.1)
    event.has_happened.set()
    for thread in threads:
        thread.join()
    assert freed == [True]


def test_on_a_cpu_a_copy_is_there_at_once_and_its_source_is_free() -> None:
    freed: list[bool] = []
    target = torch.zeros(3)
    arrival = Arrival(torch.ones(3), target, then=lambda: freed.append(True))
    assert arrival.is_done
    arrival.wait()
    assert freed == [True]
    assert torch.equal(target, torch.ones(3))
