"""Inputs of checkpointed functions, which wait in host memory for the backward.

[Note: when an input moves]
The newest checkpoint's inputs stay on the device, for the backward begins with them. They leave when the next
checkpoint begins, in a stream of their own, and their memory is free when the copy is done. Compute waits for
a copy only if it is _MAX_LEAVING checkpoints behind, so that memory has a bound. In the backward the first
use of a checkpoint's inputs begins to bring back those of the checkpoint before it, so that this copy runs
beside one layer's backward. On a CPU the copies are made in place of these streams.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from ..offload.device_copies import Arrival
from ..strided import is_strided
from ..zero.access.saved_hooks import top_hooks

_CHECKPOINTS = "torch.utils.checkpoint"
# Modules whose functions run between checkpoint() and the hook: autograd's, and ours.
_BETWEEN = ("torch.autograd.function", __name__.removesuffix("activation.host_inputs"))
_MAX_LEAVING = 2  # checkpoints whose inputs may be on their way to host memory
_MAX_KNOWN = 64  # inputs, before those that have ended are forgotten


class HostCopy:
    """The values of one input in host memory, pinned where its device is a GPU."""

    __slots__ = (
        "__weakref__",
        "_arrival",
        "_back",
        "_coming",
        "_device",
        "_is_changed",
        "_size",
        "_stride",
        "_values",
        "_version",
    )

    def __init__(self, tensor: Tensor, *, version: int, is_pinned: bool) -> None:
        """Begin to copy; the tensor had `version` when it was saved."""
        self._device, self._size, self._stride = tensor.device, tensor.size(), tensor.stride()
        self._version, self._is_changed = version, False
        source = _without_repeats(tensor)
        # torch's pinned memory, though it rounds up to a power of two: the lengths of inputs vary with the
        # texts of each micro batch, and offload/pinned_memory.py would page-lock memory anew for each
        # length.
        self._values = torch.empty_like(source, device="cpu", pin_memory=is_pinned and source.is_cuda)
        self._coming: _Coming | None = None
        self._back: tuple[TensorWeakRef, int] | None = None  # an earlier result, and its version then
        self._arrival = Arrival(source, self._values, then=_noting(weakref.ref(self), source))

    def begin_back(self) -> None:
        """Begin to copy to the device, unless that is under way or its result is in use."""
        if self._coming is None:
            back = self._brought()
            self._coming = self._begin() if back is None else _Coming(back, None)

    def read(self) -> Tensor:
        """Return the input on its device; what is queued there from now on comes after the copy.

        Errors: RuntimeError if the input was changed in place before it was copied
        """
        if self._is_changed:
            raise _changed()
        self.begin_back()
        coming, self._coming = self._coming, None
        tensor = coming.take()  # type: ignore[union-attr]
        self._back = TensorWeakRef(tensor), tensor._version
        return tensor

    def release(self) -> None:
        """Hold the tensor on the device no longer; what is queued there from now on comes after the copy."""
        self._arrival.release()

    def note_source(self, source: Tensor) -> None:
        """Note that the copy is done, and whether its source was changed before."""
        self._is_changed = source._version != self._version

    def _brought(self) -> Tensor | None:
        """Return what an earlier read returned, if it is still there as it was."""
        if self._back is None:
            return None
        of, version = self._back
        back: Tensor | None = of()
        return back if back is not None and back._version == version else None

    def _begin(self) -> _Coming:
        values = self._values
        if any(stride == 0 < size - 1 for size, stride in zip(self._size, self._stride, strict=True)):
            target = torch.empty_like(values, device=self._device)
        else:
            target = torch.empty_strided(self._size, self._stride, dtype=values.dtype, device=self._device)
        return _Coming(target.expand(self._size), Arrival(values, target))


class _Coming:
    """A tensor that is on its way to the device. Its memory is given back after the copy only."""

    __slots__ = ("_arrival", "_stream", "_tensor")

    def __init__(self, tensor: Tensor, arrival: Arrival | None) -> None:
        self._tensor, self._arrival = tensor, arrival
        self._stream = torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None

    def take(self) -> Tensor:
        if self._arrival is not None:
            self._arrival.wait_on_device()
            self._arrival = None
        return self._tensor

    def __del__(self) -> None:
        if self._arrival is not None and self._stream is not None and not sys.is_finalizing():
            with torch.cuda.stream(self._stream):
                self._arrival.wait_on_device()


class _Input:
    """One input: on its device until other checkpoints have come, then in host memory."""

    __slots__ = ("__weakref__", "_is_pinned", "_kept", "_version", "copy")

    def __init__(self, tensor: Tensor, *, is_pinned: bool) -> None:
        self._kept: Tensor | None = tensor.detach()
        self._version, self._is_pinned = tensor._version, is_pinned
        self.copy: HostCopy | None = None

    def is_of(self, tensor: Tensor) -> bool:
        """Whether it still has the values of the tensor that it was made of."""
        return tensor._version == self._version

    def send(self) -> HostCopy | None:
        """Begin to copy it to host memory, and return the copy; None if it has one, or was changed."""
        if self._kept is None or self._kept._version != self._version:
            return None
        self.copy = HostCopy(self._kept, version=self._version, is_pinned=self._is_pinned)
        self._kept = None
        return self.copy

    def read(self) -> Tensor:
        """Errors: RuntimeError as of HostCopy"""
        if self.copy is not None:
            return self.copy.read()
        kept = self._kept
        if kept is None or kept._version != self._version:
            raise _changed()
        return kept


class _Group:
    """Inputs that one checkpoint keeps, and the group before it."""

    __slots__ = ("__weakref__", "earlier", "inputs", "number")

    def __init__(self, number: int, earlier: _Group | None) -> None:
        self.number = number
        self.earlier = None if earlier is None else weakref.ref(earlier)
        self.inputs: list[weakref.ref[_Input]] = []

    def begin_back(self, first: int = 0) -> None:
        """Begin to copy the inputs from the one at `first` on to the device."""
        for one in (of() for of in self.inputs[first:]):
            if one is not None and one.copy is not None:
                one.copy.begin_back()


class _Saved(NamedTuple):
    """Record that autograd saves in place of an input."""

    input: _Input
    group: _Group
    place: int  # in the group


class _Below(NamedTuple):
    """A saved tensor in the form of the hooks below."""

    value: Any


class HostInputs:
    """Inputs of one thread's checkpoints.

    `keep_last`: so many of the newest checkpoints, or inputs of one checkpoint, stay on the device.
    """

    def __init__(self, *, keep_last: int = 1, is_pinned: bool = True) -> None:
        self._keep_last, self._is_pinned = keep_last, is_pinned
        self._group: _Group | None = None
        self._newest: deque[weakref.ref[_Group]] = deque()
        self._leaving: deque[list[weakref.ref[HostCopy]]] = deque()
        # The input that was made of a tensor which may still be there.
        self._known: dict[int, tuple[TensorWeakRef, weakref.ref[_Input]]] = {}
        self.num_taken = self.num_sent = 0  # inputs: all, and those that left their device

    def begin_forward(self) -> None:
        """Forget the order so far: the backward of the forward that begins now does not lead to it."""
        self._group = None
        self._known.clear()

    def pack(self, tensor: Tensor) -> Any:
        """Return what autograd is to save: the tensor itself where it is not floating point, or cannot be
        copied and be the same again.
        """
        with torch._C.DisableTorchFunctionSubclass():  # a class may refuse to be copied
            if not is_strided(tensor) or not tensor.is_floating_point() or _overlaps(tensor):
                return tensor
            number = torch._C._autograd._get_sequence_nr()
            group = self._group
            if group is None or group.number != number:
                group = self._begin_group(_Group(number, group))
            one = self._input_of(tensor)
            group.inputs.append(weakref.ref(one))
            self.num_taken += 1
            if not self._keep_last:
                self._send(group)
            return _Saved(one, group, len(group.inputs) - 1)

    def unpack(self, saved: Any) -> Tensor:
        """Return the tensor of which `pack` made this."""
        if type(saved) is not _Saved:
            return saved  # type: ignore[no-any-return]
        one, group, place = saved
        self._let_leave(0)  # so that copies to the device come after those to the host
        group.begin_back(place)
        tensor = one.read()
        earlier = None if group.earlier is None else group.earlier()
        if earlier is not None:
            earlier.begin_back()
        return tensor

    def hooks(self, takes: Callable[[Tensor], bool]) -> AbstractContextManager[object]:
        """Return a context in which autograd saves in this way what `takes` says; all else is left to the
        hooks that are set now.
        """
        below = top_hooks()

        def pack(tensor: Tensor) -> Any:
            saved = self.pack(tensor) if takes(tensor) else tensor
            if type(saved) is _Saved:
                return saved
            if below is not None:
                return _Below(below[0](tensor))
            # An output of the operation that saves it would keep this operation, and so itself, for ever.
            return tensor if type(tensor) is not Tensor or tensor.is_leaf else tensor.detach()

        def unpack(saved: Any) -> Tensor:
            if type(saved) is _Below and below is not None:
                return below[1](saved.value)
            return self.unpack(saved)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def _begin_group(self, group: _Group) -> _Group:
        self._group = group
        if self._keep_last:
            while len(self._newest) >= self._keep_last:
                self._send(self._newest.popleft()())
            self._newest.append(weakref.ref(group))
        return group

    def _send(self, group: _Group | None) -> None:
        if group is None:
            return
        copies = [
            copy for of in group.inputs if (one := of()) is not None and (copy := one.send()) is not None
        ]
        self.num_sent += len(copies)
        self._leaving.append([weakref.ref(copy) for copy in copies])
        self._let_leave(_MAX_LEAVING)

    def _let_leave(self, at_most: int) -> None:
        """Hold the inputs of so many checkpoints that are on their way to host memory, and no more."""
        while len(self._leaving) > at_most:
            for copy in (of() for of in self._leaving.popleft()):
                if copy is not None:
                    copy.release()

    def _input_of(self, tensor: Tensor) -> _Input:
        """Return a new input, or the one that an earlier checkpoint made of this very tensor."""
        known = self._known.get(id(tensor))
        if known is not None and known[0]() is tensor:
            one = known[1]()
            if one is not None and one.is_of(tensor):
                return one
        if len(self._known) >= _MAX_KNOWN:
            self._known = {key: known for key, known in self._known.items() if known[1]() is not None}
        one = _Input(tensor, is_pinned=self._is_pinned)
        self._known[id(tensor)] = TensorWeakRef(tensor), weakref.ref(one)
        return one


def _noting(of: weakref.ref[HostCopy], source: Tensor) -> Callable[[], None]:
    def note() -> None:
        copy = of()
        if copy is not None:
            copy.note_source(source)

    return note


def _without_repeats(tensor: Tensor) -> Tensor:
    """Return the part of an expanded tensor that is in memory."""
    for dim, (size, stride) in enumerate(zip(tensor.size(), tensor.stride(), strict=True)):
        if size > 1 and stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _overlaps(tensor: Tensor) -> bool:
    """Whether two elements may lie in the same memory, in another way than those of an expanded tensor."""
    steps = sorted(
        (stride, size)
        for size, stride in zip(tensor.size(), tensor.stride(), strict=True)
        if size > 1 and stride != 0
    )
    extent = 1
    for stride, size in steps:
        if stride < extent:
            return True
        extent += stride * (size - 1)
    return False


def is_of_torchs_checkpoint(tensor: Tensor) -> bool:
    """Return whether it is torch's checkpoint() that saves the tensor now, and not a parameter or buffer: of
    the function inside its own hooks take what is saved.
    """
    if isinstance(tensor, nn.Parameter | nn.Buffer):
        return False
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_BETWEEN):
        frame = frame.f_back
    return frame.f_globals.get("__name__") == _CHECKPOINTS


def _changed() -> RuntimeError:
    return RuntimeError(
        "an input of a checkpointed function was changed in place after the function had got it, so the "
        "backward cannot compute the function again (without cpu_checkpointing torch says the same); "
        "write x = x + y in place of x += y, or give the function a copy"
    )
