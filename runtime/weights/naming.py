"""Names of tensors when they come out, and what is made of several tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from .held import HeldTensor
from .out_plan import Conversion

Rename = Callable[[str], str | None]


class Naming(Protocol):
    """The way from the model's tensors to those that come out."""

    joins_dtypes: bool  # what one unit has of all dtypes is gathered together

    def conversions(self, groups: Sequence[Sequence[HeldTensor]]) -> list[tuple[Conversion, ...]]:
        """Return the conversions of each group.

        Errors: ConfigError for what cannot be named
        """

    def convert(self, conversion: Conversion, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors that `conversion.outs` names, made of its sources."""


class Renamed:
    """Tensors under other names, as they are."""

    joins_dtypes = False

    def __init__(self, rename: Rename = lambda name: name) -> None:
        """`rename` returns the new name, or None for a tensor that is left out."""
        self._rename = rename

    def conversions(self, groups: Sequence[Sequence[HeldTensor]]) -> list[tuple[Conversion, ...]]:
        """Return a conversion for each tensor; for several where ranks use one name for theirs."""
        return [
            tuple(
                Conversion(sources=one.sources, outs=outs)
                for one in group
                if (outs := {new: one.spec for name in one.names if (new := self._rename(name)) is not None})
            )
            for group in groups
        ]

    def convert(self, conversion: Conversion, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors under their new names."""
        return {new: value for name, value in tensors.items() if (new := self._rename(name)) is not None}
