"""Tensors without values that a program saves, pickles or copies by itself.

Their pickle has their shape instead of values, so files of torch.save() are small, and torch.load() gives
tensors without values again. A file of safetensors has its true size, and holes where values would be.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import json
import os
from collections.abc import Callable, Mapping
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.multiprocessing
from torch import Tensor, nn

from ..checkpoint.export.output import OutputFiles
from .without_values import WithoutValues

_LENGTH_BYTES = 8  # a file of safetensors begins with so many: the length of its header


class _Process:
    """State of this process that a pickle needs which is read."""

    mode: WithoutValues | None = None
    map_location: Any = None  # what the torch.load() that reads was given


def shaped_tensor(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: str, wants_grad: bool
) -> Tensor:
    """Return a tensor without values: a pickle calls this."""
    made = torch.empty_strided(shape, stride, dtype=dtype, device=_device_for(device))
    return made.requires_grad_(wants_grad)


def known_tensor(values: Tensor, device: str) -> Tensor:
    """Return a tensor with known values: a pickle calls this."""
    return values if _Process.mode is None else _Process.mode.make(values, torch.device(_device_for(device)))


def _device_for(device: str) -> Any:
    wanted = _Process.map_location
    return wanted if isinstance(wanted, (str, torch.device)) else device


def plan_saved_tensors(mode: WithoutValues, *, may_overwrite: bool) -> None:
    """Have this process save and copy tensors without values. `may_overwrite`: files that are written vanish
    with the process; else those that are there stay as they are.
    """
    _Process.mode = mode
    _Saves(mode, may_overwrite=may_overwrite).put()


class _Saves:
    """Functions of torch and safetensors for tensors, in place of theirs."""

    def __init__(self, mode: WithoutValues, *, may_overwrite: bool) -> None:
        self._mode, self._may_overwrite = mode, may_overwrite

    def put(self) -> None:
        cls: Any = Tensor
        pickled = cls.__reduce_ex__ = self._reduced(cls.__reduce_ex__)
        cls.__deepcopy__ = self._copied(cls.__deepcopy__)
        cls.share_memory_ = self._shared(cls.share_memory_)
        for kind in (Tensor, nn.Parameter):  # between processes, torch gives tensors as shared memory
            ForkingPickler.register(kind, self._sent(ForkingPickler._extra_reducers[kind], pickled))  # type: ignore[attr-defined]
        torch.serialization.add_safe_globals([shaped_tensor, known_tensor])
        names: Any = torch
        names.save = names.serialization.save = self._unless_there(torch.save, place=1, name="f")
        names.load = names.serialization.load = _loaded(torch.load)
        if importlib.util.find_spec("safetensors") is not None:
            from safetensors import torch as safetensors

            replaced: Any = safetensors
            save = self._without_values(replaced.save_file, replaced._TYPES)
            replaced.save_file = self._unless_there(save, place=1, name="filename")
            replaced.save = self._in_memory(replaced.save, replaced._TYPES)
        output: Any = OutputFiles
        output._write = lambda *_: None  # whole weights of an engine: the names and shapes alone

    def _is_without(self, tensor: Any) -> bool:
        return isinstance(tensor, Tensor) and self._mode.storages.of(tensor) is not None

    def _reduced(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def reduce(tensor: Tensor, protocol: int) -> Any:
            if not self._is_without(tensor):
                return plain(tensor, protocol)
            device = str(tensor.device)
            values = self._mode.values_of(tensor.detach())
            if values is not None:
                with torch._C._DisableTorchDispatch():
                    values = values.clone()
                return known_tensor, (values, device)
            wants_grad = tensor.requires_grad and tensor.is_leaf
            shape, stride = tuple(tensor.shape), tuple(tensor.stride())
            return shaped_tensor, (shape, stride, tensor.dtype, device, wants_grad)

        return reduce

    def _sent(self, plain: Callable[..., Any], pickled: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def reduce(tensor: Tensor) -> Any:
            return pickled(tensor, 2) if self._is_without(tensor) else plain(tensor)

        return reduce

    def _copied(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def deepcopy(tensor: Tensor, memo: dict[int, Any]) -> Any:
            if not self._is_without(tensor) or not tensor.is_leaf:
                return plain(tensor, memo)
            if id(tensor) not in memo:
                made = tensor.detach().clone().requires_grad_(tensor.requires_grad)
                if type(tensor) is not Tensor:
                    made = made.as_subclass(type(tensor))
                made.__dict__.update(copy.deepcopy(tensor.__dict__, memo))
                memo[id(tensor)] = made
            return memo[id(tensor)]

        return deepcopy

    def _shared(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def share(tensor: Tensor) -> Any:
            return tensor if self._is_without(tensor) else plain(tensor)

        return share

    def _unless_there(self, plain: Callable[..., Any], *, place: int, name: str) -> Callable[..., Any]:
        """Return the function, which leaves a file that is there as it is where it would stay."""

        @functools.wraps(plain)
        def save(*args: Any, **kwargs: Any) -> Any:
            path = kwargs.get(name, args[place] if len(args) > place else None)
            is_path = isinstance(path, (str, os.PathLike))
            if is_path and not self._may_overwrite and os.path.exists(path):  # type: ignore[arg-type]
                return None
            return plain(*args, **kwargs)

        return save

    def _without_values(
        self, plain: Callable[..., Any], types: Mapping[str, torch.dtype]
    ) -> Callable[..., Any]:
        @functools.wraps(plain)
        def save_file(tensors: Any, filename: Any, metadata: Any = None) -> Any:
            if not self._are_without(tensors):
                return plain(tensors, filename, metadata)
            head, nbytes = _head(tensors, metadata, types)
            with open(filename, "wb") as file:
                file.write(head)
                file.truncate(len(head) + nbytes)
            return None

        return save_file

    def _in_memory(self, plain: Callable[..., Any], types: Mapping[str, torch.dtype]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def save(tensors: Any, metadata: Any = None) -> Any:
            if not self._are_without(tensors):
                return plain(tensors, metadata)
            head, nbytes = _head(tensors, metadata, types)
            return head + bytes(nbytes)

        return save

    def _are_without(self, tensors: Any) -> bool:
        return isinstance(tensors, dict) and any(map(self._is_without, tensors.values()))


def _head(tensors: Any, metadata: Any, types: Mapping[str, torch.dtype]) -> tuple[bytes, int]:
    """Return the header of a file of safetensors, and the bytes of the tensors behind it."""
    names = {dtype: name for name, dtype in types.items()}
    rows: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    nbytes = 0
    for name, tensor in tensors.items():
        begin, nbytes = nbytes, nbytes + tensor.numel() * tensor.itemsize
        rows[name] = {
            "dtype": names[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, nbytes],
        }
    text = json.dumps(rows).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text, nbytes


def _loaded(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        _Process.map_location = map_location
        try:
            return plain(f, map_location, *args, **kwargs)
        finally:
            _Process.map_location = None

    return load
