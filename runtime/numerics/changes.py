"""Values that change seldom: those that have, since they were last looked at."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import xxhash
from torch import Tensor

from ..strided import bytes_of


class Changes:
    """Digests of values by name, in place of copies of them."""

    def __init__(self) -> None:
        self._digests: dict[str, int] = {}

    def of(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield those that are not what they were at the last call; at the first one, all."""
        for name, value in named:
            digest = xxhash.xxh3_64_intdigest(bytes_of(value))
            if self._digests.get(name) != digest:
                self._digests[name] = digest
                yield name, value
