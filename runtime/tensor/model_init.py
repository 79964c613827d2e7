"""`tp_model_init()` and `set_autotp_mode()`, as DeepSpeed has them: initialize() divides the model.

Source: DeepSpeed 0.19.8 deepspeed/__init__.py, `tp_model_init`
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from ...shared.axes import Axes
from ..errors import ConfigError


@dataclass(frozen=True, slots=True)
class _Request:
    tp_size: int
    dtype: torch.dtype | None
    ranks: tuple[int, ...] | None = field(default=None, compare=False)  # ranks of the given group


_REQUESTS: WeakKeyDictionary[nn.Module, _Request] = WeakKeyDictionary()


def tp_model_init(
    model: nn.Module,
    tp_size: int,
    dtype: torch.dtype | None = None,
    config: object | None = None,
    **kwargs: Any,
) -> nn.Module:
    """Return the model, which initialize() will divide over `tp_size` neighbours.

    `config` is for initialize(), which must be given the same. `tp_group` is the process group of these
    neighbours.
    Errors: ConfigError for an impossible size, or a size or group that differs from an earlier call
    """
    if isinstance(tp_size, bool) or not isinstance(tp_size, int) or tp_size < 1:
        raise ConfigError(f"tp_model_init(tp_size={tp_size!r}): must be a whole number above 0")
    group = kwargs.pop("tp_group", None)
    if kwargs:
        raise ConfigError(f"tp_model_init() takes no {', '.join(kwargs)}; it takes tp_group")
    ranks = None if group is None else tuple(dist.get_process_group_ranks(group))
    if ranks is not None:
        _check_group(list(ranks), tp_size)
    request = _Request(tp_size, dtype, ranks)
    known = _REQUESTS.setdefault(model, request)
    if known != request:
        raise ConfigError(
            f"tp_model_init() was called with tp_size={known.tp_size} and dtype={known.dtype} before, and "
            f"now with tp_size={tp_size} and dtype={dtype}; call it once for a model"
        )
    if ranks is not None:
        _REQUESTS[model] = request
    return model


def set_autotp_mode(training: bool = False) -> None:
    """Say that models are divided for training, which is the only mode here.

    Errors: ConfigError for any other
    """
    if not training:
        raise ConfigError("set_autotp_mode(training=False): models are divided for training only; give True")


def requested_size(model: nn.Module, size_of_plan: int) -> int:
    """Return over how many ranks the model is to be divided: by its own DTensors, or by tp_model_init().

    Errors: ConfigError if these give different numbers
    """
    request = _REQUESTS.get(model)
    if request is None or request.tp_size == size_of_plan:
        return size_of_plan
    if size_of_plan > 1:
        raise ConfigError(
            f"tp_model_init(tp_size={request.tp_size}) contradicts the model, which is divided over "
            f"{size_of_plan} ranks; leave it out"
        )
    return request.tp_size


def check_dtype(model: nn.Module, trained: torch.dtype | None) -> None:
    """Compare the arguments of tp_model_init() with the ds_config's precision.

    Errors: ConfigError if they differ
    """
    request = _REQUESTS.get(model)
    if request is not None and None not in (request.dtype, trained) and request.dtype != trained:
        raise ConfigError(
            f"tp_model_init(dtype={request.dtype}) contradicts the ds_config, which trains in {trained}; "
            "give both the same"
        )


def check_group(model: nn.Module, axes: Axes) -> None:
    """Check that the group that tp_model_init() was given is this rank's axis tp, whatever the axes' order.

    Errors: ConfigError
    """
    request = _REQUESTS.get(model)
    line = axes.line_of(dist.get_rank(), ("tp",))
    if request is not None and request.ranks is not None and request.ranks != line:
        raise ConfigError(
            f"tp_model_init(tp_group=...) has ranks {list(request.ranks)}, and with the order "
            f"{', '.join(axes.order)} of axes this rank's axis tp is {list(line)}; leave tp_group out"
        )


def _check_group(ranks: list[int], tp_size: int) -> None:
    first = ranks[0]
    if ranks != list(range(first, first + tp_size)) or first % tp_size:
        raise ConfigError(
            f"tp_model_init(tp_group=...) has ranks {ranks}; with tp_size={tp_size} layers are divided over "
            f"{tp_size} neighbours, the first of which is a multiple of {tp_size}: leave tp_group out"
        )
