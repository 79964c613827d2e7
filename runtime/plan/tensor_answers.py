"""Answers of tensors without values, when a program asks for device, address or values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn

from .streams import host_waits
from .without_values import WithoutValues, indexed, tensor_device

_BASE = torch._C.TensorBase
_DATA: Any = _BASE.data
_STORAGE: Any = torch._C.StorageBase


def answer_for_tensors(mode: WithoutValues) -> None:
    """Replace what torch's classes answer, in this process."""
    _Devices(mode).put()
    _Values(mode).put()
    _Moves(mode).put()
    _Storages(mode).put()
    _take_parameters_in(mode)


def _take_parameters_in(mode: WithoutValues) -> None:
    """Have parameters that are made of real values be without: their gradients are."""
    plain = nn.Parameter.__new__

    @functools.wraps(plain)
    def make(kind: type, data: Tensor | None = None, requires_grad: bool = True) -> Any:
        return plain(kind, data if data is None else mode.take_in(data), requires_grad)

    kind: Any = nn.Parameter
    kind.__new__ = make


def _method(answer: Callable[..., Any]) -> Callable[..., Any]:
    """Return the bound method as a function, which a class binds to its own objects."""

    @functools.wraps(answer)
    def call(this: Any, *args: Any, **kwargs: Any) -> Any:
        return answer(this, *args, **kwargs)

    return call


class _Devices:
    """Where a tensor is."""

    def __init__(self, mode: WithoutValues) -> None:
        self._mode = mode

    def put(self) -> None:
        cls: Any = Tensor
        cls.device = property(self.device)
        cls.is_cuda = property(lambda tensor: self.device(tensor).type == "cuda")
        cls.is_cpu = property(lambda tensor: self.device(tensor).type == "cpu")
        cls.is_meta = property(lambda tensor: self.device(tensor).type == "meta")
        cls.get_device = lambda tensor: -1 if self.device(tensor).type == "cpu" else 0
        cls.data = property(_DATA.__get__, self.set_data)
        cls.is_pinned = _method(self.is_pinned)
        cls.data_ptr = _method(self.data_ptr)
        plain: Any = Tensor._make_wrapper_subclass

        def make(kind: type, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
            kind_of_device = None if device is None else torch.device(device).type
            is_float = kwargs.get("dtype", torch.float32).is_floating_point
            if kind_of_device != "cuda" and not (kind_of_device == "cpu" and is_float):
                made: Tensor = plain(kind, *args, device=device, **kwargs)
                return made
            made = plain(kind, *args, device="meta", **kwargs)
            self._mode.storages.add(made, indexed(device), has_memory=False)
            return made

        cls._make_wrapper_subclass = staticmethod(make)

    def device(self, tensor: Tensor) -> torch.device:
        """Return the device that the tensor is said to be on."""
        return self._mode.device_of(tensor) or tensor_device(tensor)

    def set_data(self, tensor: Tensor, values: Tensor) -> None:
        """Let the tensor be over other memory, which may have no values where the tensor's own has."""
        if tensor_device(tensor) == tensor_device(values):
            _DATA.__set__(tensor, values)
        else:  # torch refuses to change the kind of device
            torch._C._swap_tensor_impl(tensor, values.detach())

    def is_pinned(self, tensor: Tensor, device: Any = None) -> bool:
        """Whether it is in pinned host memory."""
        record = self._mode.storages.of(tensor)
        return record is not None and record.is_pinned

    def data_ptr(self, tensor: Tensor) -> int:
        """Return an address that tensors over the same memory share."""
        record = self._mode.storages.of(tensor)
        if record is None:
            return _BASE.data_ptr(tensor)
        return record.address + int(tensor.storage_offset()) * tensor.itemsize if record.nbytes else 0


class _Values:
    """Values in Python: known ones, or a guess."""

    def __init__(self, mode: WithoutValues) -> None:
        self._mode = mode

    def put(self) -> None:
        cls: Any = Tensor
        cls.item = _method(self.item)
        cls.tolist = _method(self.tolist)
        cls.numpy = _method(self.numpy)
        cls.__array__ = lambda tensor, *args, **_: self.numpy(tensor)
        cls.__bool__ = _method(self.truth)
        cls.__float__ = lambda tensor: float(self.item(tensor))
        cls.__int__ = lambda tensor: int(self.item(tensor))
        cls.__repr__ = self._repr(cls.__repr__)
        names: Any = torch
        names.Generator = self._generator_class(torch.Generator)
        default: Any = torch.default_generator
        names.set_rng_state = names.random.set_rng_state = functools.partial(
            self._set_state, default.set_state
        )

    def _generator_class(self, plain: Any) -> type:
        class PlannedGenerator(plain):  # type: ignore[misc]
            """A generator of the host, for any device, which no state without values reaches."""

            def __new__(cls, device: Any = "cpu") -> Any:
                return plain.__new__(cls, device="cpu")

            def set_state(generator, new_state: Tensor) -> Any:
                self._set_state(super().set_state, new_state)
                return generator

        return PlannedGenerator

    def _set_state(self, plain: Callable[[Tensor], Any], new_state: Tensor) -> None:
        """Set a state whose values are known, as those that another rank sends are not."""
        values = self._mode.values_of(new_state)
        if values is not None:
            plain(values)

    def _wait(self, tensor: Tensor) -> None:
        if tensor.is_cuda:
            host_waits()

    def _repr(self, plain: Callable[..., str]) -> Callable[..., str]:
        def shown(tensor: Tensor, **kwargs: Any) -> str:
            values = self._mode.values_of(tensor)
            if values is not None:
                return plain(values, **kwargs)
            shape = ", ".join(map(str, tensor.shape))
            return f"tensor(..., size=({shape}), dtype={tensor.dtype}, device='{tensor.device}')"

        return shown

    def item(self, tensor: Tensor) -> Any:
        """Return the number."""
        self._wait(tensor)
        values = self._mode.values_of(tensor.detach())
        if values is not None:
            return _BASE.item(values)
        if tensor.numel() != 1:
            return _BASE.item(tensor)  # torch says what is wrong
        return self._mode.guesses.number(tensor.dtype)

    def tolist(self, tensor: Tensor) -> Any:
        """Return nested lists of numbers."""
        self._wait(tensor)
        values = self._mode.values_of(tensor.detach())
        if values is not None:
            return _BASE.tolist(values)
        guess = self._mode.guesses.scalar(tensor.dtype)

        def filled(shape: tuple[int, ...]) -> Any:
            return [filled(shape[1:]) for _ in range(shape[0])] if shape else guess

        return filled(tuple(tensor.shape))

    def numpy(self, tensor: Tensor, *, force: bool = False) -> Any:
        """Return an array; of values that are not known it is full of ones."""
        values = self._mode.values_of(tensor.detach())
        if values is None:
            values = torch.ones(tensor.shape, dtype=tensor.dtype, device="cpu")
            values = self._mode.values_of(values)
        if values is None:
            raise NotImplementedError("an array of a tensor whose values are not known")
        return _BASE.numpy(values, force=force)

    def truth(self, tensor: Tensor) -> bool:
        """Return the truth of a tensor's only number."""
        self._wait(tensor)
        values = self._mode.values_of(tensor.detach())
        if values is not None:
            return _BASE.__bool__(values)
        return self._mode.guesses.truth("a value of a tensor decides", False)


class _Moves:
    """Copies to another device: torch's compiled half would look for it."""

    def __init__(self, mode: WithoutValues) -> None:
        self._mode = mode
        self._to, self._type = _BASE.to, _BASE.type

    def put(self) -> None:
        cls: Any = Tensor
        cls.to = _method(self.to)
        cls.type = _method(self.type)
        cls.cuda = lambda tensor, device=None, non_blocking=False, **_: self.to(tensor, "cuda")
        cls.cpu = lambda tensor, **_: self.to(tensor, "cpu")
        cls.pin_memory = _method(self.pin_memory)
        cls.record_stream = lambda tensor, stream: None
        torch_names: Any = torch
        plain_tensor = torch_names.tensor

        def tensor(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
            made: Tensor = plain_tensor(*args, **kwargs)
            return made.pin_memory() if pin_memory else made

        torch_names.tensor = tensor
        plain_parse = torch._C._nn._parse_to

        def parse(*args: Any, **kwargs: Any) -> Any:
            return plain_parse(*(_index_first(one) for one in args), **_indexed_kwargs(kwargs))

        torch._C._nn._parse_to = parse

    def to(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the tensor elsewhere, or of another dtype."""
        args = tuple(_index_first(one) for one in args)
        kwargs = _indexed_kwargs(kwargs)
        if args and isinstance(args[0], Tensor):
            other = args[0]
            args = (other.device, other.dtype, *args[1:])
        wanted = kwargs.get("device")
        place = next((at for at, one in enumerate(args) if isinstance(one, torch.device)), None)
        wanted = args[place] if place is not None else wanted
        if wanted is not None and wanted == tensor.device and not kwargs.get("copy"):
            args = tuple(one for at, one in enumerate(args) if at != place)
            kwargs.pop("device", None)
            if not args and not kwargs.keys() - {"non_blocking", "copy"}:
                return tensor
            if args and not isinstance(args[0], torch.dtype):
                return tensor
        return self._to(tensor, *args, **kwargs)

    def type(self, tensor: Tensor, dtype: Any = None, **_: Any) -> Any:
        """Return the name of the tensor's type, or the tensor as another: of a name, a class, or a dtype."""
        if dtype is None:
            kind = tensor.device.type
            return self._type(tensor).replace("torch.meta.", "torch." if kind == "cpu" else f"torch.{kind}.")
        if isinstance(dtype, torch.dtype):
            return self.to(tensor, dtype)
        wanted = dtype if isinstance(dtype, str) else f"{dtype.__module__}.{dtype.__name__}"
        device = "cuda" if ".cuda." in wanted else "cpu"
        return self.to(tensor, device, getattr(torch, wanted.rpartition(".")[2]).dtype)

    def pin_memory(self, tensor: Tensor, device: Any = None) -> Tensor:
        """Return a copy in pinned memory."""
        if tensor.is_pinned():
            return tensor
        pinned = torch.empty_like(tensor, device="cpu", pin_memory=True)
        return pinned.copy_(tensor)


def _index_first(value: Any) -> Any:
    if isinstance(value, (torch.device, str)):
        return indexed(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return torch.device("cuda", value)
    return value


def _indexed_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    if kwargs.get("device") is None:
        return {key: value for key, value in kwargs.items() if key != "device"}
    return {**kwargs, "device": _index_first(kwargs["device"])}


class _Storages:
    """Storages, by which programs tell what shares memory."""

    def __init__(self, mode: WithoutValues) -> None:
        self._mode = mode
        self._resize: Any = UntypedStorage.resize_

    def put(self) -> None:
        cls: Any = UntypedStorage
        cls.data_ptr = _method(self.data_ptr)
        cls.resize_ = _method(self.resize)
        cls.device = property(self.device)
        cls.is_cuda = property(lambda storage: self.device(storage).type == "cuda")
        cls_tensor: Any = Tensor
        cls_tensor.set_ = _method(self.set)

    def set(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Let a tensor have a storage; one that has values where the tensor has none gives another tensor."""
        source = args[0] if args else kwargs.get("source")
        if isinstance(source, UntypedStorage):
            kind = _STORAGE_DEVICE(source)
            if kind != tensor_device(tensor):
                with torch._C._DisableTorchDispatch():
                    tensor = torch.empty(0, dtype=tensor.dtype, device=kind)
        return _BASE.set_(tensor, *args, **kwargs)

    def data_ptr(self, storage: UntypedStorage) -> int:
        """Return the made-up address of a storage without values."""
        record = self._mode.storages.of_storage(storage)
        if record is None:
            return int(_STORAGE.data_ptr(storage))
        return record.address if record.nbytes else 0

    def device(self, storage: UntypedStorage) -> torch.device:
        """Return the device that the storage is said to be on."""
        record = self._mode.storages.of_storage(storage)
        return _STORAGE_DEVICE(storage) if record is None else record.device

    def resize(self, storage: UntypedStorage, nbytes: int) -> UntypedStorage:
        """Give it another size."""
        self._resize(storage, nbytes)
        if self._mode.storages.of_storage(storage) is not None:
            self._mode.storages.resize(storage, int(nbytes))
        return storage


_STORAGE_DEVICE: Any = _STORAGE.device.__get__
