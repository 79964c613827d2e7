"""Stand-in for DeepSpeed's hooks, which TRL handles while a model generates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn


class Hooks:
    """Takes part when TRL removes and adds hooks around a generation,
    inside GatheredParameters of all parameters.

    DeepSpeed's would gather and free parameters there. Ours (zero/access.py) have nothing to do while
    parameters are held, and notice those that are not. So they stay: there are no hooks to remove, and no
    parameters with users to forget.
    Source: trl 1.16.0 models/utils.py, `remove_hooks` and `add_hooks`
    """

    def __init__(self) -> None:
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    @property
    def module(self) -> Hooks:
        """Return the object that TRL asks for parameters with hooks."""
        return self

    def named_parameters(self, recurse: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """Return none."""
        return iter(())

    def ds_external_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return none."""
        return iter(())

    def _register_deepspeed_module(self, module: object) -> None:
        """Add the hooks again, of which none was removed."""
