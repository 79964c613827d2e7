"""The names that from_pretrained() reads, and the tensors that they stand for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint.export.output_plan import Spec
from ..errors import ConfigError
from .base_tensors import BaseModel, Made
from .file_names import is_pretrained_model
from .held import HeldTensor
from .naming import Naming, Rename, Renamed
from .out_plan import Conversion

Specs = dict[str, Spec]
_INSTEAD = "give names='module', or a function from a name to another one"


class ModelNames:
    """Names of the model inside PEFT's layers: those of transformers' files, or those of its modules."""

    def __init__(
        self, module: nn.Module, *, rename: Rename | None, merges: bool, only_trainable: bool = False
    ) -> None:
        """`rename` is applied to the names of modules; None: tensors are those of transformers' files.
        `merges`: adapters are merged into their layers.

        Errors: ConfigError for a model that has no such names
        """
        self._model, self._rename, self._merges = BaseModel(module), rename, merges
        self._is_adapter_alone = only_trainable and self._model.peft is not None
        self.joins_dtypes = merges  # adapters are often float32
        if rename is None:
            _check_is_pretrained(self._model.base)
        if merges and only_trainable:
            raise ConfigError(
                "engine.weights(merge_lora=True, only_trainable=True): merged weights are those of the whole "
                "model; give one of the two"
            )
        if merges and not self._model.has_adapters:
            raise ConfigError(
                f"engine.weights(merge_lora=True): {type(module).__name__} has no layer of PEFT; leave it out"
            )
        self._made: dict[tuple[str, ...], tuple[Made, ...]] = {}  # by the sources of a conversion
        self._saved: dict[str, str] = {}  # an adapter's names, and those under which PEFT saves it

    def conversions(self, groups: Sequence[Sequence[HeldTensor]]) -> list[tuple[Conversion, ...]]:
        """Return the conversions of each group. What transformers converts is found on the meta device.

        Errors: ConfigError for what cannot be merged, or is made of tensors of several units
        """
        names = [name for group in groups for held in group for name in held.names]
        self._saved = {} if self._merges else self._model.saved_names(names)
        made = [
            [] if self._is_adapter_alone else self._model.made(group, merges=self._merges) for group in groups
        ]
        expected = self._converted([one for group in made for one in group])
        found = [self._by_part(group, expected) for group in made]
        outs = {name: spec for group in found for one in group for name, spec in one.outs.items()}
        missing = {name for name in expected.keys() | outs.keys() if expected.get(name) != outs.get(name)}
        if missing:
            raise ConfigError(
                f"engine.weights(names='hf'): '{min(missing)}' of the model's files is made of tensors of "
                f"several units, which are not gathered together; {_INSTEAD}"
            )
        return [(*base, *self._of_adapter(group)) for base, group in zip(found, groups, strict=True)]

    def convert(self, conversion: Conversion, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors under their names."""
        names = tuple(conversion.sources)
        if names not in self._made:
            return {self._saved[name]: value for name, value in tensors.items()}
        base: dict[str, Tensor] = {}
        for made in self._made[names]:
            base |= self._model.make(made, {name: tensors.pop(name) for name in made.sources})
        return self._named(base)

    def _of_adapter(self, group: Sequence[HeldTensor]) -> Iterator[Conversion]:
        for held in group:
            outs = {
                self._saved[name]: held.spec
                for name in held.names
                if name in self._saved and (self._is_adapter_alone or self._model.name(name) is None)
            }
            if outs:
                yield Conversion(sources=held.sources, outs=outs)

    def _by_part(self, made: Sequence[Made], expected: Specs) -> list[Conversion]:
        """Return conversions of as few tensors each as make what all of them together make."""
        wanted = {name: spec for name, spec in self._converted(made).items() if expected.get(name) == spec}
        level = 0
        while True:
            parts = _parts(made, level)
            outs = [self._converted(part) for part in parts]
            if len(parts) < 2 or {name: spec for one in outs for name, spec in one.items()} == wanted:
                break
            level += 1
        found = []
        for part, specs in zip(parts, outs, strict=True):
            sources = {name: spec for one in part for name, spec in one.sources.items()}
            self._made[tuple(sources)] = tuple(part)
            found.append(Conversion(sources=sources, outs=specs))
        return [one for one in found if one.outs]

    def _converted(self, made: Sequence[Made]) -> Specs:
        """Return what these come to."""
        tensors = {
            name: torch.empty(spec.shape, dtype=spec.dtype, device="meta")
            for one in made
            for name, spec in one.outs.items()
        }
        try:
            return {name: Spec(tuple(one.shape), one.dtype) for name, one in self._named(tensors).items()}
        except (RuntimeError, ValueError, KeyError, IndexError):  # transformers' for a part of what it wants
            return {}

    def _named(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if self._rename is not None:
            return {new: value for name, value in tensors.items() if (new := self._rename(name)) is not None}
        from transformers.core_model_loading import revert_weight_conversion  # if the model is its

        model: Any = self._model.base
        left_out = model._keys_to_ignore_on_save or ()
        kept = {name: value for name, value in tensors.items() if name not in left_out}
        tensors.clear()
        named: dict[str, Tensor] = revert_weight_conversion(model, kept)
        return named


def _parts(made: Sequence[Made], level: int) -> list[list[Made]]:
    """Return these apart at level 0, at level 1 those together that have one parent in their names, and so
    on.
    """
    parts: dict[object, list[Made]] = {}
    for place, one in enumerate(made):
        parents = tuple(next(iter(one.outs)).split(".")[:-level]) if level else place
        parts.setdefault(parents, []).append(one)
    return list(parts.values())


def make_naming(module: nn.Module, names: str | Rename, *, merges: bool, only_trainable: bool) -> Naming:
    """Return what `engine.weights()` asks for; see there.

    Errors: ConfigError
    """
    if isinstance(names, str) and names not in ("module", "hf"):
        raise ConfigError(
            f"engine.weights(names={names!r}): write 'module', 'hf', or give a function from a name to "
            "another one"
        )
    rename: Rename = (lambda name: name) if isinstance(names, str) else names
    if names != "hf" and not merges:
        return Renamed(rename)
    return ModelNames(
        module, rename=None if names == "hf" else rename, merges=merges, only_trainable=only_trainable
    )


def _check_is_pretrained(model: nn.Module) -> None:
    if not is_pretrained_model(model):
        raise ConfigError(
            f"engine.weights(names='hf'): {type(model).__name__} is no model of transformers, so it has no "
            f"names that from_pretrained() reads; {_INSTEAD}"
        )
