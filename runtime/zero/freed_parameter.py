"""What a parameter is while its values are elsewhere: of its true shape and dtype, and loud when it is used.

A freed parameter keeps its identity. Its data is one NaN that is expanded to its shape, so it costs no
memory, and its class becomes FreedParameter, which lets its description be asked for and refuses
everything else. So a mistake is one sentence, and neither wrong numbers nor a crash in memory that was
given back. In a backward the values may have come while the parameter is a placeholder still: then its use
gives it the values.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import ConfigError
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
            torch.numel,
            torch._has_compatible_shallow_copy_type,
        ]
    )


_DESCRIPTIONS = _descriptions()
_PLACEHOLDERS: Any = WeakTensorKeyDictionary()  # parameter -> the last placeholder that was made for it
# Where values lie tells which of them are tied; the last element's place comes by two views.
_PLACES = frozenset([Tensor.data_ptr, Tensor.storage, Tensor.untyped_storage])
_VIEWS = frozenset([Tensor.detach, Tensor.view, Tensor.__getitem__])


class FreedValues(Tensor):
    """What a freed parameter's `detach()` gives, as in the module's own state_dict: its description,
    loud when it is used.

    Programs look through a state_dict for names, shapes and tied weights: transformers does in
    from_pretrained() under zero.Init, and in save_pretrained() on the ranks that write nothing.
    """

    _refuse: Callable[[str], None]  # says which parameter it was

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Describe the values, or refuse.

        Errors: ConfigError with the parameter's name
        """
        if func in _DESCRIPTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        found = next(one for one in _leaves((*args, *(kwargs or {}).values())) if type(one) is cls)
        if func in _PLACES or func in _VIEWS:
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **(kwargs or {}))
            return _freed_values(result, found._refuse) if func in _VIEWS else result
        found._refuse(_name_of_function(func))
        raise AssertionError("freed values were used")

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
        if func in _DESCRIPTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        leaves = _leaves((*args, *(kwargs or {}).values()))
        freed = [one for one in leaves if type(one) is cls]
        if freed and _bring(freed, leaves):
            if func is Tensor.detach and sys._getframe(1).f_code is nn.Parameter.__new__.__code__:
                # nn.Parameter(p) expects the class of p, which has just become nn.Parameter.
                return nn.Parameter(args[0].data, requires_grad=False)
            return func(*args, **(kwargs or {}))
        refuse = _refusal(next((one for one in freed if type(one) is cls), None))
        if func is Tensor.detach:
            return _freed_values(freed[0], refuse)
        if func in _MOVES and (moved := _moved(func, *args, **(kwargs or {}))) is not None:
            return moved
        if func == _SET_DATA and _take(*args):
            return None
        refuse(_name_of_function(func))
        raise AssertionError("a freed parameter was used")

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A plain parameter; zero.Init shards that, too."""
        keeper = _keeper_of(self)
        self.data  # noqa: B018  (brings it, or refuses)
        copy: nn.Parameter = deepcopy(self, memo)
        if keeper is not None:
            keeper.note_copy(copy)
        return copy

    def __repr__(self) -> str:  # type: ignore[override]
        return f"FreedParameter('{_name_of(self)}', {tuple(self.shape)}, {self.dtype})"


class Keeper(Protocol):
    """What has a freed parameter's values, or this rank's part of them."""

    @property
    def why_away(self) -> str:
        """Where the values are, and when they can be used: the end of a sentence about the parameter."""

    def bring(self, leaves: Sequence[Any]) -> None:
        """Give the parameter its values, if they can be had now.

        An operation is about to use it, and the others of `leaves`.
        """

    @property
    def convert(self) -> Callable[[torch.dtype], None] | None:
        """What lets the values be of another dtype; None if they stay as they are."""

    def note_copy(self, copy: nn.Parameter) -> None:
        """A plain parameter has been copied from this one."""


class Placeholder:
    """One parameter's data while it is freed, and whether it has been written to.

    It keeps neither parameter nor keeper alive.
    """

    def __init__(
        self, name: str, param: nn.Parameter, keeper: Keeper, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.name = name
        self.keeper = weakref.ref(keeper)
        # A subclass has a meaning of its own, which another class would take from it.
        self.is_plain = type(param) is nn.Parameter
        self.nan = torch.full((), float("nan"), dtype=dtype, device=device).expand(param.shape)
        self.address = self.nan.data_ptr()
        self.version = 0
        _PLACEHOLDERS[param] = self

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


# The two that follow run for every parameter in every pass: hence loops without calls,
# over what was looked up before.


def put_all(placeholders: Sequence[Placeholder], params: Sequence[nn.Parameter]) -> None:
    """Let each placeholder stand for the values of its parameter."""
    status = ZeroParamStatus.NOT_AVAILABLE
    for placeholder, param in zip(placeholders, params, strict=True):
        param.data = placeholder.nan
        placeholder.version = param._version
        if placeholder.is_plain:
            param.__class__ = FreedParameter
        param.__dict__["ds_status"] = status


def take_away_all(
    placeholders: Sequence[Placeholder], params: Sequence[nn.Parameter], values: Sequence[Tensor]
) -> None:
    """Let the parameters have these values.

    Errors: ConfigError if one has been written to meanwhile
    """
    status = ZeroParamStatus.AVAILABLE
    written = None
    for placeholder, param, value in zip(placeholders, params, values, strict=True):
        if placeholder.is_plain:
            param.__class__ = nn.Parameter
        if param._version != placeholder.version or param.data_ptr() != placeholder.address:
            written = written or placeholder
        param.data = value
        param.__dict__["ds_status"] = status
    if written is not None:
        raise ConfigError(
            f"parameter '{written.name}' was written while its values were sharded over the ranks or "
            "offloaded, so that is lost; write inside `with "
            "dslaunch.zero.GatheredParameters([param], modifier_rank=0):`"
        )


def _values_of(param: Tensor, dtype: torch.dtype) -> FreedValues:
    """What a freed parameter would be in another dtype."""
    with torch._C.DisableTorchFunctionSubclass():
        nan = param.new_full((), float("nan"), dtype=dtype).expand(param.shape)
    return _freed_values(nan, _refusal(param))


def _moved(func: Callable[..., Any], param: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
    """What `module.to()` gets for a freed parameter; None if it cannot be.

    Values that are elsewhere lie where the engine wants them, so another device changes nothing. Another
    dtype does, before initialize(), once it is set.
    """
    if type(param) is not FreedParameter:
        return None
    with torch._C.DisableTorchFunctionSubclass():
        dtype: torch.dtype = func(param.new_empty(()), *args, **kwargs).dtype
    if dtype == param.dtype:
        return param
    keeper = _keeper_of(param)
    is_converted = keeper is not None and keeper.convert is not None and dtype.is_floating_point
    return _values_of(param, dtype) if is_converted else None


def _take(param: Tensor, given: Tensor) -> bool:
    """Let a parameter be what `_moved` has given for it; False if it was something else."""
    keeper = _keeper_of(param)
    convert = None if keeper is None else keeper.convert
    if type(given) is FreedValues and convert is not None and given.shape == param.shape:
        convert(given.dtype)
        return True
    return param is given


def _bring(freed: Sequence[Tensor], leaves: Sequence[Any]) -> bool:
    """Let freed parameters have their values where a backward has brought those, or zero.Init does; return
    whether all have them.
    """
    for param in freed:
        keeper = _keeper_of(param)
        if keeper is not None and type(param) is FreedParameter:
            keeper.bring(leaves)
    return not any(type(param) is FreedParameter for param in freed)


def sharded_until(when: str) -> str:
    """Return why a parameter has no values, and when it does: "while its module runs", for example."""
    return (
        f"its values are sharded over the ranks: it has them {when}, and inside "
        "`with dslaunch.zero.GatheredParameters(params):`"
    )


def _refusal(param: Tensor | None) -> Callable[[str], None]:
    """Return what refuses a use of this parameter, with or without the parameter itself."""
    name = "?" if param is None else _name_of(param)
    keeper = None if param is None else _keeper_of(param)
    why = sharded_until("while the module that owns it runs") if keeper is None else keeper.why_away

    def refuse(what: str) -> None:
        raise ConfigError(f"parameter '{name}' was asked for {what}, but {why}")

    return refuse


def _freed_values(tensor: Tensor, refuse: Callable[[str], None]) -> FreedValues:
    with torch._C.DisableTorchFunctionSubclass():
        values = tensor.detach().as_subclass(FreedValues)
    values._refuse = refuse
    return values


def _name_of_function(func: Callable[..., Any]) -> str:
    name: str = getattr(func, "__name__", "an operation")
    return (
        getattr(getattr(func, "__self__", None), "__name__", name) if name in ("__get__", "__set__") else name
    )


def _name_of(param: Tensor) -> str:
    placeholder: Placeholder | None = _PLACEHOLDERS.get(param)
    return "?" if placeholder is None else placeholder.name


def _keeper_of(param: Tensor) -> Keeper | None:
    """What has its values; None if that is gone."""
    placeholder: Placeholder | None = _PLACEHOLDERS.get(param)
    return None if placeholder is None else placeholder.keeper()


def _leaves(values: Iterable[Any]) -> list[Any]:
    found: list[Any] = []
    for value in values:
        found += _leaves(value) if isinstance(value, (tuple, list)) else [value]
    return found
