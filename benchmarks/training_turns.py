"""Tools that train the same, each in processes of its own, by turns."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from benchmarks.team import TIMEOUT_S, Team

TRAINING = str(Path(__file__).with_name("training_worker.py"))
AGREE = 1e-3  # the losses of some dozens of steps of AdamW, whose roundings differ
QUIET_S = 2.0  # a longer wait is explained

# a NamedTuple of numbers with `loss`, the last step's
T = TypeVar("T", bound=tuple[float, ...])


def median_turns(
    worker: Sequence[str], kind: Callable[..., T], num_ranks: int, tools: Sequence[str], *, rounds: int
) -> dict[str, T]:
    """The median turn of each tool, as rank 0 of the worker says it in one line of JSON for each turn.

    Errors: RuntimeError if a rank failed, or the tools did not train the same
    """
    turns, causes = take_turns(worker, kind, num_ranks, tools, rounds=rounds, limit_s=TIMEOUT_S)
    if causes:
        raise RuntimeError("\n".join(causes.values()))
    return turns


def take_turns(
    worker: Sequence[str],
    kind: Callable[..., T],
    num_ranks: int,
    tools: Sequence[str],
    *,
    rounds: int,
    limit_s: float,
) -> tuple[dict[str, T], dict[str, str]]:
    """The median turn of each tool, and, of those that have none, the cause. `worker` is a program and its
    words, behind which it is given the tool.

    A tool fails by itself: if a rank of it ends, if all that it does takes longer than `limit_s`, or if its
    last loss is not that of the others.
    """
    turns: dict[str, list[T]] = {tool: [] for tool in tools}
    last: dict[str, float] = {}
    causes: dict[str, str] = {}
    where = ", ".join((*worker[1:], f"{num_ranks} ranks"))
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        teams: dict[str, Team] = {}

        def ask(tool: str, what: str) -> str | None:
            notice = threading.Timer(QUIET_S, _say, (f"{where}: {tool}: {what}",))
            notice.start()
            try:
                return teams[tool].ask("")[0]
            except (RuntimeError, OSError) as error:
                causes[tool] = str(error)
                teams.pop(tool).end()
                _say(f"{where}: {error}")
                return None
            finally:
                notice.cancel()

        for tool in tools:  # the next one starts when this one has warmed up
            said = Path(folder) / tool.replace("/", "-")
            teams[tool] = Team(tool, [*worker, tool], num_ranks, said, limit_s=limit_s)
            stack.callback(teams[tool].end)
            ask(tool, "start and first turn")
        for number in range(rounds):
            for tool in list(teams):
                answer = ask(tool, f"round {number + 1} of {rounds}")
                if answer is not None:
                    said_numbers = json.loads(answer)
                    turns[tool].append(kind(**said_numbers))
                    last[tool] = said_numbers["loss"]
    trained = {tool: last[tool] for tool in tools if tool in last and tool not in causes}
    for tool, loss in trained.items():
        usual = statistics.median(trained.values())
        if not abs(loss - usual) <= AGREE:
            causes[tool] = f"{tool}: did not train as the others: losses of the last step are {trained}"
    return {
        tool: kind(*(statistics.median(values) for values in zip(*turns[tool], strict=True)))
        for tool in trained
        if tool not in causes
    }, causes


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
