"""Long tables of cases: a few of them in `make test`, the others only in `make test-exhaustive`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def few(rows: Iterable[Any], is_kept: Callable[..., bool]) -> list[Any]:
    """All rows, for `pytest.mark.parametrize`; those that are not kept have the marker `exhaustive`.

    `is_kept` gets a row's values as arguments.
    """
    made = []
    for row in rows:
        values = row if type(row) is tuple else (row,)  # a named tuple is one value
        made.append(row if is_kept(*values) else pytest.param(*values, marks=pytest.mark.exhaustive))
    return made
