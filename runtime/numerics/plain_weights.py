"""The weights of a plain engine, with the calls of an engine's `Weights`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..checkpoint.export.output_plan import Spec
from ..weights.held import HeldTensor
from ..weights.model_names import make_naming
from ..weights.naming import Naming, Rename


class PlainWeights:
    """Weights of a model that every rank has whole."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the module's state_dict."""
        return self._module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool, **more: Any) -> Any:
        """Load weights into the module."""
        return self._module.load_state_dict(state_dict, strict)

    def load_by(self, load: Callable[..., object], state_dict: Mapping[str, Any]) -> None:
        """Have `load(src=state_dict, dst=module)` write the weights."""
        with torch.no_grad():
            load(src=state_dict, dst=self._module)

    def naming(self, names: str | Rename, *, merges: bool, only_trainable: bool) -> Naming:
        """Return what these arguments of `engine.weights()` ask for."""
        return make_naming(self._module, names, merges=merges, only_trainable=only_trainable)

    def one_pass(
        self, naming: Naming, *, left_out: Collection[str], to: str
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and tensors, on rank 0 alone if it goes `to` the "first"."""
        if to == "first" and dist.get_rank():
            return
        state = {name: one for name, one in self._module.state_dict().items() if name not in left_out}
        held = [
            HeldTensor((name,), Spec(tuple(one.shape), one.dtype), beside=one) for name, one in state.items()
        ]
        for conversion in naming.conversions([held])[0]:
            yield from naming.convert(conversion, {name: state[name] for name in conversion.sources}).items()

    def not_trained(self) -> set[str]:
        """Return the names of all that an optimizer does not change."""
        return self.frozen() | {name for name, _ in self._module.named_buffers()}

    def frozen(self) -> set[str]:
        """Return the names of the parameters that need no gradient."""
        return {name for name, param in self._module.named_parameters() if not param.requires_grad}

    def consolidated_state_dict(self, left_out: set[str]) -> dict[str, Any] | None:
        """Return the module's state_dict on rank 0, None on other ranks."""
        if dist.get_rank():
            return None
        return {name: value for name, value in self._module.state_dict().items() if name not in left_out}
