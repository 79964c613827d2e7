"""Numbers in float64 with a bound of what float32 may have done to them: one rounding for each operation.

A result in float32 of the same formula must lie within `error` of `value`, element by element.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ROUNDING = 2.0**-24  # half a unit in the last place of float32
UNDERFLOW = 2.0**-149  # and what is lost below its normal numbers
# The formula may be written another way: a factor taken out, a quotient turned round. Twice as many
# operations, at most.
OTHER_ORDER = 2.0


@dataclass(frozen=True, slots=True)
class Bounded:
    value: Tensor  # float64
    error: Tensor  # float64, at least 0

    @staticmethod
    def exact(value: Tensor) -> Bounded:
        return Bounded(value.detach().double().clone(), torch.zeros(value.shape, dtype=torch.float64))

    @staticmethod
    def constant(value: float) -> Bounded:
        """A coefficient, rounded once."""
        number = torch.tensor(value, dtype=torch.float64)
        return Bounded(number, number.abs() * ROUNDING * OTHER_ORDER)

    def __add__(self, other: Bounded) -> Bounded:
        return _rounded(self.value + other.value, self.error + other.error)

    def __sub__(self, other: Bounded) -> Bounded:
        return _rounded(self.value - other.value, self.error + other.error)

    def __mul__(self, other: Bounded) -> Bounded:
        error = self.value.abs() * other.error + other.value.abs() * self.error + self.error * other.error
        return _rounded(self.value * other.value, error)

    def __truediv__(self, other: Bounded) -> Bounded:
        least = other.value.abs() - other.error
        assert bool((least > 0).all())
        quotient = self.value / other.value
        return _rounded(quotient, (self.error + quotient.abs() * other.error) / least)

    def sqrt(self) -> Bounded:
        root = self.value.sqrt()
        error = torch.where(root > 0, self.error / root.clamp_min(1e-300), self.error.sqrt())
        return _rounded(root, torch.minimum(error, self.error.sqrt()))

    def check(self, actual: Tensor, *, unit: float = 0.0) -> None:
        """Every element lies within its bound; `unit` is the half unit in the last place of a dtype
        it was rounded to.
        """
        difference = (actual.detach().double() - self.value).abs()
        allowed = self.error + unit * (self.value.abs() + self.error) + (2.0**-25 if unit else 0.0)
        assert bool((difference <= allowed).all()), f"{(difference / allowed).max()} of what is allowed"


def _rounded(value: Tensor, error: Tensor) -> Bounded:
    return Bounded(value, error + OTHER_ORDER * (ROUNDING * (value.abs() + error) + UNDERFLOW))
