"""Collectives over gloo that send each chunk of a buffer from the rank that has it to the rank that needs it.

gloo's own all_gather puts the chunks together in a buffer of its own first: as much memory once more, in the
thread that works for the group, and twice the time. What is received here lies in its place at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from .mesh import Axis
from .messages import Messages

# Bits of an int of 32 bits; the lower ones are left to programs. A tag tells kind, number and size of a
# message: gloo ends the process where one of another size arrives. A message that has no receiver stays where
# it is, and the watchdog finds ranks that do not send each other the same.
_FIRST_TAG, _NUM_KINDS, _NUM_TAGS, _NUM_SIZES = 2**30, 2**4, 2**12, 2**14
# group -> number of messages of each kind so far
_counts: WeakKeyDictionary[Any, Counter[int]] = WeakKeyDictionary()


class Scratch:
    """Host memory that is used again: as many buffers as were in use at one time, each as large as the
    largest use of it.

    To free and to allocate a buffer anew leaves holes in glibc's heap that the next one does not fit into.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []  # [bytes] uint8

    def take(self, numel: int, like: Tensor) -> Tensor:
        """Return a flat buffer of that dtype, with any values."""
        nbytes = numel * like.itemsize
        self._free.sort(key=Tensor.numel)
        fitting = (place for place, one in enumerate(self._free) if one.numel() >= nbytes)
        place = next(fitting, len(self._free) - 1)
        buffer = self._free.pop(place) if self._free else None
        if buffer is None or buffer.numel() < nbytes:
            del buffer  # free it before there is a larger one
            buffer = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return buffer[:nbytes].view(like.dtype)

    def give_back(self, taken: Tensor) -> None:
        """Let `taken` be used again."""
        storage = taken.untyped_storage()
        self._free.append(torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage))

    def forget(self) -> None:
        """Free the buffers that are not in use."""
        self._free.clear()


def send_to_all(own: Tensor, flat: Tensor, axis: Axis, *, lane: int) -> Messages:
    """Begin to fill `flat` with the `own` chunk of every rank, in order.

    Order: the ranks of a group do what they do in one lane in the same order
    """
    chunks = flat.chunk(axis.size)
    if chunks[axis.index].data_ptr() != own.data_ptr():
        chunks[axis.index].copy_(own)
    received = [(place, chunk) for place, chunk in enumerate(chunks) if place != axis.index]
    return _start(lambda place: own, received, axis, tag=_next_tag(axis, 2 * lane, flat.nbytes))


def send_chunks(flat: Tensor, received: Tensor, axis: Axis, *, lane: int) -> Messages:
    """Begin to send chunk i of `flat` to rank i, and to fill `received` with what the others send here, in
    order.

    Order:  as send_to_all
    Shapes: flat [n], received [n / N (N - 1)] for N ranks
    """
    chunks, places = flat.chunk(axis.size), [place for place in range(axis.size) if place != axis.index]
    into = list(zip(places, received.chunk(axis.size - 1), strict=True))
    return _start(lambda place: chunks[place], into, axis, tag=_next_tag(axis, 2 * lane + 1, flat.nbytes))


def _next_tag(axis: Axis, kind: int, nbytes: int) -> int:
    """Return what tells these messages from others that are under way in the group, on all ranks alike.

    Ranks of one group may have other models, and so have done other things in other groups meanwhile.
    """
    counts = _counts.setdefault(axis.group or dist.group.WORLD, Counter())
    counts[kind] += 1
    number = counts[kind] % _NUM_TAGS
    size = crc32(str(nbytes).encode()) % _NUM_SIZES
    return _FIRST_TAG + (size * _NUM_TAGS + number) * _NUM_KINDS + kind


def _start(
    sent: Callable[[int], Tensor], received: Sequence[tuple[int, Tensor]], axis: Axis, *, tag: int
) -> Messages:
    """Start the sends; each rank begins with the next one, so that not all send to the same one first."""
    turned = sorted(received, key=lambda one: (axis.index - one[0]) % axis.size)
    group = axis.group
    receives = [
        partial(dist.irecv, _raw(into), group=group, group_src=place, tag=tag) for place, into in turned
    ]
    sends = [
        partial(dist.isend, _raw(sent(place)), group=group, group_dst=place, tag=tag)
        for place, _ in reversed(turned)
    ]
    return Messages([*receives, *sends], tells_its_end=False)


def _raw(tensor: Tensor) -> Tensor:
    """Return the tensor's bytes: gloo knows fewer types than torch."""
    return tensor.detach().view(torch.uint8)
