"""Frames behind the handshake: only what the other side sent next is taken."""

from __future__ import annotations

import pytest

from dslaunch.launcher.rendezvous.seal import Seal
from dslaunch.launcher.wire.frames import ProtocolError
from tests.launcher.rendezvous.identity import IDENTITY, PROVEN


def test_frames_in_their_order_are_opened_and_no_others() -> None:
    here = Seal(b"key")
    first, second, third = (here.close(one) for one in (b"a", b"b", b"b"))
    assert len({first, second, third}) == 3
    there = Seal(b"key")
    assert (there.open(first), there.open(second)) == (b"a", b"b")
    for wrong in (first, second, third + b"x", third[:-1], b"b", b"", Seal(b"other").close(b"b")):
        late = Seal(b"key")
        late.open(first), late.open(second)
        with pytest.raises(ProtocolError):
            late.open(wrong)


def test_each_direction_and_each_connection_has_a_key_of_its_own() -> None:
    seals = [PROVEN.seals("one"), PROVEN.seals("another")]
    assert len({one.close(b"x") for both in seals if both is not None for one in both}) == 4
    assert IDENTITY.seals("one") is None
