"""Answers to a program that asks for values which nobody computes, and the lines that asked."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_OWN = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)


class Guess(float):
    """A number of a tensor without values, in Python. A program that compares it decides by a guess."""

    guesses: Guesses

    def _note(self) -> None:
        self.guesses.note("a number of a tensor decides", "as if it were 1")

    def __lt__(self, other: object) -> Any:
        self._note()
        return float.__lt__(self, other)  # type: ignore[operator]

    def __le__(self, other: object) -> Any:
        self._note()
        return float.__le__(self, other)  # type: ignore[operator]

    def __gt__(self, other: object) -> Any:
        self._note()
        return float.__gt__(self, other)  # type: ignore[operator]

    def __ge__(self, other: object) -> Any:
        self._note()
        return float.__ge__(self, other)  # type: ignore[operator]


class Guesses:
    """The guesses of one run: by line of the program, what was asked and what was answered."""

    def __init__(self) -> None:
        self.lines: dict[str, str] = {}

    def note(self, asked: str, answer: str) -> None:
        """Note a guess with the line of the program that asks, unless a part of torch or the engine does."""
        place = _place()
        if place is not None:
            self.lines.setdefault(place, f"{asked}; the plan goes on {answer}")

    def scalar(self, dtype: torch.dtype) -> Any:
        """Return a number for one that is not known."""
        if dtype is torch.bool:
            return self.truth("a tensor of flags decides", False)
        return 1.0 if dtype.is_floating_point else 1

    def number(self, dtype: torch.dtype) -> Any:
        """Return what Tensor.item() gives for a number that is not known."""
        if not dtype.is_floating_point:
            return self.scalar(dtype)
        guess = Guess(1.0)
        guess.guesses = self
        return guess

    def truth(self, asked: str, answer: bool) -> bool:
        """Return the answer, and note it."""
        self.note(asked, f"as if it were {answer}")
        return answer

    def shaped(self, mode: Any, func: Any, args: Any, kwargs: Any, device: torch.device) -> Any:
        """Return a result whose shape depends on values that are not known: as large as it can be."""
        name = func._schema.name.partition("::")[2]
        first: Tensor = args[0]
        self.note(f"the values of a tensor decide how large a result is ({name})", "with the largest")
        if name == "nonzero":
            places = torch.arange(first.numel(), device="cpu")
            shape = first.shape
            if not shape:
                return mode.make(torch.zeros(1, 0, dtype=torch.int64, device="cpu"), device)
            found = torch.stack([one.reshape(-1) for one in torch.unravel_index(places, shape)], dim=1)
            return mode.make(found, device)
        if name == "masked_select":
            return mode.run(torch.ops.aten.reshape.default, (first.expand(args[1].shape), [-1]), {})
        raise NotImplementedError(f"{name} of a tensor whose values are not known")


def _place() -> str | None:
    """Return file and line of the program that asks; None where the engine asks for itself."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_TORCH, "<")):
            if file.startswith(_OWN) and "/plan/" not in file:
                return None
            if not file.startswith(_OWN):
                return f"{file}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return None
