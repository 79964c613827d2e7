"""The tensors of a model without what PEFT has put around it, and what makes each of them.

PEFT puts layers of its own around layers of the model, and calls what was there `base_layer`; a module of
`modules_to_save` becomes two, `original_module` and the trained one. Merging is left to PEFT: its layer is
asked to merge a stand-in of itself, which has the gathered tensors, so nothing of the model is written.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint.export.output_plan import Spec
from ..errors import ConfigError
from ..zero.parameters.freed_parameter import FreedParameter
from .held import HeldTensor

_ADAPTED = "peft.tuners.tuners_utils", "BaseTunerLayer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """Tensors of the base model, by their names there, and what they are made of."""

    sources: Mapping[str, Spec]
    outs: Mapping[str, Spec]
    layer: str = ""  # name of the layer that merges them; empty: they are the sources themselves


class BaseModel:
    """A module, or what PEFT has wrapped."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        wrapper: Any = module
        self.peft = wrapper if _is_of("peft.peft_model", "PeftModel", module) else None
        self.base: nn.Module = module if self.peft is None else wrapper.get_base_model()
        names = {id(one): name for name, one in module.named_modules()}
        self._prefix = f"{names[id(self.base)]}." if self.peft is not None else ""
        self._layers = _outermost(name for name, one in module.named_modules() if _is_of(*_ADAPTED, one))
        self._replaced = {
            f"{name}.": f"{name}.modules_to_save.{one.active_adapters[0]}."
            for name, one in module.named_modules()
            if _is_of("peft.utils.other", "ModulesToSaveWrapper", one) and one.active_adapters
        }

    @property
    def replaced(self) -> tuple[str, ...]:
        """Return the names of the modules that PEFT trains beside adapters."""
        return tuple(name.removesuffix(".") for name in self._replaced)

    @property
    def has_adapters(self) -> bool:
        """Whether there is anything of PEFT's."""
        return bool(self.peft is not None or self._layers)

    def name(self, name: str) -> str | None:
        """Return what the base model calls a tensor; None if it has none, as of an adapter's."""
        layer = self.layer_of(name)
        if layer is not None and not name.startswith(f"{layer}.base_layer."):
            return None
        for module, trained in self._replaced.items():
            if name.startswith(module):
                if not name.startswith(trained):
                    return None
                name = module + name.removeprefix(trained)
        return name.removeprefix(self._prefix).replace(".base_layer.", ".")

    def layer_of(self, name: str) -> str | None:
        """Return the name of the adapted layer that has this tensor."""
        return next((layer for layer in self._layers if name.startswith(f"{layer}.")), None)

    def made(self, group: Sequence[HeldTensor], *, merges: bool) -> list[Made]:
        """Return what a group makes; `merges`: adapters are merged into their layers.

        Errors: ConfigError for a layer that cannot be merged
        """
        found: list[Made] = []
        layers: dict[str, dict[str, Spec]] = {}
        for held in group:
            layer = self.layer_of(held.names[0]) if merges else None
            if layer is not None:
                layers.setdefault(layer, {}).update(held.sources)
                continue
            outs = {base: held.spec for name in held.names if (base := self.name(name)) is not None}
            if outs:
                found.append(Made(sources=held.sources, outs=outs))
        return found + [self._merged(layer, sources) for layer, sources in layers.items()]

    def _merged(self, name: str, sources: Mapping[str, Spec]) -> Made:
        layer = self.module.get_submodule(name)
        for own, param in layer.named_parameters():
            problem = instead = ""
            if type(param) not in (nn.Parameter, FreedParameter) or not param.is_floating_point():
                problem = f"is {type(param).__name__} of {param.dtype}, which PEFT merges in place only"
                instead = "; save them, and merge in one process with the base, by PEFT's merge_and_unload()"
            elif f"{name}.{own}" not in sources:
                problem = "is tied to a parameter of another unit, which is not gathered with it"
            if problem:
                raise ConfigError(
                    f"engine.weights(merge_lora=True): '{name}.{own}' {problem}; give merge_lora=False, "
                    f"which leaves adapters apart{instead}"
                )
        outs = {base: spec for one, spec in sources.items() if (base := self.name(one)) is not None}
        return Made(sources=sources, outs=outs, layer=name)

    @torch.no_grad()
    def make(self, made: Made, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the base model's tensors."""
        if made.layer:
            prefix = f"{made.layer}."
            stand_in = _stand_in(self.module.get_submodule(made.layer), tensors, prefix)
            with torch.autocast(next(iter(tensors.values())).device.type, enabled=False):
                for layer in reversed(list(stand_in.modules())):
                    if _is_of(*_ADAPTED, layer):
                        layer.merge(safe_merge=True)
            tensors = {prefix + name: param.detach() for name, param in stand_in.named_parameters()}
        return {base: tensors[name] for name in made.sources if (base := self.name(name)) is not None}

    def saved_names(self, names: Sequence[str]) -> dict[str, str]:
        """Return the names under which PEFT saves the tensors of the active adapter, by their names here."""
        if self.peft is None:
            return {}
        from peft import get_peft_model_state_dict  # only where PEFT has made the model

        marks = {name: torch.empty(0, device="meta") for name in names}
        saved = get_peft_model_state_dict(
            self.peft,
            state_dict=dict(marks),
            adapter_name=self.peft.active_adapter,
            save_embedding_layers=False,
        )
        name_of = {id(mark): name for name, mark in marks.items()}
        return {name_of[id(mark)]: name for name, mark in saved.items()}


def _stand_in(module: nn.Module, tensors: Mapping[str, Tensor], prefix: str) -> Any:
    """Return a module with the state of this one and other parameters."""
    new = object.__new__(type(module))
    shared = {
        key: copy.copy(value) if isinstance(value, (list, dict)) else value
        for key, value in vars(module).items()
    }
    vars(new).update(shared)
    vars(new)["_parameters"] = {
        name: None if param is None else nn.Parameter(tensors[prefix + name], requires_grad=False)
        for name, param in module._parameters.items()
    }
    vars(new)["_modules"] = {
        name: None if child is None else _stand_in(child, tensors, f"{prefix}{name}.")
        for name, child in module._modules.items()
    }
    return new


def _outermost(names: Any) -> tuple[str, ...]:
    found: list[str] = []
    for name in names:  # a module comes before those inside it
        if not any(name.startswith(f"{outer}.") for outer in found):
            found.append(name)
    return tuple(found)


def _is_of(module_name: str, kind: str, value: object) -> bool:
    """Whether the value is of a class of a library, which is not imported for it."""
    module = sys.modules.get(module_name)
    return module is not None and isinstance(value, getattr(module, kind, ()))
