"""A program's tensors without their values: shapes, dtypes and devices are true, and nothing is computed.

[Note: a tensor without values]
It is a plain meta tensor to torch's compiled half, so that parameters stay what they are to programs and to
the engine. Its storage has a record with the device that it is said to be on. Small values that follow
from the program alone (a rate, a mask, the lengths of a batch) are computed beside it in host memory, and are
its `known` ones. Integers in host memory are real tensors. What depends on values that nobody computes is
guessed, and the guess is noted with the line of the program that asks (guesses.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .guesses import Guesses
from .storages import StorageRecord, Storages

aten = torch.ops.aten
KNOWN_NUMEL = 2**20  # values beyond are not computed
REAL_NUMEL = 2**25  # integers in host memory beyond have no values
_META = torch.device("meta")
_CPU = torch.device("cpu")
_COVERING = (aten.copy_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default)
_EMPTY = (aten.empty.memory_format, aten.empty_strided.default)
_RANDOM = torch.Tag.nondeterministic_seeded


class _Inside(threading.local):
    """Whether torch's own shape functions, some of which are in Python, run in this thread."""

    is_on = False


def indexed(device: torch.device | str) -> torch.device:
    """Return the device with its index: a job's process is shown one GPU."""
    device = torch.device(device)
    return torch.device("cuda", 0) if device.type == "cuda" else device


class WithoutValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside the `with` block operations give tensors without values; see [Note: a tensor without values].

    `computed` is called with each operation, its arguments, the tensors among them, those that it gives, and
    all that its kernel has returned.
    """

    def __init__(
        self,
        storages: Storages,
        guesses: Guesses,
        *,
        device: torch.device,
        computed: Callable[..., None],
    ) -> None:
        """`device`: where a rank computes."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages, self.guesses, self.device = storages, guesses, device
        self._computed = computed
        self._inside = _Inside()
        self._shadows: dict[int, tuple[Tensor, object]] = {}  # real storage -> meta tensor over one like it

    # ---- what others ask of a tensor

    def device_of(self, tensor: Tensor) -> torch.device | None:
        """Return the device that the tensor is said to be on; None: that which torch says."""
        record = None if self._inside.is_on else self.storages.of(tensor)
        return None if record is None else record.device

    def values_of(self, tensor: Tensor) -> Tensor | None:
        """Return the tensor's values if they are known, in host memory."""
        record = self.storages.of(tensor)
        if record is None:
            return None if tensor.untyped_storage().device.type == "meta" else tensor
        if record.known is None:
            return None
        return _over(record.known, tensor)

    def put_known(self, tensor: Tensor, values: Tensor) -> Tensor:
        """Let a tensor without values have these."""
        record = self.storages.of(tensor)
        if record is not None:
            record.known = _room(record.nbytes)
            with torch._C._DisableTorchDispatch():
                _over(record.known, tensor).copy_(values)
        return tensor

    def put_number(self, tensor: Tensor, number: float) -> Tensor:
        """Let all values of a tensor be this number."""
        with torch._C._DisableTorchDispatch():
            values = torch.full(tensor.shape, number, dtype=tensor.dtype, device=_CPU)
        return self.put_known(tensor, values)

    def make(self, values: Tensor, device: torch.device) -> Tensor:
        """Return a tensor with known values on a device."""
        if device.type == "cpu" and not values.dtype.is_floating_point:
            return values
        with torch._C._DisableTorchDispatch():
            made = torch.empty_strided(values.shape, values.stride(), dtype=values.dtype, device=_META)
        self.storages.add(made, device)
        return self.put_known(made, values)

    def take_in(self, tensor: Tensor) -> Tensor:
        """Return a tensor without values in place of large values in host memory, such as those of a file."""
        is_real = self.storages.of(tensor) is None and tensor_device(tensor).type == "cpu"
        if not is_real or not (tensor.dtype.is_floating_point and tensor.layout is torch.strided):
            return tensor
        if tensor.numel() <= KNOWN_NUMEL:
            return self.make(tensor.detach(), _CPU)
        with torch._C._DisableTorchDispatch():
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)
        self.storages.add(made, _CPU)
        return made

    # ---- operations

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run one operation on shapes."""
        if types and any(not _is_plain(one) for one in types):
            return NotImplemented
        kwargs = dict(kwargs or {})
        special = _SPECIAL.get(func)
        if special is not None:
            result = special(self, func, args, kwargs)
            if result is not NotImplemented:
                return result
        return self.run(func, args, kwargs)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation on shapes, and on the values that are known."""
        tensors = list(_tensors((args, kwargs)))
        records = [self.storages.of(one) for one in tensors]
        wanted = kwargs.get("device")
        if not any(records):
            if tensors and (wanted is None or wanted.type == "cpu") and not _is_much(func, tensors):
                if kwargs.get("pin_memory"):
                    kwargs["pin_memory"] = None
                return func(*args, **kwargs)  # true values, or true meta tensors
            if wanted is not None and wanted.type == "meta" and not self._is_backward():
                return func(*args, **kwargs)
            if not tensors and not _makes_tensors(func):
                return func(*args, **kwargs)
        device = self._device_of_results(wanted, tensors, records)
        if not tensors and device.type == "cpu":
            made = self._make_real(func, args, kwargs)
            if made is not None:
                return made
        return self._run_on_shapes(func, args, kwargs, tensors, records, device)

    def _is_backward(self) -> bool:
        return torch._C._current_graph_task_id() != -1

    def _device_of_results(
        self, wanted: torch.device | None, tensors: list[Tensor], records: Sequence[StorageRecord | None]
    ) -> torch.device:
        if wanted is not None and wanted.type != "meta":
            return indexed(wanted)
        first: torch.device | None = None
        for tensor, record in zip(tensors, records, strict=True):
            device = record.device if record is not None else tensor_device(tensor)
            if device.type == "meta":
                continue
            if tensor.dim() and device.type != "cpu":
                return device
            first = device if first is None or device.type != "cpu" else first
        if first is None:
            return self.device if wanted is not None else _CPU
        return first

    def _make_real(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return integers in host memory with their values; None for anything else."""
        probe = func(
            *args, **{**kwargs, "device": _META, "pin_memory": None} if "device" in kwargs else kwargs
        )
        if not isinstance(probe, Tensor) or probe.device.type != "meta":
            return probe
        if probe.dtype.is_floating_point or probe.dtype.is_complex or probe.numel() > REAL_NUMEL:
            return None
        if func in _EMPTY and probe.numel() > 1:  # something will be written to it, perhaps what nobody knows
            return None
        return func(*args, **{**kwargs, "device": _CPU, "pin_memory": None})

    def _run_on_shapes(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[Tensor],
        records: Sequence[StorageRecord | None],
        device: torch.device,
    ) -> Any:
        values = self._known_of(func, tensors, records)
        written = _written(func, args, kwargs)
        meta_of = {id(one): self._as_meta(one) for one in tensors}
        on_shapes = dict(kwargs)
        if "device" in kwargs:
            on_shapes["device"] = _META
        if kwargs.get("pin_memory"):
            on_shapes["pin_memory"] = None
        if kwargs.get("generator") is not None:
            on_shapes["generator"] = None
        meta_args, meta_kwargs = _replaced((args, on_shapes), meta_of)
        self._inside.is_on = True
        try:
            out = func(*meta_args, **meta_kwargs)
        finally:
            self._inside.is_on = False
        results = self._own_results(out, written, meta_of)
        made = list(_tensors(results))
        is_pinned = bool(kwargs.get("pin_memory"))
        new = []
        for one in made:
            if tensor_device(one).type == "meta" and self.storages.of(one) is None:
                self.storages.add(one, device, is_pinned=is_pinned)
                new.append(one)
        is_computed = False
        if values is not None and sum(one.numel() for one in new) <= KNOWN_NUMEL:
            is_computed = self._compute(func, args, kwargs, values, made, new)
        if not is_computed:
            for one in written:
                self._forget(one)
        self._computed(func, args, kwargs, tensors, made, out)
        return results

    def _own_results(self, out: Any, written: list[Tensor], meta_of: Mapping[int, Tensor]) -> Any:
        """Return the results with the program's own tensors in place of those that stood for them."""
        if not written:
            return out
        own = {id(meta_of[id(one)]): one for one in written}
        return _replaced(out, own)

    def _known_of(
        self, func: Any, tensors: list[Tensor], records: Sequence[StorageRecord | None]
    ) -> dict[int, Tensor] | None:
        """Return the values of all tensors by id; None unless all are known."""
        known: dict[int, Tensor] = {}
        is_covering = func in _COVERING
        for place, (tensor, record) in enumerate(zip(tensors, records, strict=True)):
            if record is None:
                if tensor_device(tensor).type == "meta":
                    return None
                known[id(tensor)] = tensor
                continue
            if record.known is None and is_covering and place == 0:
                if not _covers(tensor, record) or tensor.numel() > KNOWN_NUMEL:
                    return None
                if not all(one is None or one.known for one in records[1:]):
                    return None
                record.known = _room(record.nbytes)
            if record.known is None:
                return None
            known[id(tensor)] = _over(record.known, tensor)
        if _RANDOM in func.tags and any(one.dtype.is_floating_point for one in tensors):
            return None
        return known

    def _compute(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        values: Mapping[int, Tensor],
        made: Sequence[Tensor],
        new: Sequence[Tensor],
    ) -> bool:
        """Compute values that are known, and give them to the results; tell whether that can be done here."""
        on_host = dict(kwargs)
        if "device" in kwargs:
            on_host["device"] = _CPU
        if kwargs.get("pin_memory"):
            on_host["pin_memory"] = None
        host_args, host_kwargs = _replaced((args, on_host), values)
        try:
            out = func(*host_args, **host_kwargs)
        except Exception:  # a library's own kernel may raise any
            return False
        for one, value in zip(made, _tensors(out), strict=False):
            if any(one is other for other in new):
                self.put_known(one, value)
        return True

    def _as_meta(self, tensor: Tensor) -> Tensor:
        """Return the tensor itself, or for a real one a meta tensor in its place."""
        if tensor_device(tensor).type == "meta":
            return tensor
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)

    def _forget(self, tensor: Tensor) -> None:
        """Note that nobody knows what was written to the tensor."""
        record = self.storages.of(tensor)
        if record is None and tensor_device(tensor).type == "cpu":
            record = self.storages.add(tensor, _CPU)
        if record is not None:
            record.known = None


def tensor_device(tensor: Tensor) -> torch.device:
    """Return the device that torch's compiled half knows."""
    return _DEVICE(tensor)


_DEVICE = torch._C.TensorBase.device.__get__


def _is_much(func: Any, tensors: Sequence[Tensor]) -> bool:
    """Whether it would compute with large values that come from a file."""
    return not func.is_view and any(
        one.numel() > KNOWN_NUMEL and one.dtype.is_floating_point and tensor_device(one).type == "cpu"
        for one in tensors
    )


def _is_plain(kind: type) -> bool:
    return kind is Tensor or getattr(kind, "__torch_dispatch__", None) is Tensor.__torch_dispatch__


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from _tensors(one)


def _replaced(value: Any, others: Mapping[int, Tensor]) -> Any:
    """Return the value with other tensors, by the id of each."""
    if isinstance(value, Tensor):
        return others.get(id(value), value)
    if isinstance(value, tuple):
        made = [_replaced(one, others) for one in value]
        return type(value)(*made) if hasattr(value, "_fields") else tuple(made)
    if isinstance(value, list):
        return [_replaced(one, others) for one in value]
    if isinstance(value, dict):
        return {key: _replaced(one, others) for key, one in value.items()}
    return value


def _makes_tensors(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and "Tensor" in str(returns[0].type)


_WRITES: dict[Any, tuple[tuple[int, str], ...]] = {}


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that the operation writes to."""
    places = _WRITES.get(func)
    if places is None:
        places = _WRITES[func] = tuple(
            (place, one.name)
            for place, one in enumerate(func._schema.arguments)
            if one.alias_info is not None and one.alias_info.is_write
        )
    found: list[Tensor] = []
    for place, name in places:
        value = args[place] if place < len(args) else kwargs.get(name)
        found += _tensors(value)
    return found


def _over(storage: torch.UntypedStorage, like: Tensor) -> Tensor:
    with torch._C._DisableTorchDispatch():
        empty = torch.empty(0, dtype=like.dtype, device=_CPU)
        return empty.set_(storage, like.storage_offset(), like.shape, like.stride())


def _room(nbytes: int) -> torch.UntypedStorage:
    with torch._C._DisableTorchDispatch():
        return torch.zeros(nbytes, dtype=torch.uint8, device=_CPU).untyped_storage()


def _covers(tensor: Tensor, record: StorageRecord) -> bool:
    return tensor.numel() * tensor.itemsize == record.nbytes


# ---- operations that ask for values


def _scalar(mode: WithoutValues, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    values = mode.values_of(args[0])
    if values is not None:
        return func(values)
    return mode.guesses.scalar(args[0].dtype)


def _is_alike(mode: WithoutValues, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    values = [mode.values_of(one) for one in args]
    if all(one is not None for one in values):
        return func(*values)
    return mode.guesses.truth("whether two tensors are equal", True)


def _by_values(mode: WithoutValues, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation whose result's shape depends on values."""
    tensors = list(_tensors((args, kwargs)))
    values = {id(one): mode.values_of(one) for one in tensors}
    device = mode._device_of_results(
        kwargs.get("device"), tensors, [mode.storages.of(one) for one in tensors]
    )
    if all(one is not None for one in values.values()):
        host_args, host_kwargs = _replaced((args, kwargs), values)  # type: ignore[arg-type]
        out = func(*host_args, **host_kwargs)
        made = {id(one): mode.make(one, device) for one in _tensors(out)}
        return _replaced(out, made)
    return mode.guesses.shaped(mode, func, args, kwargs, device)


def _index(mode: WithoutValues, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Turn masks into indices, as torch does; the rest has shapes alone."""
    indices = args[1]
    if not any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in indices):
        return NotImplemented
    expanded: list[Any] = []
    for one in indices:
        if one is not None and one.dtype in (torch.bool, torch.uint8):
            places = mode.__torch_dispatch__(aten.nonzero.default, (), (one,), {})
            expanded += [
                mode.__torch_dispatch__(aten.select.int, (), (places, 1, dim), {}) for dim in range(one.dim())
            ]
        else:
            expanded.append(one)
    return mode.__torch_dispatch__(func, (), (args[0], expanded, *args[2:]), kwargs)


def _lift(mode: WithoutValues, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Take a tensor that Python's numbers have become."""
    made = args[0]
    if tensor_device(made).type != "cpu" or not made.dtype.is_floating_point:
        return func(*args, **kwargs)
    return mode.make(made, _CPU)


def _choices(mode: WithoutValues, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Give chosen places values: each as often as any other."""
    out = mode.run(func, args, kwargs)
    size = args[0].shape[-1] if args[0].dim() else 1
    for one in _tensors(out):
        if not one.dtype.is_floating_point and mode.values_of(one) is None and one.numel() <= REAL_NUMEL:
            mode.put_known(one, _spread(one, size))
    return out


def _spread(like: Tensor, size: int) -> Tensor:
    each = torch.arange(like.numel(), device=_CPU).remainder_(max(size, 1))
    return each.reshape(like.shape).to(like.dtype)


def _flags(of_unknown: bool) -> Callable[..., Any]:
    def run(mode: WithoutValues, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = mode.run(func, args, kwargs)
        if isinstance(out, Tensor) and mode.values_of(out) is None and out.numel() <= REAL_NUMEL:
            mode.put_known(out, torch.full(out.shape, of_unknown, device=_CPU))
        return out

    return run


def _is_set_to(mode: WithoutValues, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    one, other = args
    records = [mode.storages.of(tensor) for tensor in args]
    return records[0] is records[1] and all(
        read(one) == read(other) for read in (Tensor.size, Tensor.stride, Tensor.storage_offset)
    )


_SPECIAL: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(
        (
            aten.set_.source_Storage,
            aten.set_.source_Storage_storage_offset,
            aten.set_.source_Tensor,
            aten.set_.source_Tensor_storage_offset,
        ),
        lambda mode, func, args, kwargs: func(*args, **kwargs),
    ),
    aten.is_set_to.default: _is_set_to,
    aten._local_scalar_dense.default: _scalar,
    aten.equal.default: _is_alike,
    aten.lift_fresh.default: _lift,
    aten.lift_fresh_copy.default: _lift,
    aten.index.Tensor: _index,
    aten.index_put.default: _index,
    aten.index_put_.default: _index,
    aten._index_put_impl_.default: _index,
    aten.isnan.default: _flags(False),
    aten.isinf.default: _flags(False),
    aten.isfinite.default: _flags(True),
    **{
        getattr(getattr(aten, name), overload): _by_values
        for name, overload in (
            ("nonzero", "default"),
            ("masked_select", "default"),
            ("_unique2", "default"),
            ("unique_dim", "default"),
            ("unique_consecutive", "default"),
            ("bincount", "default"),
            ("repeat_interleave", "Tensor"),
        )
    },
    **{
        getattr(getattr(aten, name), overload): _choices
        for name, overload in (
            ("argmax", "default"),
            ("argmin", "default"),
            ("topk", "default"),
            ("sort", "default"),
            ("sort", "stable"),
            ("argsort", "default"),
            ("multinomial", "default"),
            ("max", "dim"),
            ("min", "dim"),
        )
    },
}
