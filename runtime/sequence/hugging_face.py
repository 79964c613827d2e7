"""transformers' attention over sequences that are divided over ranks.

A rank has a part of a sequence, and transformers makes a mask for this part alone, which is of no use here.
Positions are used instead: those of all parts are put together, and tell where the documents of a packed
sequence begin.

Source: DeepSpeed 0.19.8 runtime/sequence_parallel/ulysses_sp.py, `UlyssesSPAttentionHF`
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from ..comm.numbers import on_device
from ..errors import ConfigError
from ..log import logger
from . import parallel_state
from .attention import attend_over_ranks, sizes_of_heads
from .exchange import SequenceRanks
from .whole_positions import HIDDEN, WholePositions

Attention = Callable[..., tuple[Tensor, Any]]


class UlyssesSPAttentionHF:
    """Stand-in for one of transformers' attention functions."""

    def __init__(
        self, attn: Attention, ranks: SequenceRanks, *, name: str, disable_in_eval: bool = False
    ) -> None:
        self.attn, self._ranks, self.name, self.disable_in_eval = attn, ranks, name, disable_in_eval
        self.was_called = self._has_looked = False
        self._shape: tuple[int, int] | None = None  # shape of the parts in the previous forward
        self._last: tuple[weakref.ref[Tensor], int, WholePositions, weakref.ref[nn.Module]] | None = None

    def check_size(self, size: int) -> None:
        """Check that sequences are divided over `size` ranks.

        Errors: ConfigError if they are divided over another number
        """
        if self._ranks.size != size:
            raise ConfigError(
                f"attention {self.name!r} is registered for sequences that {self._ranks.size} ranks share, "
                f"and sequence_parallel_size is {size}; give initialize() what "
                "register_with_transformers() returns as mpu, or call "
                "UlyssesSPAttentionHF.unregister_from_transformers()"
            )

    @_disable_dynamo  # sizes differ from forward to forward; the layers around it are compiled
    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        """Return this rank's part of the sequence.

        Shapes: query, key, value [batch, heads, this rank's positions, head_dim]; the result [batch,
                positions, heads, head_dim]
        Errors: ConfigError without position_ids, or for keys of other positions than the queries
        """
        self.was_called = True
        if self.disable_in_eval and not module.training:
            return self.attn(module, query, key, value, attention_mask, *args, **kwargs)
        if key.shape[2] != query.shape[2]:
            raise ConfigError(
                f"attention of {query.shape[2]} queries over {key.shape[2]} keys: a cache, or another "
                "sequence, is not divided over ranks; give use_cache=False, and train decoders only"
            )
        if getattr(module, "sinks", None) is not None or kwargs.get("s_aux") is not None:
            raise ConfigError(
                "this attention has a parameter for each head (sinks), which is not divided with the "
                "heads; train the model with sequence_parallel_size 1"
            )
        positions = self._positions(module, kwargs.get("position_ids"), attention_mask, query)
        kwargs["position_ids"] = positions.places
        mask = self._mask(module, positions, kwargs)
        rest: list[Any] = []

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with _groups(module, q.shape[1] // k.shape[1]):
                result, *others = self.attn(module, q, k, v, mask, *args, **kwargs)
            rest.extend(others)
            return result

        part = attend_over_ranks(
            attend, query, key, value, self._ranks, head_dim=1, sequence_dim=2, result_dims=(2, 1)
        )
        return part, rest[0] if rest else None

    def _positions(self, module: nn.Module, own: Any, mask: Any, query: Tensor) -> WholePositions:
        """Return the positions of the whole sequences; a token with one below 0 is hidden.

        All layers of a forward ask, but positions are sent only for the first of them. When that layer asks
        again, the next forward has begun, in which the same positions may have another mask. The result is
        kept as long as the program keeps its own positions.

        Errors: ConfigError, on all ranks, for parts of other shapes
        """
        batch, _, length, _ = query.shape
        if not isinstance(own, Tensor):
            raise ConfigError(
                "attention over divided sequences needs position_ids in every forward: each token's place "
                "in the whole sequence; give model(input_ids=..., position_ids=...), as "
                "UlyssesSPDataLoaderAdapter does"
            )
        if own.dim() != 2 or own.shape[0] not in (1, batch) or own.shape[1] != length:
            raise ConfigError(
                f"position_ids has the shape {tuple(own.shape)}; it must be [{batch}, {length}], one "
                "position for each token of this rank's part of the sequence"
            )
        if (last := self._last) is not None:
            tensor, version, whole, first = last
            if tensor() is own and version == own._version and first() is not module:
                return whole
        self._check_shapes(batch, length, query.device)
        sent = own.expand(batch, length)
        if (hidden := _hidden(mask, batch, length)) is not None:
            sent = sent.where(~hidden.to(sent.device), HIDDEN - sent)
        parts = self._ranks.gather(sent, "positions")
        self._look_at_parts(parts)
        whole = WholePositions(torch.cat(parts, dim=1))
        self._last = (weakref.ref(own, self._forget), own._version, whole, weakref.ref(module))
        return whole

    def _look_at_parts(self, parts: Sequence[Tensor]) -> None:
        """In the first forward, warn if the positions of all samples begin at 0 in each part."""
        if self._has_looked:
            return
        self._has_looked = True
        if self._ranks.index == 0 and all(bool((part[:, 0] == 0).all()) for part in parts):
            logger.warning(
                "the position_ids of all samples begin at 0 in each of the %d parts of a sequence, so that "
                "the parts are documents that do not see each other; give the places that tokens have in "
                "the whole sequence, as UlyssesSPDataLoaderAdapter does. This is said once",
                len(parts),
            )

    def _forget(self, own: weakref.ref[Tensor]) -> None:
        if self._last is not None and self._last[0] is own:
            self._last = None

    def _check_shapes(self, batch: int, length: int, device: torch.device) -> None:
        """Check that all ranks' parts have this shape. On a GPU only a rank whose shape has changed since its
        last forward waits for the others: see [Note: who waits for the others' shapes] in tensor/inputs.py.
        """
        before, self._shape = self._shape, (batch, length)
        own = on_device([batch, length], dtype=torch.int64, device=device)
        everywhere = self._ranks.gather(own, "the shapes of parts")
        if device.type == "cuda" and self._shape == before:
            return
        shapes = [tuple(one) for one in torch.stack(everywhere).tolist()]
        for index, shape in enumerate(shapes):
            if shape != shapes[0]:
                raise ConfigError(
                    f"parts 0 and {index} of a sequence are [batch, positions] = {list(shapes[0])} and "
                    f"{list(shape)}; give all {self._ranks.size} ranks that share a sequence equal parts of "
                    "the same samples"
                )

    def _mask(self, module: nn.Module, whole: WholePositions, kwargs: dict[str, Any]) -> Tensor | None:
        """Return the mask that the attention function needs beside positions. torch's needs a mask for
        documents, windows and padding; kernels for packed sequences read the positions and need a mask for
        padding only.

        Shapes: [batch, 1, positions, positions] of bool for torch's, else [batch, positions]
        """
        if self.name != "sdpa":
            return whole.seen.to(torch.int64) if whole.has_hidden else None
        given = kwargs.get("is_causal")
        is_causal = getattr(module, "is_causal", True) if given is None else given
        return whole.mask(
            is_causal=bool(is_causal), window=kwargs.get("sliding_window") if is_causal else None
        )

    @classmethod
    def register_with_transformers(  # noqa: PLR0913  (DeepSpeed's signature)
        cls,
        model_name_or_path: Any,
        core_attn_implementation: str,
        sequence_parallel_size: int,
        micro_batch_size: int = 1,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
        max_length: int | None = None,
        *,
        tensor_parallel_size: int = 1,
    ) -> Any:
        """Let models with this attention compute on sequences that so many neighbouring ranks share, and
        return the object that initialize() takes as `mpu`; for a size of 1 change nothing and return None.
        `unregister_from_transformers()` undoes it. With `disable_in_eval` a model in evaluation takes whole
        sequences.

        `tensor_parallel_size` is the ds_config's autotp_size if layers are divided, too; then each rank's
        heads are divided. Batches and sequences may have any size, so `micro_batch_size`, `seq_length` and
        `max_length` have no effect.

        Order:  a collective of all ranks
        Errors: ConfigError for heads that cannot be divided, and attention that cannot be replaced
        """
        if sequence_parallel_size == 1:
            return None
        if not seq_length_is_variable and seq_length is None and max_length is None:
            raise ConfigError("seq_length_is_variable=False needs seq_length; give it, or leave both out")
        from transformers.modeling_utils import (
            ALL_ATTENTION_FUNCTIONS,
        )  # the program may have no transformers

        _check_function(core_attn_implementation)
        config = _config_of(model_name_or_path)
        _check_name(core_attn_implementation, config, model_name_or_path, ALL_ATTENTION_FUNCTIONS)
        text = config.get_text_config()
        num_heads = text.num_attention_heads
        num_kv_heads = getattr(text, "num_key_value_heads", None) or num_heads
        of_model, whose = (num_heads, num_kv_heads), ""
        if num_heads % tensor_parallel_size == 0 and num_kv_heads % tensor_parallel_size == 0:
            num_heads, num_kv_heads = num_heads // tensor_parallel_size, num_kv_heads // tensor_parallel_size
            whose = f", 1/{tensor_parallel_size} of which is on each rank along tp" * (
                tensor_parallel_size > 1
            )
        parallel_state.initialize_sequence_parallel(
            sequence_parallel_size, tensor_parallel_size=tensor_parallel_size
        )
        ranks = parallel_state.sequence_ranks()
        try:
            if num_heads % ranks.size:
                raise ConfigError(f"they do not divide {num_heads} heads")
            sizes_of_heads(num_heads, num_kv_heads, ranks)
        except ConfigError as error:
            raise ConfigError(
                f"sequence_parallel_size={sequence_parallel_size}: the ranks that share a sequence divide "
                f"the model's {of_model[0]} attention heads, {of_model[1]} of keys and values{whose}: {error}"
            ) from None
        original = ALL_ATTENTION_FUNCTIONS[core_attn_implementation]
        if isinstance(original, UlyssesSPAttentionHF):
            original = original.attn
        ALL_ATTENTION_FUNCTIONS[core_attn_implementation] = cls(
            original, ranks, name=core_attn_implementation, disable_in_eval=disable_in_eval
        )
        return parallel_state

    @staticmethod
    def unregister_from_transformers() -> None:
        """Give transformers its own attention functions back."""
        for name, function in _registered():
            _functions()[name] = function.attn


def registered() -> list[UlyssesSPAttentionHF]:
    """Return the stand-ins for transformers' functions."""
    return [function for _, function in _registered()]


def _functions() -> Any:
    loaded = sys.modules.get("transformers.modeling_utils")
    return {} if loaded is None else loaded.ALL_ATTENTION_FUNCTIONS


def _registered() -> list[tuple[str, UlyssesSPAttentionHF]]:
    return [(name, one) for name, one in dict(_functions()).items() if isinstance(one, UlyssesSPAttentionHF)]


def _config_of(model_name_or_path: Any) -> Any:
    if hasattr(model_name_or_path, "config"):
        return model_name_or_path.config
    from transformers import AutoConfig  # imported at need, as above

    return AutoConfig.from_pretrained(model_name_or_path)


def _check_name(name: str, config: Any, model: Any, known: Any) -> None:
    used = getattr(config, "_attn_implementation", None) if hasattr(model, "config") else None
    if used not in (None, name):
        raise ConfigError(
            f"core_attn_implementation={name!r}: the model has attn_implementation {used!r}; give the same "
            "to both"
        )
    if name not in known:
        raise ConfigError(
            f"core_attn_implementation={name!r} is not one of transformers' attention functions here: "
            f"{', '.join(sorted(known.valid_keys()))}"
        )


def _check_function(name: str) -> None:
    if name in ("eager", "paged|eager", "flex_attention"):
        raise ConfigError(
            f"core_attn_implementation={name!r}: its masks are made for a rank's part of a sequence; load "
            "the model with attn_implementation 'sdpa' or a flash attention"
        )


def _hidden(mask: Any, batch: int, length: int) -> Tensor | None:
    """Return which positions of this rank a mask hides from all queries; None without a mask.

    Shapes: mask [batch, length], 1 for a token, or [batch, 1 or heads, length, length], of bool or of
    numbers to add to the scores; the result [batch, length] of bool
    """
    if not isinstance(mask, Tensor):
        return None
    if mask.dim() == 2 and mask.shape[1] == length:
        return (mask == 0).expand(batch, length)
    if mask.dim() != 4 or mask.shape[-1] != length:
        raise ConfigError(
            f"an attention mask of shape {tuple(mask.shape)} is not made for {length} positions"
        )
    seen = mask if mask.dtype is torch.bool else mask == 0
    return (~seen.diagonal(dim1=-2, dim2=-1).any(dim=1)).expand(batch, length)  # a token sees itself


@contextmanager
def _groups(module: nn.Module, size: int) -> Iterator[None]:
    """Set, inside, how many heads of queries share a head of keys on this rank."""
    before = getattr(module, "num_key_value_groups", None)
    if before in (None, size):
        yield
        return
    module.num_key_value_groups = size  # type: ignore[assignment]
    try:
        yield
    finally:
        module.num_key_value_groups = before
