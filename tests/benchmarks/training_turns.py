"""Tools that train the same, each in processes of its own, by turns."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from tests.benchmarks.team import Team

AGREE = 1e-3  # the losses of some dozens of steps of AdamW, whose roundings differ

# a NamedTuple of numbers with `loss`, the last step's
T = TypeVar("T", bound=tuple[float, ...])


def median_turns(
    worker: Path, kind: Callable[..., T], shape: str, num_ranks: int, tools: Sequence[str], *, rounds: int
) -> dict[str, T]:
    """The median turn of each tool, as rank 0 of `worker` says it in one line of JSON for each turn.

    Errors: RuntimeError if a rank failed, or the tools did not train the same
    """
    turns: dict[str, list[T]] = {tool: [] for tool in tools}
    last: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        teams = []
        for tool in tools:  # the next one starts when this one has warmed up
            teams.append(Team(worker, tool, shape, num_ranks, Path(folder) / tool))
            stack.callback(teams[-1].end)
            teams[-1].ask("")
        for _ in range(rounds):
            for team in teams:
                said = json.loads(team.ask("")[0])
                turns[team.tool].append(kind(**said))
                last[team.tool] = said["loss"]
    if max(last.values()) - min(last.values()) > AGREE:
        raise RuntimeError(f"{shape}, {num_ranks} ranks: the tools did not train the same: {last}")
    return {
        tool: kind(*(statistics.median(values) for values in zip(*seen, strict=True)))
        for tool, seen in turns.items()
    }
