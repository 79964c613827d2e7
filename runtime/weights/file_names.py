"""The way from names in files of weights to a model's names: its own, or as from_pretrained() goes it.

transformers renames what it reads, and makes some tensors of several: a stack of experts of one tensor for
each expert, for example. Its own conversions do that here, too, with tensors of which no element is read.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..checkpoint.pretrained.lazy import FileTensor, Values
from ..errors import CheckpointError
from .base_tensors import BaseModel

if TYPE_CHECKING:  # imports torch.distributed.checkpoint, see engine/checkpoints.py
    from ..checkpoint.load import Names
    from ..checkpoint.pretrained.reader import Matched
    from ..checkpoint.training_state import Training

_LISTED = 3
# Older files have these, and models make them by themselves.
_NOT_WANTED = {"rotary_emb.inv_freq": r"rotary_emb\.inv_freq", "position_ids": r"(^|\.)position_ids$"}


class FileNames:
    """See `Match` in reader.py."""

    def __init__(
        self, module: nn.Module, *, shapes: Mapping[str, tuple[int, ...]], aliases: Mapping[str, str]
    ) -> None:
        """`shapes`: of what the whole model's state_dict has; `aliases`: other names of tied parameters, and
        the names that they go by.

        Errors: CheckpointError for a model of PEFT that has values of the base model twice
        """
        base = BaseModel(module)
        if base.replaced:
            raise CheckpointError(
                f"'{base.replaced[0]}' is one of PEFT's modules_to_save, copies of the base model's from "
                "when the adapter was made: make the adapter of a model that has its weights, as "
                "from_pretrained() returns it"
            )
        self._base, self._aliases = base.base, dict(aliases)
        named = {name: base.name(name) for name in (*shapes, *aliases)}
        self._name_of = {own: name for name, own in named.items() if own is not None}
        self._shape_of = {own: shapes[self._first(name)] for own, name in self._name_of.items()}
        self._of_adapters = {name for name, own in named.items() if own is None}

    def __call__(self, found: Mapping[str, Values], where: str) -> Matched:
        """Return what the model takes of these values.

        Errors: CheckpointError
        """
        values, unexpected = dict(found), set[str]()
        may_be_missing = set(self._of_adapters)
        if is_pretrained_model(self._base):
            values, unexpected = self._converted(found, where)
            unexpected -= self._ignored(unexpected, "unexpected")
            ignored = self._ignored(self._name_of, "missing")
            may_be_missing |= {self._first(self._name_of[name]) for name in ignored}
        unexpected |= values.keys() - self._name_of.keys()
        key_of = {id(one): key for key, one in found.items()}
        from ..checkpoint.pretrained.reader import Matched  # imported at need: see the top of this file

        taken: dict[str, Values] = {}
        twins: list[tuple[str, str]] = []
        for own, name in self._name_of.items():  # first names come before their aliases
            if own in values:
                kept = taken.setdefault(self._first(name), values[own])
                if kept is not values[own] and id(kept) in key_of and id(values[own]) in key_of:
                    twins.append((key_of[id(kept)], key_of[id(values[own])]))
        return Matched(taken, unexpected, may_be_missing, twins)

    def _first(self, name: str) -> str:
        return self._aliases.get(name, name)

    def _ignored(self, names: Iterable[str], kind: str) -> set[str]:
        """Return those that the model's class says may be missing, or may be unexpected."""
        patterns = list(getattr(self._base, f"_keys_to_ignore_on_load_{kind}") or ())
        if kind == "unexpected":
            buffers = [name for name, _ in self._base.named_buffers()]
            patterns += [
                one for end, one in _NOT_WANTED.items() if any(name.endswith(end) for name in buffers)
            ]
        return {name for name in names if any(re.search(one, name) for one in patterns)}

    def _converted(self, found: Mapping[str, Values], where: str) -> tuple[dict[str, Values], set[str]]:
        """Return values under the names of transformers' model, and the names in files that lead to none."""
        from transformers.conversion_mapping import get_model_conversion_mapping  # the model is its
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )

        model: Any = self._base
        mapping = get_model_conversion_mapping(model)
        renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
        converters = [one for one in mapping if isinstance(one, WeightConverter)]
        of_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
        prefix, wanted = model.base_model_prefix, self._shape_of
        values: dict[str, Values] = {}
        unexpected: set[str] = set()
        conversions: dict[str, Any] = {}
        for key in sorted(found, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, prefix, wanted)
            if name not in wanted and key in wanted:  # it has the name that is wanted already
                name, pattern = rename_source_key(key, [], [], prefix, wanted)
            if name not in wanted:
                unexpected.add(key)
            elif pattern is None:
                values.setdefault(name, found[key])
            else:
                conversion = conversions.setdefault(name, deepcopy(of_pattern[pattern]))
                conversion.add_tensor(name, key, pattern, FileTensor(found[key]))
        shapes = _Shapes(model, self._shape_of)
        for name, conversion in conversions.items():
            keys = sorted(key for keys in conversion.layer_targets.values() for key in keys)
            try:
                made = conversion.convert(name, model=shapes, config=model.config)
            except Exception as error:  # transformers' operations and torch's raise what they like
                more = f" and {len(keys) - _LISTED} more" if len(keys) > _LISTED else ""
                raise CheckpointError(
                    f"{where}: '{name}' of the model is made of {', '.join(keys[:_LISTED])}{more}, which do "
                    f"not fit together: {type(error).__name__}: {error}"
                ) from error
            for target, value in made.items():
                one = value[0] if isinstance(value, list) else value
                if target in wanted and isinstance(one, FileTensor):
                    values[target] = one.source
                else:
                    unexpected.update(keys)
        return values, unexpected


def match_files(training: Training, names: Names) -> FileNames:
    """Return the way from names in files to those of an engine's whole model."""
    shapes = {
        name: sub_buffer.whole_shape(index)
        for unit in training.model.units
        for sub_buffer in unit.sub_buffers
        for index in range(len(sub_buffer.members))
        for name in sub_buffer.true_names(index)
    }
    shapes |= {name: tuple(getattr(one, "shape", ())) for name, one in training.beside_units().items()}
    # other stages' layers, whose shapes are of no use here
    shapes = {name: shapes.get(name, ()) for name in names.parameters | names.buffers}
    aliases = {name: first for name, first in training.aliases().items() if first in shapes}
    return FileNames(training.module, shapes=shapes, aliases=aliases)


class _Shapes:
    """A model as transformers' conversions ask it for shapes: those of whole tensors."""

    def __init__(self, model: nn.Module, shape_of: Mapping[str, tuple[int, ...]]) -> None:
        self._model, self._shape_of = model, shape_of

    def get_parameter(self, name: str) -> Tensor:
        return torch.empty(self._shape_of[name], device="meta")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def is_pretrained_model(model: nn.Module) -> bool:
    """Whether it is a model of transformers, which is not imported for it."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(model, modeling.PreTrainedModel)
