"""What comes from another stage, seen from who receives it."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dslaunch.runtime.comm.mesh import Axis
from dslaunch.runtime.comm.wire import Wire
from dslaunch.runtime.pipeline.messages import Contents, Described, Post
from dslaunch.runtime.pipeline.neighbours import Neighbour

CONTENTS = Contents(is_tuple=False, tensors=(Described((2, 3), torch.float32, wants_grad=True),))


class Work:
    """A message whose wait shows what is under way meanwhile."""

    def __init__(self, wire: Wire, seen: list[list[str]]) -> None:
        self.wire, self.seen = wire, seen

    def wait(self) -> None:
        self.seen.append([str(flight.label) for flight in self.wire.recorder.under_way()])

    def is_completed(self) -> bool:
        return False


@pytest.mark.parametrize("known", [None, CONTENTS])
def test_a_message_is_under_way_until_its_tensors_are_there(
    monkeypatch: pytest.MonkeyPatch, known: Contents | None
) -> None:
    """Also one of which the contents are told first: they are there long before the tensors."""
    wire, seen = Wire(), cast(list[list[str]], [])
    header = CONTENTS.to_bytes()
    answers: Iterator[bytes] = iter([struct.pack("=q", len(header)), header] if known is None else [])

    def receive(into: Tensor, **_: Any) -> Work:
        told = next(answers, None)
        if told is not None:
            into.copy_(torch.frombuffer(bytearray(told), dtype=torch.uint8))
        return Work(wire, seen)

    monkeypatch.setattr(dist, "irecv", receive)
    axis = Axis(size=2, index=1, group=None)
    post = Post({0: Neighbour(axis, axis)}, wire, torch.device("cpu"), place=1, ranks=(0, 1))
    arrival = post.receive(0, known, what="activations of micro batch 0")
    assert arrival.contents == CONTENTS
    arrival.wait()
    assert seen == [["receive of activations of micro batch 0"]] * (3 if known is None else 1)
