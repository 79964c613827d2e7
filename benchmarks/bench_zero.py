"""A training step at each ZeRO stage, beside torch's DDP and fully_shard and beside DeepSpeed:
on CPUs, over gloo.

    python benchmarks/bench_zero.py [--publish] [--shape SHAPE]

Each tool has processes of its own, as it has where it is used, and those that are compared take turns, with
the same model, batches and AdamW, in float32; the last losses of all must agree. Nothing here fails on a
time. --publish writes the tables and the picture into docs/reference/benchmarks.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.guide_section import (
    GUIDE,
    arguments,
    conditions,
    goal,
    left_out,
    paragraphs,
    picture,
    publish,
    table,
)
from benchmarks.launch_peers import why_no_deepspeed
from benchmarks.training_turns import TRAINING, median_turns
from benchmarks.training_worker import MANY_SMALL, PARTS, SMALL_WHOLE, Tool, Turn

PICTURE = "zero.png"
COMMAND = "make bench-zero"
ZERO = PARTS["zero"]
SHAPES, TOOLS = ZERO.shapes, ZERO.tools
RANKS = (1, 2, 4)
ROUNDS = 9
# Tools that take turns: all at once would need more memory than a small machine has.
ALONE = (("torch", "dslaunch 0", "dslaunch 3"),)
TOGETHER = (
    ("DDP", "dslaunch 0", "dslaunch 1", "DeepSpeed 1"),
    ("dslaunch 2", "DeepSpeed 2"),
    ("FSDP2", "dslaunch 3", "DeepSpeed 3"),
)
SMALL_TOGETHER = (
    (
        "DDP",
        "FSDP2",
        *(f"{name} {stage}" for name in ("dslaunch", "DeepSpeed") for stage in (2, 3, f"3{SMALL_WHOLE}")),
    ),
)

# (shape, ranks, ours, peer, at most)
GOALS = (
    *(("comm-bound", ranks, "dslaunch 3", "FSDP2", 0.8) for ranks in (2, 4)),
    *(("comm-bound", ranks, "dslaunch 3", "DeepSpeed 3", 0.7) for ranks in (2, 4)),
    *(("compute-bound", ranks, "dslaunch 3", "FSDP2", 1.0) for ranks in (2, 4)),
    *(("compute-bound", ranks, "dslaunch 3", "DeepSpeed 3", 1.0) for ranks in (2, 4)),
    *((shape, 1, "dslaunch 0", "torch", 1.03) for shape in SHAPES if shape != MANY_SMALL),
    (MANY_SMALL, 2, f"dslaunch 3{SMALL_WHOLE}", "dslaunch 2", 1.2),
    (MANY_SMALL, 2, f"dslaunch 3{SMALL_WHOLE}", f"DeepSpeed 3{SMALL_WHOLE}", 1.0),
    *((MANY_SMALL, 2, "dslaunch 3", peer, 1.0) for peer in ("FSDP2", "DeepSpeed 3")),
)

Found = dict[tuple[str, int], dict[str, Turn]]  # (shape, number of ranks) -> tool -> turn


def _groups(shape: str, num_ranks: int) -> Sequence[Sequence[str]]:
    if shape == MANY_SMALL:  # as many ranks as a small machine has cores: Python takes the time
        return SMALL_TOGETHER if num_ranks == 2 else ()
    return ALONE if num_ranks == 1 else TOGETHER


def measure_all(tools: Collection[str], shapes: Collection[str] = tuple(SHAPES)) -> Found:
    all_turns: Found = {}
    for shape in shapes:
        for num_ranks in RANKS:
            groups = _groups(shape, num_ranks)
            if groups:
                all_turns[shape, num_ranks] = {}
            for group in groups:
                wanted = [tool for tool in group if tool in tools]
                turns = median_turns([TRAINING, "zero", shape], Turn, num_ranks, wanted, rounds=ROUNDS)
                all_turns[shape, num_ranks] |= turns
                times = ", ".join(f"{tool} {turn.s * 1e3:.0f} ms" for tool, turn in turns.items())
                print(f"{shape}, {num_ranks} ranks: {times}", flush=True)
    return all_turns


def markdown(found: Found, missing: str) -> str:
    heads = ("", *(f"{shape}, {ranks} ranks" for shape, ranks in found))
    return paragraphs(
        f"{conditions()}; medians of {ROUNDS} rounds of {ZERO.steps} steps, the tools taking turns.",
        "Milliseconds per step:",
        table(heads, _rows(found, lambda turn: turn.s * 1e3)),
        "Pages that the system had to give rank 0 in a step, in thousands:",
        table(heads, _rows(found, lambda turn: turn.page_faults / 1e3)),
        "Beside the peers, in the same run:",
        table(("shape", "ranks", "dslaunch", "peer", "ratio", "goal"), _goal_rows(found)),
        left_out(missing),
    )


def _rows(found: Found, value: Callable[[Turn], float]) -> list[tuple[str, ...]]:
    tools = [tool for tool in TOOLS if any(tool in times for times in found.values())]
    return [
        (tool, *(f"{value(times[tool]):.0f}" if tool in times else "" for times in found.values()))
        for tool in tools
    ]


def _goal_rows(found: Found) -> list[tuple[str, ...]]:
    rows = []
    for shape, ranks, ours, peer, limit in GOALS:
        times = found.get((shape, ranks), {})
        if peer in times:
            ratio = times[ours].s / times[peer].s
            rows.append((shape, str(ranks), ours, peer, f"{ratio:.2f}", goal(ratio, limit)))
    return rows


def draw(found: Found, path: Path) -> None:
    """Draw one group of bars for each shape and number of ranks."""
    cases = [case for case in found if case[1] > 1]
    tools = [tool for tool in TOOLS if any(tool in found[case] for case in cases)]
    width = 0.8 / len(tools)
    colors = {"DDP": "0.6", "FSDP2": "0.35", "dslaunch": "tab:blue", "DeepSpeed": "tab:orange"}
    where = "all ranks on one machine, gloo"
    with picture(path, "A training step at each ZeRO stage", where, (9, 4.8)) as axes:
        for place, tool in enumerate(tools):
            name, stage, _ = Tool.of(tool)
            axes.bar(
                [case + place * width for case in range(len(cases))],
                [found[case][tool].s * 1e3 if tool in found[case] else 0.0 for case in cases],
                width,
                label=tool,
                color=colors.get(name, "0.8"),
                alpha=0.4 + 0.2 * stage if name in ("dslaunch", "DeepSpeed") else 1.0,
            )
        axes.set_xticks(
            [case + 0.4 - width / 2 for case in range(len(cases))],
            [f"{shape}\n{ranks} ranks" for shape, ranks in cases],
        )
        axes.set_ylabel("milliseconds per step")
        axes.legend(ncols=3, fontsize=8)
        axes.grid(axis="y", alpha=0.3)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shape", choices=tuple(SHAPES), help="measure this one alone, and publish nothing")
    given = parser.parse_args()
    is_published = given.publish and given.shape is None
    missing = why_no_deepspeed()
    turns = measure_all(
        [tool for tool in TOOLS if not (missing and tool.startswith("DeepSpeed"))],
        tuple(SHAPES) if given.shape is None else (given.shape,),
    )
    text = markdown(turns, missing)
    drawn = f"![milliseconds per step by tool, shape and number of ranks]({PICTURE})"
    publish(COMMAND, f"{drawn}\n\n{text}", is_wanted=is_published)
    if is_published:
        draw(turns, GUIDE.with_name(PICTURE))


if __name__ == "__main__":
    main()
