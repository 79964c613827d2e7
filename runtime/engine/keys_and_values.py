"""The keys and values that a model of transformers keeps while it generates, as far as its config and the
arguments of `generate` say.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..placement.generation_plan import KeysAndValues

_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")


def model_of_transformers(module: nn.Module) -> Any:
    """Return the model of transformers that generates, without an adapter of peft around it; else None."""
    of_adapter: Any = getattr(module, "get_base_model", None)
    inner: Any = module if of_adapter is None else of_adapter()
    method = getattr(type(inner), "generate", None)
    return inner if method is not None and "synced_gpus" in inspect.signature(method).parameters else None


def draws_tokens(model: Any, kwargs: Mapping[str, Any]) -> bool:
    """Tell whether tokens are drawn."""
    given = kwargs.get("generation_config") or model.generation_config
    return bool(kwargs.get("do_sample", getattr(given, "do_sample", False)))


def cache_of_call(
    model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, num_ranks: int
) -> KeysAndValues:
    """Return the keys and values that a model of transformers keeps at the end, as far as the arguments say.

    `num_ranks`: so many divide its heads.
    """
    given = kwargs.get("generation_config") or getattr(model, "generation_config", None)
    inputs = args[0] if args else kwargs.get("input_ids", kwargs.get("inputs"))
    if not isinstance(inputs, Tensor) or inputs.dim() < 2:
        return KeysAndValues()

    def asked(name: str) -> int:
        value = kwargs.get(name) or getattr(given, name, None)
        return value if isinstance(value, int) else 0

    kind = str(kwargs.get("cache_implementation") or getattr(given, "cache_implementation", None))
    if kind.startswith("offloaded"):
        return KeysAndValues()
    length = inputs.shape[1] + asked("max_new_tokens") if asked("max_new_tokens") else asked("max_length")
    num_sequences = inputs.shape[0] * max(asked("num_beams"), asked("num_return_sequences"), 1)
    cache = cache_of(model, num_sequences, length, num_ranks=num_ranks)
    return cache._replace(is_static=kind == "static")


def cache_of(model: Any, num_sequences: int, num_tokens: int, *, num_ranks: int) -> KeysAndValues:
    """Return the cache of a model of transformers for so many sequences, whose heads `num_ranks` divide."""
    config = model.config.get_text_config(decoder=True)
    sizes = {name: getattr(config, name, None) for name in _SIZES}
    if not all(sizes[name] for name in _SIZES[:3]):
        return KeysAndValues()
    num_layers, hidden, heads, kv_heads, width = (sizes[name] or 0 for name in _SIZES)
    per_layer = 2 * (kv_heads or heads) * (width or hidden // heads) // num_ranks * int(model.dtype.itemsize)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * num_layers
    num_whole = sum(kind == "full_attention" for kind in kinds)
    window = min(num_tokens, getattr(config, "sliding_window", None) or 0)
    num_windows = sum(kind == "sliding_attention" for kind in kinds)
    return KeysAndValues(
        num_bytes=per_layer * num_sequences * (num_whole * num_tokens + num_windows * window),
        num_sequences=num_sequences,
        num_tokens=num_tokens,
        bytes_per_token=per_layer * num_whole,
    )
