"""Positions of whole sequences that are divided over ranks, and masks made of them."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

HIDDEN = -1  # a hidden token's position p is stored as HIDDEN - p


class WholePositions:
    """Positions of the whole sequences in one forward. Results are kept: on a GPU the host waits for each
    look at values, and a mask is as large as the square of a sequence.
    """

    def __init__(self, positions: Tensor) -> None:
        """Shapes: [batch, positions]; values below 0 are hidden tokens"""
        self._positions = positions
        self._masks: dict[tuple[bool, int | None], Tensor] = {}

    @cached_property
    def seen(self) -> Tensor:
        """True at each token that may be seen. Shapes: [batch, positions] of bool."""
        return self._positions >= 0

    @cached_property
    def places(self) -> Tensor:
        """The positions, of hidden tokens too."""
        return self._positions.where(self.seen, HIDDEN - self._positions)

    @property
    def has_hidden(self) -> bool:
        """True if there is a hidden token."""
        return self._kind[0]

    @cached_property
    def _begins(self) -> Tensor:
        """For each token after the first: True if it begins another document."""
        begins = self.places[:, 1:] != self.places[:, :-1] + 1
        # Positions of padding have no meaning. A token after padding continues the document if its position
        # is higher than that of the last token before: a program may count the padding or not.
        numbers = torch.arange(self.seen.shape[1], device=self.seen.device)
        index = torch.where(self.seen, numbers, -1).cummax(dim=1).values
        last = self.places.gather(1, index.clamp(min=0)).where(index >= 0, HIDDEN)
        begins = torch.where(self.seen[:, :-1], begins, self.places[:, 1:] <= last[:, :-1])
        return begins & self.seen[:, 1:]

    @cached_property
    def _kind(self) -> tuple[bool, bool]:
        """Return whether some tokens are hidden, and whether there are several documents; the host waits for
        it.
        """
        has_hidden, is_packed = torch.stack([~self.seen.all(), self._begins.any()]).tolist()
        return has_hidden, is_packed

    @property
    def _is_packed(self) -> bool:
        return self._kind[1]

    def mask(self, *, is_causal: bool, window: int | None) -> Tensor | None:
        """Return which token sees which; None if `is_causal` alone describes it.

        Shapes: [batch, 1, positions, positions] of bool
        """
        if window is not None and window >= self._positions.shape[1]:
            window = None
        if not self.has_hidden and not self._is_packed and window is None:
            return None
        key = (is_causal, window)
        if key not in self._masks:
            self._masks[key] = self._make_mask(is_causal, window)
        return self._masks[key]

    def _make_mask(self, is_causal: bool, window: int | None) -> Tensor:
        document = torch.nn.functional.pad(self._begins.to(torch.int64).cumsum(dim=1), (1, 0))
        mask = document[:, :, None] == document[:, None, :]
        place = torch.arange(self._positions.shape[1], device=self._positions.device)
        if is_causal:
            mask = mask & (place[:, None] >= place[None, :])
        if window is not None:
            mask = mask & (place[:, None] - place[None, :] < window)
        itself = place[:, None] == place[None, :]  # a token that sees nothing would get NaN
        return ((mask & self.seen[:, None, :]) | itself)[:, None]
