"""Saving and loading a checkpoint, beside DeepSpeed, fully_shard with torch.distributed.checkpoint, and a
plain write of as many bytes.

    python benchmarks/bench_checkpoint.py [--short] [--publish]

Each tool has two processes of its own with the same model and AdamW, and they take turns. Nothing here fails
on a time. --short takes a small model and few rounds. --publish writes the tables into
docs/reference/benchmarks.md.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.checkpoint_worker import HAS_ASYNC, RAW, READY, SHAPES, TAG, UNIVERSAL, Turn
from benchmarks.guide_section import arguments, conditions, goal, left_out, paragraphs, publish, table
from benchmarks.launch_peers import why_no_deepspeed
from benchmarks.models import Gpt
from benchmarks.team import Team, environments
from benchmarks.training_worker import numel_of

WORKER = str(Path(__file__).with_name("checkpoint_worker.py"))
COMMAND = "make bench-checkpoint"
OURS = ("dslaunch 2", "dslaunch 3")
PEERS = ("FSDP2", "DeepSpeed 2", "DeepSpeed 3")
NUM_RANKS = 2
ROUNDS = 5
SHORT_ROUNDS = 2
SAVE_GOAL = 1.1  # times a raw write
STALL_GOAL = 0.1  # part of a save for which training waits
# Bytes per parameter: the 16-bit value, the float32 master, and AdamW's two states;
# these two leave out the first.
BYTES_PER_PARAMETER = {**dict.fromkeys((RAW, *OURS, "DeepSpeed 2"), 14), "FSDP2": 12, "DeepSpeed 3": 12}
TIMEOUT_S = 900

Found = dict[str, dict[str, Turn]]  # tool -> work -> turn


def _take_turn(team: Team, what: str, folder: Path) -> Turn:
    """The slowest rank's times, and the largest memory."""
    turns = [Turn(**json.loads(answer)) for answer in team.ask(f"{what} {folder}")]
    return Turn(*(max(values) for values in zip(*turns, strict=True)))


@contextmanager
def _team(tool: str, shape: str, num_ranks: int, folder: Path) -> Iterator[Team]:
    team = Team(tool, [WORKER, shape, tool], num_ranks, folder / tool.replace(" ", "-"))
    try:
        team.ask(READY)
        yield team
    finally:
        team.end()


def measure(shape: str, tools: Sequence[str], rounds: int, root: Path) -> tuple[Found, dict[str, int]]:
    """Median turns of each tool, and the bytes of a checkpoint of each, which stay in `root`/tool."""
    turns: dict[str, dict[str, list[Turn]]] = {tool: {} for tool in tools}
    with ExitStack() as stack:
        teams = [stack.enter_context(_team(tool, shape, NUM_RANKS, root)) for tool in tools]
        for number in range(rounds + 1):
            for team in teams:
                folder = root / f"checkpoints-{team.tool.replace(' ', '-')}"
                for what in ("async", "save", "load") if team.tool in HAS_ASYNC else ("save", "load"):
                    if what != "load":
                        shutil.rmtree(folder, ignore_errors=True)
                    os.sync()
                    _leave_page_cache(folder)
                    turn = _take_turn(team, what, folder)
                    if number > 0:  # the first one warms up
                        turns[team.tool].setdefault(what, []).append(turn)
            print(f"round {number} of {rounds}", flush=True)
    medians = {tool: {what: _median(seen) for what, seen in one.items()} for tool, one in turns.items()}
    return medians, {tool: _bytes_in(root / f"checkpoints-{tool.replace(' ', '-')}") for tool in tools}


def _median(seen: list[Turn]) -> Turn:
    return Turn(*(statistics.median(values) for values in zip(*seen, strict=True)))


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _leave_page_cache(folder: Path) -> None:
    """Let the next reads come from the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure_other_world(shape: str, tools: Sequence[str], root: Path) -> list[tuple[str, str, str]]:
    """Rows (tool, what it took before, seconds to load) of loading with one rank what two have written."""
    rows = []
    for tool in (one for one in ("dslaunch 2", "DeepSpeed 2") if one in tools):
        folder, loader, before = root / f"checkpoints-{tool.replace(' ', '-')}", tool, "nothing"
        try:
            if tool.startswith("DeepSpeed"):
                loader, before = f"DeepSpeed 2{UNIVERSAL}", f"{_to_universal(folder):.2f} s of conversion"
            with _team(loader, shape, 1, root) as team:
                os.sync()
                _leave_page_cache(folder)
                rows.append((tool, before, f"{_take_turn(team, 'load', folder).s:.2f}"))
        except (RuntimeError, subprocess.CalledProcessError) as error:
            print(f"{tool}: {error}", file=sys.stderr)
            rows.append((tool, before, "does not run here"))
    return rows


def _to_universal(folder: Path) -> float:
    """Seconds that DeepSpeed's conversion takes; the result takes the place of the checkpoint."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
    places = ["--input_folder", str(folder / TAG), "--output_folder", str(folder / "universal")]
    said = subprocess.run(
        [*command, *places, "--num_extract_workers=2", "--num_merge_workers=2", "--inject_missing_state"],
        env=environments(1)[0],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if said.returncode != 0:
        raise RuntimeError(f"ds_to_universal ended with {said.returncode}: {said.stderr.strip()[-1500:]}")
    took_s = time.perf_counter() - began
    shutil.rmtree(folder / TAG)
    (folder / "universal").rename(folder / TAG)
    return took_s


def markdown(
    shape: str,
    found: Found,
    num_bytes: dict[str, int],
    other_world: Sequence[Sequence[str]],
    rounds: int,
    missing: str,
) -> str:
    numel = numel_of(Gpt(SHAPES[shape]))
    return paragraphs(
        f"{conditions()}; {numel / 1e6:.1f} million parameters in bf16 with AdamW, {NUM_RANKS} ranks; "
        f"medians of {rounds} rounds, the tools taking turns.",
        "Bytes of a checkpoint, beside what is in it:",
        table(("", "MB", "bytes per parameter", "wanted", "beside it"), _byte_rows(num_bytes, numel)),
        "Seconds; `memory` is MB on a rank beside what training has:",
        table(
            ("", "save", "memory", "load", "memory", "async: training waits", "until it is there", "memory"),
            [(tool, *_time_cells(turns)) for tool, turns in found.items()],
        ),
        "Beside the peers, in the same run:",
        table(("", "peer", "ratio", "goal"), _goal_rows(found)),
        "Loading with 1 rank what 2 have written:",
        table(("", "before", "s"), other_world),
        left_out(missing),
    )


def _byte_rows(num_bytes: dict[str, int], numel: int) -> list[tuple[str, ...]]:
    rows = []
    for tool, size in num_bytes.items():
        wanted = BYTES_PER_PARAMETER[tool]
        beside = f"{size - wanted * numel:,} bytes"
        rows.append((tool, f"{size / 1e6:.1f}", f"{size / numel:.3f}", str(wanted), beside))
    return rows


def _time_cells(turns: dict[str, Turn]) -> Iterator[str]:
    for what in ("save", "load"):
        yield from (f"{turns[what].s:.2f}", f"{turns[what].memory_bytes / 1e6:.0f}")
    beside = turns.get("async")
    yield from (
        ("", "", "")
        if beside is None
        else (f"{beside.stall_s:.3f}", f"{beside.s:.2f}", f"{beside.memory_bytes / 1e6:.0f}")
    )


def _goal_rows(found: Found) -> list[tuple[str, ...]]:
    rows = []

    def compare(what: str, ours: float, peer: str, theirs: float, limit: float | None = None) -> None:
        said = "" if limit is None else goal(ours / theirs, limit)
        rows.append((what, peer, f"{ours / theirs:.3f}", said))

    def seconds(tool: str, what: str) -> float:
        return found[tool][what].s

    for tool in OURS:
        compare(f"{tool}: save", seconds(tool, "save"), RAW, seconds(RAW, "save"), SAVE_GOAL)
        stall = found[tool]["async"].stall_s
        compare(f"{tool}: training waits for async", stall, "its own save", seconds(tool, "save"), STALL_GOAL)
        for peer in (one for one in PEERS if one in found):
            for what in ("save", "load"):
                compare(f"{tool}: {what}", seconds(tool, what), peer, seconds(peer, what))
        compare(f"{tool}: training waits for async", stall, "FSDP2", found["FSDP2"]["async"].stall_s)
    return rows


def main() -> None:
    parser = arguments(__doc__, short=f"a small model and {SHORT_ROUNDS} rounds")
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary folder")
    given = parser.parse_args()
    shape, rounds = ("small", SHORT_ROUNDS) if given.short else ("gigabyte", ROUNDS)
    missing = why_no_deepspeed()
    tools = [tool for tool in (RAW, *OURS, *PEERS) if not (missing and tool.startswith("DeepSpeed"))]
    with tempfile.TemporaryDirectory(dir=given.folder, ignore_cleanup_errors=True) as folder:
        times, num_bytes = measure(shape, tools, rounds, Path(folder))
        other_world = measure_other_world(shape, tools, Path(folder))
    text = markdown(shape, times, num_bytes, other_world, rounds, missing)
    publish(COMMAND, text, is_wanted=given.publish)


if __name__ == "__main__":
    main()
