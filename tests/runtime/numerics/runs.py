"""Two runs of one training, as `dslaunch numerics` makes them, in the processes of the tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dslaunch.runtime.environment import CONFIGURED, PLAIN
from dslaunch.runtime.numerics.compare import Comparison, compare
from dslaunch.runtime.numerics.dropout import turn_on
from dslaunch.runtime.numerics.report import lines_of
from tests.runtime.ranks import Ranks

Training = Callable[..., Any]
MANY_STEPS = 99  # more than a training takes, so that its process goes on


def compared(
    ranks: Ranks, training: Training, *args: Any, folder: Path, size: int = 2, reference: str = PLAIN
) -> Comparison:
    """The comparison of `training(rank, *args)` on so many ranks."""
    for part in (CONFIGURED, reference):
        ranks(in_part, training, part, str(folder), args, world_size=size)
    result = compare(str(folder), reference)
    print(*lines_of(result, reference), sep="\n")
    return result


def in_part(rank: int, training: Training, part: str, folder: str, args: tuple[Any, ...]) -> None:
    with _variable("DSLAUNCH_NUMERICS", f"{part}:{MANY_STEPS}:{folder}"):
        try:
            training(rank, *args)
        finally:
            turn_on()


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
