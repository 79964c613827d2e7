"""Placeholder of a parameter while its values are elsewhere: it has the true shape and dtype, and raises an
error when it is used.

A freed parameter keeps its identity. Its data is one NaN that is expanded to its shape, so it costs no
memory, and its class becomes FreedParameter, which lets its description be asked for and refuses
everything else; one of a subclass becomes both. So a mistake is one sentence, and neither wrong numbers nor a
crash in memory that was given back. In a backward the values may have come while the parameter is a
placeholder still: then its use gives it the values. Until initialize() has the model, a use brings the values
of a parameter that zero.Init has sharded.

Names of values
---------------
`param.data`, `param.detach()` and their views are FreedValues: descriptions that find the values when they
are used. A program may take them of all parameters, on one rank, to look at shapes, and nothing is sent.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from functools import cache, partial
from types import new_class
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ...errors import ConfigError
from ...log import logger
from ...strided import no_value
from .freed_storage import FreedStorage
from .param_status import ZeroParamStatus

_PROPERTIES = (
    "shape",
    "dtype",
    "device",
    "layout",
    "ndim",
    "grad",
    "grad_fn",
    "requires_grad",
    "is_leaf",
    "is_cuda",
    "is_cpu",
    "is_meta",
    "is_sparse",
    "is_sparse_csr",
    "is_quantized",
    "is_nested",
    "is_xla",
    "is_mps",
    "is_xpu",
    "itemsize",
    "nbytes",
    "names",
    "retains_grad",
    "_version",
    "_backward_hooks",
    "_post_accumulate_grad_hooks",
)
_METHODS = (
    "size",
    "dim",
    "numel",
    "nelement",
    "element_size",
    "is_floating_point",
    "is_complex",
    "is_signed",
    "is_same_size",
    "get_device",
    "__len__",
    "register_hook",
    "register_post_accumulate_grad_hook",
    "requires_grad_",
    "__hash__",
)
_MOVES = (Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.double)
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_SETTERS = ("grad", "requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks")


def _descriptions() -> frozenset[Callable[..., Any]]:
    properties = [getattr(torch.Tensor, name, None) for name in _PROPERTIES]
    setters: list[Any] = [getattr(torch.Tensor, name, None) for name in _SETTERS]
    return frozenset(
        [
            *(one.__get__ for one in properties if one is not None),
            *(one.__set__ for one in setters if hasattr(one, "__set__")),
            *(getattr(torch.Tensor, name) for name in _METHODS if hasattr(torch.Tensor, name)),
            torch.is_floating_point,
            torch.is_complex,
            torch.is_signed,
            torch.is_same_size,
            torch.numel,
            torch._has_compatible_shallow_copy_type,
        ]
    )


_DESCRIPTIONS = _descriptions()
_PLACEHOLDERS: Any = WeakTensorKeyDictionary()  # parameter -> the last placeholder that was made for it
_GET_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_NAMES = frozenset([Tensor.detach, _GET_DATA])
# The storage tells which values are tied; the last element's place comes by two views.
_STORAGES = frozenset([Tensor.storage, Tensor.untyped_storage])
_VIEWS = _NAMES | {Tensor.view, Tensor.__getitem__}
# calls that one rank may make alone: torch.save(), for example
_NEVER_BROUGHT = frozenset([Tensor.__reduce_ex__])


class FreedValues(Tensor):
    """A name for values of a freed parameter: see "Names of values"."""

    _param: nn.Parameter
    _make: Callable[[Tensor], Tensor]  # maps the parameter's values to those that this name stands for

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Describe the values, name a view of them, use them where they can be had, or refuse.

        Errors: ConfigError with the parameter's name
        """
        kwargs = kwargs or {}
        if func in _DESCRIPTIONS or func is Tensor.data_ptr:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _STORAGES and _is_placeholder(args[0]._param):
            return args[0]._storage(is_typed=func is Tensor.storage)
        is_made = _makes_parameter(func, sys._getframe(1).f_code)
        if func in _VIEWS and not is_made:
            with torch._C.DisableTorchFunctionSubclass():
                view = func(*args, **kwargs)
            if _lies_in(view, args[0]):
                make = args[0]._make
                return name_values(
                    view, args[0]._param, lambda values: func(make(values), *args[1:], **kwargs)
                )
        return _use(func, args, kwargs, is_made=is_made)

    # torch asks no class about these two.

    def set_(self, *args: Any, **kwargs: Any) -> Tensor:
        """Refer to other values, if the parameter's can be brought; else refuse."""
        result: Tensor = _use(Tensor.set_, (self, *args), kwargs, is_made=False)
        return result

    def as_subclass(self, cls: Any) -> Any:
        """Be seen as another class, if the values can be had; or refuse."""
        return _use(Tensor.as_subclass, (self, cls), {}, is_made=False)

    def _storage(self, *, is_typed: bool) -> FreedStorage:
        param = self._param
        nbytes = param.numel() * self.itemsize
        return FreedStorage(self, nbytes=nbytes, is_typed=is_typed, refuse=partial(_refuse, param))

    def become(self, values: Tensor) -> None:
        """Be an alias of the parameter's values from now on, as `param.data` of a plain one is."""
        with torch._C.DisableTorchFunctionSubclass():
            self.data = self._make(values)
        vars(self).clear()
        self.__class__ = Tensor  # type: ignore[assignment]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"FreedValues({tuple(self.shape)}, {self.dtype})"


class FreedParameter(nn.Parameter):
    """A parameter whose values are elsewhere at the moment: sharded over the ranks, or offloaded."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Describe the parameter; use it, where its values are here or zero.Init brings them; or refuse.

        Errors: ConfigError with the parameter's name
        """
        kwargs = kwargs or {}
        if func in _DESCRIPTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        is_made = _makes_parameter(func, sys._getframe(1).f_code)
        if not is_made and (func in _NAMES or func in _MOVES or func == _SET_DATA):
            _unshard_for(args[:1], is_use=False)
            if _is_placeholder(args[0]):
                if func in _NAMES:
                    return name_values(args[0], args[0], _same)
                if func in _MOVES and (moved := _moved(func, *args, **kwargs)) is not None:
                    return moved
                if func == _SET_DATA and _take(*args):
                    return None
        return _use(func, args, kwargs, is_made=is_made)

    # A library's subclass has calls of its own by these names, which would read what stands for the values.

    to = Tensor.to
    cpu = Tensor.cpu
    cuda = Tensor.cuda

    # torch asks no class about these two.

    def set_(self, *args: Any, **kwargs: Any) -> Tensor:
        """Take other values, if the parameter's can be brought; else refuse."""
        result: Tensor = _use(Tensor.set_, (self, *args), kwargs, is_made=False)
        return result

    def as_subclass(self, cls: Any) -> Any:
        """Return the parameter as another class, if its values can be brought; else refuse."""
        return _use(Tensor.as_subclass, (self, cls), {}, is_made=False)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle it where its values are here. One rank may do it alone, so else they do not come: it is
        refused, or in a program for DeepSpeed empty.
        """
        _unshard_for([self], is_use=False)
        if _is_placeholder(self):
            empty = nn.Parameter(_empty_for(self, self.dtype), self.requires_grad)
            return empty.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
        return self.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return a plain parameter; zero.Init shards that, too."""
        keeper = _keeper_of(self)
        _unshard_for([self], is_use=True)
        if _is_placeholder(self):
            _refuse(self, "__deepcopy__")
        copy: nn.Parameter = deepcopy(self, memo)
        if keeper is not None:
            keeper.note_copy(copy)
        return copy

    def __copy__(self) -> Any:
        """Return a plain copy as of any object."""
        make, *how = self.__reduce_ex__(4)
        return make(*how[0])

    def __repr__(self) -> str:  # type: ignore[override]
        return f"FreedParameter('{_name_of(self)}', {tuple(self.shape)}, {self.dtype})"


@cache
def _freed_kind(kind: type) -> type:
    """Return the class of a parameter of this class while it is freed: of the same name, by which libraries
    know theirs; tensors that are no nn.Parameter in Python keep their class.
    """
    if kind is nn.Parameter:
        return FreedParameter
    if not issubclass(kind, nn.Parameter):
        return kind
    names = {"__module__": kind.__module__}
    return new_class(kind.__name__, (FreedParameter, kind), exec_body=lambda body: body.update(names))


class Owner(Protocol):
    """The zero.Init or the model of an engine that has shared a parameter out."""

    loses_writes: bool  # writes are lost as with DeepSpeed, for which the program was written
    has_left_out: bool  # set once a pickle had an empty tensor and a warning has said so


class Keeper(Protocol):
    """The owner of a freed parameter's values, or of this rank's part of them."""

    @property
    def why_away(self) -> str:
        """Explain where the values are and when they can be used: the end of a sentence on the parameter."""

    def unshard_for(self, leaves: Sequence[Any], *, is_use: bool) -> None:
        """Give the parameter its values, if they can be had now.

        An operation is about to use it, and the others of `leaves`; or to name it only, unless `is_use`.
        """

    def owner(self) -> Owner | None:
        """Return the owner for whom it is kept; None if that is gone."""

    def note_name(self, values: FreedValues) -> None:
        """Note a new name for the parameter's values."""

    @property
    def convert(self) -> Callable[[torch.dtype], None] | None:
        """Return the call that lets the values be of another dtype; None if they stay as they are."""

    def note_copy(self, copy: nn.Parameter) -> None:
        """Note that a plain parameter has been copied from this one."""


class Placeholder:
    """Data of one parameter while it is freed, and whether it has been written to.

    It keeps neither parameter nor keeper alive.
    """

    def __init__(
        self, name: str, param: nn.Parameter, keeper: Keeper, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.name = name
        self.keeper = weakref.ref(keeper)
        self.kind = type(param)
        self.freed_kind = _freed_kind(self.kind)
        self.nan = torch.full((), no_value(dtype), dtype=dtype, device=device).expand(param.shape)
        self.address = self.nan.data_ptr()
        self.version = 0
        _PLACEHOLDERS[param] = self

    @property
    def tells(self) -> bool:
        """Whether the class of the parameter tells when it is used while it is freed."""
        return issubclass(self.freed_kind, FreedParameter)

    def put(self, param: nn.Parameter) -> None:
        """Let it stand for the values; the caller gives the parameter,
        which a placeholder does not keep alive.
        """
        put_all((self,), (param,))

    def take_away(self, param: nn.Parameter, values: Tensor) -> None:
        """Let the parameter have its values again.

        Errors: ConfigError if it has been written to meanwhile
        """
        take_away_all((self,), (param,), (values,))

    def was_written(self, param: nn.Parameter) -> bool:
        """Whether the parameter is no longer what stood for its values. `set_()` with itself, of which torch
        tells no class, is one more version of the same.
        """
        nan = self.nan
        if nan.is_floating_point():
            is_same = (nan if nan.itemsize > 1 else nan.float()).isnan()
        else:
            is_same = nan == no_value(nan.dtype)
        return param.data_ptr() != self.address or not bool(is_same.all())

    def take_set(self, param: nn.Parameter) -> Tensor | None:
        """Return the tensor to which the program has `set_()` the parameter meanwhile, None if to none; and
        stand for the values again.
        """
        with torch._C.DisableTorchFunctionSubclass():
            if param.data_ptr() == self.address:
                return None
            given = param.detach()
            param.data = self.nan
            self.version = param._version
        return given


# The two that follow run for every parameter in every pass: hence loops without calls,
# over what was looked up before.


def put_all(placeholders: Sequence[Placeholder], params: Sequence[nn.Parameter]) -> None:
    """Let each placeholder stand for the values of its parameter."""
    status = ZeroParamStatus.NOT_AVAILABLE
    for placeholder, param in zip(placeholders, params, strict=True):
        param.data = placeholder.nan
        placeholder.version = param._version
        param.__class__ = placeholder.freed_kind
        param.__dict__["ds_status"] = status


def take_away_all(
    placeholders: Sequence[Placeholder], params: Sequence[nn.Parameter], values: Sequence[Tensor]
) -> None:
    """Give the parameters these values.

    Errors: ConfigError if one has been written to meanwhile
    """
    status = ZeroParamStatus.AVAILABLE
    written = None
    for placeholder, param, value in zip(placeholders, params, values, strict=True):
        param.__class__ = placeholder.kind
        is_touched = param._version != placeholder.version or param.data_ptr() != placeholder.address
        if is_touched and placeholder.was_written(param):
            written = written or placeholder
        param.data = value
        param.__dict__["ds_status"] = status
    if written is not None:
        raise ConfigError(
            f"parameter '{written.name}' was written while its values were sharded over the ranks or "
            "offloaded, so that is lost; write inside `with "
            "dslaunch.zero.GatheredParameters([param], modifier_rank=0):`"
        )


def _use(func: Callable[..., Any], args: Any, kwargs: Any, *, is_made: bool) -> Any:
    """Run an operation on values that are elsewhere, if they can be had now; `is_made`: it is a part of
    `nn.Parameter(...)`.

    Errors: ConfigError with the parameter's name
    """
    leaves = [_param_of(leaf) for leaf in _leaves((*args, *kwargs.values())) if isinstance(leaf, Tensor)]
    _unshard_for(leaves, is_use=func not in _NEVER_BROUGHT)
    for leaf in leaves:
        if _is_placeholder(leaf):
            if func is Tensor.__reduce_ex__:
                return func(_empty_for(leaf, args[0].dtype), *args[1:])
            _refuse(leaf, _name_of_function(func))
    if is_made:
        return _made(args[0])
    return func(*_with_values(args), **{key: _with_values(value) for key, value in kwargs.items()})


def _empty_for(param: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what a pickle has in the place of values that are elsewhere.

    Errors: ConfigError with the parameter's name, unless the program was written for DeepSpeed
    """
    keeper = _keeper_of(param)
    owner = None if keeper is None else keeper.owner()
    if owner is None or not owner.loses_writes:
        _refuse(param, "pickling")
    if not owner.has_left_out:
        owner.has_left_out = True
        logger.warning(
            "a pickle, of torch.save() for example, has an empty tensor in the place of parameter '%s' and "
            "of all others whose values are sharded, as with DeepSpeed; for whole weights call "
            "engine.save_16bit_model(), or gather them first: with deepspeed.zero.GatheredParameters(params)",
            _name_of(param),
        )
    return torch.empty(0, dtype=dtype, device=param.device)


def _makes_parameter(func: Callable[..., Any], caller: Any) -> bool:
    """Whether this is what `nn.Parameter(...)` asks of a tensor of another class."""
    return func is Tensor.detach and caller is nn.Parameter.__new__.__code__


def _made(given: Tensor) -> nn.Parameter:
    """Answer that request: nn.Parameter expects the class of its argument."""
    if type(given) is FreedValues:
        given.become(given._param.detach())
    given.__class__ = nn.Parameter
    return nn.Parameter(given.data, requires_grad=False)


def _with_values(value: Any) -> Any:
    """Return an argument with values in the place of their names."""
    if type(value) is FreedValues:
        return value._make(value._param.detach())
    if isinstance(value, (tuple, list)) and any(type(one) is FreedValues for one in _leaves(value)):
        values = [_with_values(one) for one in value]
        return tuple(values) if isinstance(value, tuple) else values
    return value


def _param_of(freed: Tensor) -> Tensor:
    return freed._param if isinstance(freed, FreedValues) else freed


def _lies_in(view: Tensor, values: Tensor) -> bool:
    """True if the view is no copy; an index that is a tensor makes one."""
    with torch._C.DisableTorchFunctionSubclass():
        return bool(view.data_ptr() == values.data_ptr())


def _same(values: Tensor) -> Tensor:
    return values


def _moved(func: Callable[..., Any], param: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
    """Return the result of `module.to()` for a freed parameter; None if it cannot be moved.

    Values that are elsewhere lie where the engine wants them, so another device changes nothing. Another
    dtype does, before initialize(), once it is set.
    """
    with torch._C.DisableTorchFunctionSubclass():
        dtype: torch.dtype = func(param.new_empty(()), *args, **kwargs).dtype
    if dtype == param.dtype:
        return param
    keeper = _keeper_of(param)
    if keeper is None or keeper.convert is None or not dtype.is_floating_point:
        return None
    with torch._C.DisableTorchFunctionSubclass():
        nan = param.new_full((), float("nan"), dtype=dtype).expand(param.shape)
    return name_values(nan, param, lambda values: values.to(dtype))


def _take(param: Tensor, given: Tensor) -> bool:
    """Let a parameter be what `_moved` has given for it; False if it was something else."""
    if param is given:
        return True
    if type(given) is not FreedValues or given._param is not param or given.shape != param.shape:
        return False
    keeper = _keeper_of(param)
    convert = None if keeper is None else keeper.convert
    if given.dtype != param.dtype and convert is not None:
        convert(given.dtype)
        return True
    return given._make is _same


def _unshard_for(tensors: Sequence[Any], *, is_use: bool) -> None:
    """Let freed parameters have their values where a backward has brought those, or zero.Init does."""
    for param in tensors:
        keeper = _keeper_of(param) if _is_placeholder(param) else None
        if keeper is not None:
            keeper.unshard_for(tensors, is_use=is_use)


def sharded_until(when: str) -> str:
    """Return why a parameter has no values, and when it does: "while its module runs", for example."""
    return (
        f"its values are sharded over the ranks: it has them {when}, and inside "
        "`with dslaunch.zero.GatheredParameters(params):`"
    )


def _refuse(param: Tensor, what: str) -> NoReturn:
    """Refuse a use of this parameter."""
    keeper = _keeper_of(param)
    guards = sys.modules.get("torch._guards")
    if guards is not None and guards.TracingContext.try_get() is not None:
        raise ConfigError(
            f"torch.compile() came to parameter '{_name_of(param)}', whose values are sharded over the "
            "ranks, and compiled code cannot gather them: call engine.compile() after initialize() instead, "
            "which compiles the forward of each block"
        )
    why = sharded_until("while the module that owns it runs") if keeper is None else keeper.why_away
    raise ConfigError(f"parameter '{_name_of(param)}' was asked for {what}, but {why}")


def give_values(param: nn.Parameter, values: Tensor) -> None:
    """Let a parameter, which may be a placeholder, be a plain one with these values from elsewhere."""
    placeholder: Placeholder | None = _PLACEHOLDERS.pop(param, None)
    if placeholder is not None and _is_placeholder(param):
        param.__class__ = placeholder.kind
    param.data = values


def is_freed(param: Tensor) -> bool:
    """Whether a placeholder stands for the parameter's values, also where its class is one of its own."""
    if _is_placeholder(param):
        return True
    placeholder: Placeholder | None = _PLACEHOLDERS.get(param)
    if placeholder is None or param.numel() == 0:
        return False
    with torch._C.DisableTorchFunctionSubclass():
        return bool(param.data_ptr() == placeholder.address)


def check_kept(param: Tensor, name: str) -> None:
    """Errors: ConfigError if what had the values of a freed parameter is gone"""
    if _keeper_of(param) is None:
        raise ConfigError(
            f"parameter '{name}' was sharded by an engine that is gone, and its values with it: the modules' "
            "own forward, which keeps them, was replaced; let the program keep the engine until the next "
            "initialize(), or call its destroy() before"
        )


def name_values(tensor: Tensor, param: Tensor, make: Callable[[Tensor], Tensor]) -> FreedValues:
    """Return a name for values of a freed parameter, described by `tensor`; see "Names of values"."""
    with torch._C.DisableTorchFunctionSubclass():
        values = Tensor._make_subclass(FreedValues, tensor)  # no view, which would refuse detach_()
    values._param, values._make = param, make  # type: ignore[assignment]
    keeper = _keeper_of(param)
    if keeper is not None:
        keeper.note_name(values)
    return values


def _is_placeholder(value: Any) -> bool:
    """Whether a value is a freed parameter; isinstance() would run torch's own check each time."""
    return issubclass(type(value), FreedParameter)


def _name_of_function(func: Callable[..., Any]) -> str:
    name: str = getattr(func, "__name__", "an operation")
    if getattr(func, "__module__", None) == "torch.autograd":
        return f"torch.autograd.{name}()"
    return (
        getattr(getattr(func, "__self__", None), "__name__", name) if name in ("__get__", "__set__") else name
    )


def _name_of(param: Tensor) -> str:
    placeholder: Placeholder | None = _PLACEHOLDERS.get(param)
    return "?" if placeholder is None else placeholder.name


def _keeper_of(param: Tensor) -> Keeper | None:
    """Return the keeper of the parameter's values; None if that is gone."""
    placeholder: Placeholder | None = _PLACEHOLDERS.get(param)
    return None if placeholder is None else placeholder.keeper()


def _leaves(values: Iterable[Any]) -> list[Any]:
    leaves: list[Any] = []
    for value in values:
        leaves += _leaves(value) if isinstance(value, (tuple, list)) else [value]
    return leaves
