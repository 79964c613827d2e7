"""Arithmetic in float64 that knows how far float32 can be away from it:
the error is counted operation by operation.

`Rounded(value, error)` stands for every float32 within `error` of `value`. Each operator works out the value
in float64 and adds up what the errors of its operands can do to it and what its own rounding does. A formula
written with it is therefore a reference and its own tolerance.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[np.float64]

# Half a unit in the last place: the largest relative error of one rounding. A little more for float64's own.
HALF_UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
HALF_SMALLEST = {torch.float32: 2.0**-150, torch.bfloat16: 2.0**-134, torch.float16: 2.0**-25}
SLACK = 1 + 2.0**-20


@dataclass(frozen=True, slots=True, eq=False)
class Rounded:
    """[n] numbers that float32 holds within an error; also a coefficient, rounded once."""

    value: Array
    error: Array

    @classmethod
    def exactly(cls, tensor: torch.Tensor) -> Rounded:
        value = tensor.float().numpy().astype(np.float64)
        return cls(value, np.zeros_like(value))

    @classmethod
    def coefficient(cls, number: float) -> Rounded:
        """Worked out in float64 and rounded to float32."""
        return cls(np.asarray(number), np.zeros(())).stored_as(torch.float32)

    def stored_as(self, dtype: torch.dtype) -> Rounded:
        """After one more rounding."""
        size = np.abs(self.value) + self.error
        return Rounded(self.value, (self.error + HALF_UNIT[dtype] * size) * SLACK + HALF_SMALLEST[dtype])

    def __add__(self, other: Rounded) -> Rounded:
        return Rounded(self.value + other.value, self.error + other.error).stored_as(torch.float32)

    def __sub__(self, other: Rounded) -> Rounded:
        return Rounded(self.value - other.value, self.error + other.error).stored_as(torch.float32)

    def __mul__(self, other: Rounded) -> Rounded:
        error = np.abs(self.value) * other.error + np.abs(other.value) * self.error + self.error * other.error
        return Rounded(self.value * other.value, error).stored_as(torch.float32)

    def __truediv__(self, other: Rounded) -> Rounded:
        with np.errstate(divide="ignore", invalid="ignore"):
            value = self.value / other.value
            nearest_zero = np.abs(other.value) - other.error
            error = (self.error + np.abs(value) * other.error) / nearest_zero
        unknown = nearest_zero <= 0
        return Rounded(np.where(unknown, 0, value), np.where(unknown, np.inf, error)).stored_as(torch.float32)

    def sqrt(self) -> Rounded:
        value = np.sqrt(np.maximum(self.value, 0))
        lowest = np.sqrt(np.maximum(self.value - self.error, 0))
        return Rounded(value, value - lowest).stored_as(torch.float32)

    def sign(self) -> Rounded:
        """Anything from -1 to 1 where the error leaves the sign open."""
        is_open = (np.abs(self.value) <= self.error) & (self.error > 0)
        return Rounded(np.sign(self.value), np.where(is_open, 2.0, 0.0))

    def must_hold(self, got: torch.Tensor, name: str) -> None:
        """Fail if an element of `got` is further away than it may be."""
        if got.numel() == 0:
            return
        error = np.abs(got.float().numpy().astype(np.float64) - self.value)
        excess = np.where(np.isnan(error), np.inf, error) - self.error
        worst = int(np.argmax(excess))
        assert excess[worst] <= 0, (
            f"{name}[{worst}]: {got[worst]=}, {self.value[worst]=}, {self.error[worst]=}"
        )
