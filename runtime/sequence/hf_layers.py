"""Models of transformers that compute a part of a sequence as they would within the whole: tokens influence
each other in attention only, and the model is given the position of each token.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from ..errors import ConfigError

_KNOWN = ("full_attention", "sliding_attention")  # entries of a config's layer_types


def check_layers(module: nn.Module) -> bool:
    """Return whether the module is, or has in it, one of transformers' models.

    Errors: ConfigError for layers where tokens influence each other outside of attention, for attention that
    does not get its windows as an argument, and for a model that counts positions itself
    """
    models = list(_models(module))
    for name, model in models:
        called = f"{type(model).__name__}{f' {name!r}' if name else ''}"
        types = getattr(model.config.get_text_config(), "layer_types", None) or ()
        if others := sorted(set(types).difference(_KNOWN)):
            raise ConfigError(
                f"{called} has layers of the type {', '.join(others)}, which a rank with a part of a "
                f"sequence cannot compute; divide sequences of models with {' and '.join(_KNOWN)} only, or "
                "train this one with sequence_parallel_size 1"
            )
        for part, one in model.named_modules():
            if isinstance(one, nn.Conv1d) and one.kernel_size[0] > 1:
                raise ConfigError(
                    f"{called} has a convolution over neighbouring tokens, {part!r}, which a rank with a "
                    "part of a sequence cannot compute; train it with sequence_parallel_size 1"
                )
    if models and models[0][0] == "" and position_of(module, "position_ids") is None:
        raise ConfigError(
            f"{type(models[0][1]).__name__} takes no position_ids, and counts the places of its tokens from "
            "0 on every rank that has a part of a sequence; train it with sequence_parallel_size 1"
        )
    return bool(models)


def position_of(module: nn.Module, name: str) -> int | None:
    """Return the index of an argument in the forward of one of transformers' models; None for other modules,
    and for models without such an argument.
    """
    outer = getattr(module, "_orig_mod", module)  # the module that torch.compile has wrapped
    model_class = _model_class()
    if model_class is None or not isinstance(outer, model_class):
        return None
    names = list(inspect.signature(type(outer).forward).parameters)[1:]
    return names.index(name) if name in names else None


def _models(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the outermost models of transformers, with their names in the module."""
    model_class = _model_class()
    if model_class is None:
        return
    outer = getattr(module, "_orig_mod", module)
    tops: list[str] = []
    for name, submodule in outer.named_modules():
        if isinstance(submodule, model_class) and not any(
            not top or name.startswith(f"{top}.") for top in tops
        ):
            tops.append(name)
            yield name, submodule


def _model_class() -> Any:
    loaded = sys.modules.get("transformers.modeling_utils")
    return None if loaded is None else loaded.PreTrainedModel
