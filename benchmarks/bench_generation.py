"""Tokens a second of a model that generates: on CPUs, over gloo.

    python benchmarks/bench_generation.py [FOLDER] [--short] [--publish]

A Llama in float32 on two ranks, each with prompts of its own, greedy, the tools taking turns: transformers
with the whole model on each rank; dslaunch and DeepSpeed at ZeRO stage 3, unit by unit, dslaunch with
parameters that are gathered once, too; and both packages' init_inference(). Every tool has to give the same
tokens. Then a larger model on one rank whose parameters lie on the disk of FOLDER (default: a temporary one
beside this checkout), beside the time in which the disk engine alone reads as many bytes of one file; and
what it takes to load a folder of 4 GB of weights, see loading.py.
--short takes small models and one round. Nothing here fails on a time. --publish writes the tables into
docs/reference/benchmarks.md.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.generation_worker import Taken, Turn
from benchmarks.guide_section import CHECKOUT, arguments, conditions, left_out, paragraphs, publish, table
from benchmarks.launch_peers import why_no_deepspeed
from benchmarks.loading import SHARD_MB, loading, make_folder, rows as loading_rows
from benchmarks.team import Team

WORKER = str(Path(__file__).with_name("generation_worker.py"))
COMMAND = "make bench-generation"
RANKS = 2
ROUNDS = 5
TOOLS = (
    "transformers",
    "dslaunch, gathered",
    "dslaunch, unit by unit",
    "DeepSpeed, unit by unit",
    "dslaunch, init_inference",
    "DeepSpeed, init_inference",
)
GOALS = (  # tool, peer, at least so many of its tokens
    ("dslaunch, gathered", "transformers", 0.97),
    ("dslaunch, unit by unit", "DeepSpeed, unit by unit", 2.0),
    ("dslaunch, init_inference", "transformers", 0.97),
    ("dslaunch, init_inference", "DeepSpeed, init_inference", 1.0),
)
DISK_GOAL = 0.8
GIGABYTES = {False: 4.0, True: 0.1}  # --short -> size
LOADS = 3


class Size(NamedTuple):
    """A model, and what it generates."""

    width: int
    blocks: int
    batch: int
    prompt: int
    new: int


IN_MEMORY = {False: Size(512, 8, 4, 16, 64), True: Size(128, 2, 2, 8, 8)}  # --short -> size
ON_DISK = {False: Size(2048, 12, 1, 16, 4), True: Size(256, 2, 1, 8, 2)}


def measure(size: Size, tools: tuple[str, ...], rounds: int) -> tuple[dict[str, list[Taken]], dict[str, str]]:
    """Return the answers of rank 0 by tool, and why others have none."""
    with ExitStack() as ends, tempfile.TemporaryDirectory() as said:
        teams: dict[str, Team] = {}
        for place, tool in enumerate(tools):
            turn = json.dumps(Turn(tool, *size)._asdict())
            teams[tool] = Team(tool, [WORKER, turn], RANKS, Path(said) / f"{place}.rank")
            ends.callback(teams[tool].end)
        taken: dict[str, list[Taken]] = {tool: [] for tool in tools}
        missing: dict[str, str] = {}
        for number in range(rounds + 1):
            for tool, team in teams.items():
                if tool in missing:
                    continue
                try:
                    answer = Taken(**json.loads(team.ask("")[0]))
                except RuntimeError as error:
                    missing[tool] = str(error).strip().splitlines()[-1]
                    continue
                if number:  # the first one compiles and warms
                    taken[tool].append(answer)
    return {tool: found for tool, found in taken.items() if tool not in missing}, missing


def measure_disk(size: Size, folder: str, rounds: int) -> list[Taken]:
    """Errors: RuntimeError if the rank failed"""
    with tempfile.TemporaryDirectory() as said:
        turn = json.dumps(Turn("dslaunch, unit by unit", *size, folder=folder)._asdict())
        team = Team("dslaunch", [WORKER, turn], 1, Path(said) / "rank")
        try:
            return [Taken(**json.loads(team.ask("")[0])) for _ in range(rounds + 1)][1:]
        finally:
            team.end()


def _medians(taken: dict[str, list[Taken]]) -> dict[str, float]:
    return {tool: statistics.median(one.s for one in answers) for tool, answers in taken.items()}


def tool_rows(size: Size, taken: dict[str, list[Taken]]) -> list[tuple[str, ...]]:
    medians = _medians(taken)
    first = next(iter(taken.values()))[0].checksum
    rows = []
    for tool, seconds in medians.items():
        is_equal = all(one.checksum == first for one in taken[tool])
        rate = f"{RANKS * size.batch * size.new / seconds:.0f}"
        rows.append((tool, rate, "yes" if is_equal else "**no**"))
    return rows


def goal_rows(taken: dict[str, list[Taken]]) -> list[tuple[str, ...]]:
    medians = _medians(taken)
    rows = []
    for tool, peer, goal in GOALS:
        if tool in medians and peer in medians:
            ratio = medians[peer] / medians[tool]
            rows.append((tool, peer, f"{ratio:.2f}", f"{goal:g}{'' if ratio >= goal else ' (missed)'}"))
    return rows


def disk_row(size: Size, taken: list[Taken]) -> tuple[str, ...]:
    rate, disk = (
        statistics.median(one.read_bytes / seconds / 1e9 for one, seconds in pairs)
        for pairs in ([(one, one.s) for one in taken], [(one, one.disk_s) for one in taken])
    )
    ratio = rate / disk
    goal = f"{DISK_GOAL:g}{'' if ratio >= DISK_GOAL else ' (missed)'}"
    whole = f"{taken[0].read_bytes / size.new / 1e9:.2f}"
    return whole, f"{rate:.2f}", f"{disk:.2f}", f"{ratio:.2f}", goal


def main() -> None:
    parser = arguments(__doc__, short="small models, one round")
    parser.add_argument("folder", nargs="?", help="on the disk from which parameters are streamed")
    given = parser.parse_args()
    rounds = 1 if given.short else ROUNDS
    no_deepspeed = why_no_deepspeed()
    tools = tuple(tool for tool in TOOLS if not (no_deepspeed and tool.startswith("DeepSpeed")))
    size, large = IN_MEMORY[given.short], ON_DISK[given.short]
    taken, missing = measure(size, tools, rounds)
    rows = tool_rows(size, taken)
    print(*(" | ".join(row) for row in rows), sep="\n", flush=True)
    with tempfile.TemporaryDirectory(prefix="bench-generation-", dir=given.folder or CHECKOUT) as folder:
        streamed = disk_row(large, measure_disk(large, folder, rounds))
    print(" | ".join(streamed), flush=True)
    with tempfile.TemporaryDirectory(prefix="bench-loading-", dir=given.folder or CHECKOUT) as folder:
        num_bytes = make_folder(Path(folder), gigabytes=GIGABYTES[given.short])
        loaded = loading_rows(loading(Path(folder), rounds=min(rounds, LOADS)), num_bytes)
    text = paragraphs(
        f"{conditions()}; medians of {rounds} rounds. {size.blocks} layers {size.width} wide, {size.batch} "
        f"prompts of {size.prompt} tokens on each of {RANKS} ranks, {size.new} new tokens:",
        table(("", "tokens a second", "the same tokens"), rows),
        table(("", "beside", "times as many tokens a second", "goal"), goal_rows(taken)),
        f"Parameters on a disk: {large.blocks} layers {large.width} wide, {large.new} new tokens, GB/s "
        "beside what the disk engine alone reads in the same minute:",
        table(("GB of parameters", "generating", "disk", "ratio", "goal"), [streamed]),
        f"A folder of {num_bytes / 1e9:.1f} GB in files of {SHARD_MB} MB, loaded; the memory is a process's "
        "own, without mapped files:",
        table(("", "ranks", "seconds", "MB of a rank at its peak", "MB of its part"), loaded),
        *(f"{tool} is not there: {why}" for tool, why in missing.items()),
        left_out(no_deepspeed),
    )
    publish(COMMAND, text, is_wanted=given.publish)


if __name__ == "__main__":
    main()
