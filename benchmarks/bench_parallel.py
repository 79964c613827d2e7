"""A training step of models that are divided over ranks in each direction, beside DeepSpeed and torch where
they do the same: on CPUs, over gloo. At the end, how long batches of each schedule take where layers sleep,
beside what its table says.

    python benchmarks/bench_parallel.py [--publish] [--minutes MINUTES] [PART ...]

The parts are tensor, stages, sequences, experts, together and bubbles.

Each tool has processes of its own; they take turns with the same model, batches and AdamW, in float32, and
the last losses of all must agree. A tool that fails, or takes too long, is named with the cause, and the
others go on. Nothing here fails on a time. --publish writes the tables into docs/reference/benchmarks.md; it
wants all parts.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(CHECKOUT))

from benchmarks import (  # noqa: E402
    bubble_worker,
    experts_worker,
    pipeline_worker,
    sequence_worker,
    tensor_worker,
    three_axes_worker,
)
from benchmarks.deepspeed_extensions import why_not_compiled  # noqa: E402
from benchmarks.guide_section import conditions, replace_section, table  # noqa: E402
from benchmarks.training_turns import take_turns  # noqa: E402
from benchmarks.turn import Turn  # noqa: E402
from dslaunch.runtime.pipeline.schedule import NAMES, make_table, shape_of, simulate  # noqa: E402

GUIDE = CHECKOUT / "docs" / "reference" / "benchmarks.md"
COMMAND = "make bench-parallel"
BUBBLES = "bubbles"
BUBBLE_ROUNDS = 3
LIMIT_S = (
    150  # of one tool with one model, its start too; some take 30 s where the cores have nothing else to do
)
SLEEPERS = 4
STEP_HEADS = ("layout", "model", "tool", "ms a step", "MB of the rank that has most")
GOAL_HEADS = ("layout", "model", "dslaunch", "peer", "time, ratio", "memory, ratio", "goal")
BUBBLE_HEADS = ("schedule", "bubble by its table", "as measured", "ms by its table", "ms", "ratio", "goal")
WITHIN = 1.05  # a batch of layers that sleep, of what its table says


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Models that are divided in the same direction."""

    name: str
    worker: Path
    shapes: Collection[str]
    layout: str
    num_ranks: int = 4
    tools: Collection[str]
    peers: Sequence[tuple[str, str]]  # ours, and who does the same
    others: str = ""  # why a peer is not there
    rounds: int = 5


PARTS = (
    Part(
        name="tensor",
        worker=Path(tensor_worker.__file__),
        shapes=tensor_worker.SHAPES,
        layout="dp2 x tp2",
        tools=tensor_worker.TOOLS,
        peers=(("dslaunch 1", "DeepSpeed 1"), ("dslaunch 1", "torch"), ("dslaunch 3", "torch")),
    ),
    Part(
        name="stages",
        worker=Path(pipeline_worker.__file__),
        shapes=pipeline_worker.SHAPES,
        layout="dp2 x pp2",
        tools=pipeline_worker.TOOLS,
        peers=(("dslaunch 1", "DeepSpeed 1"), ("dslaunch 1", "torch")),
    ),
    Part(
        name="sequences",
        worker=Path(sequence_worker.__file__),
        shapes=sequence_worker.SHAPES,
        layout="sp4",
        tools=sequence_worker.TOOLS,
        peers=(("dslaunch 1", "DeepSpeed 1"), ("dslaunch 3", "DeepSpeed 3")),
        others="sp4: torch alone is not there, for its `context_parallel()` has kernels for GPUs only.",
    ),
    Part(
        name="experts",
        worker=Path(experts_worker.__file__),
        shapes=experts_worker.SHAPES,
        layout="ep4",
        tools=experts_worker.TOOLS,
        peers=(("dslaunch 2", "DeepSpeed 2"),),
        others="ep4: DeepSpeed refuses its MoE at stage 3, and torch alone has no layer of experts.",
    ),
    Part(
        name="together",
        worker=Path(three_axes_worker.__file__),
        shapes=three_axes_worker.SHAPES,
        layout="pp2 x dp2 x tp2",
        num_ranks=8,
        rounds=3,
        tools=three_axes_worker.TOOLS,
        peers=(("dslaunch 1", "torch"), ("dslaunch 3", "torch")),
        others="pp2 x dp2 x tp2: DeepSpeed is not there: in its pipelines Megatron-LM divides the layers.",
    ),
)


class Report:
    """What was found, as rows of tables."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self.steps: list[tuple[str, ...]] = []
        self.goals: list[tuple[str, ...]] = []
        self.bubbles: list[tuple[str, ...]] = []
        self.missing: list[str] = []

    def is_late(self, what: str) -> bool:
        """Whether there is no time for something, which is noted then."""
        if time.monotonic() < self._deadline:
            return False
        self.missing.append(f"{what}: not measured, for the run's time was over.")
        return True

    def measure(self, part: Part, has_deepspeed: bool) -> None:
        tools = [tool for tool in part.tools if has_deepspeed or not tool.startswith("DeepSpeed")]
        for shape in part.shapes:
            what = f"{part.layout}, {shape}"
            if self.is_late(what):
                continue
            found, causes = take_turns(
                part.worker, Turn, shape, part.num_ranks, tools, rounds=part.rounds, limit_s=LIMIT_S
            )
            self.missing += [f"{what}: {_one_line(cause)}." for cause in causes.values()]
            self._add(part, shape, found)
        if part.others:
            self.missing.append(part.others)

    def _add(self, part: Part, shape: str, found: Mapping[str, Turn]) -> None:
        for tool, turn in found.items():
            row = (part.layout, shape, tool, f"{turn.s * 1e3:.0f}", f"{turn.memory_mb:.0f}")
            self.steps.append(row)
            print("{}, {}: {} {} ms, {} MB".format(*row), flush=True)
        for ours, peer in part.peers:
            if ours in found and peer in found:
                time_ratio = found[ours].s / found[peer].s
                memory_ratio = found[ours].memory_mb / found[peer].memory_mb
                missed = [
                    name for name, ratio in (("time", time_ratio), ("memory", memory_ratio)) if ratio > 1
                ]
                goal = f"<= 1 ({' and '.join(missed)} missed)" if missed else "<= 1"
                ratios = (f"{time_ratio:.2f}", f"{memory_ratio:.2f}")
                self.goals.append((part.layout, shape, ours, peer, *ratios, goal))

    def measure_bubbles(self) -> None:
        """Batches of layers that sleep, on ranks that do nothing else."""
        sleep_s, micro = bubble_worker.SLEEP_S, bubble_worker.MICRO
        worker = Path(bubble_worker.__file__)
        for name in NAMES:
            if self.is_late(f"bubble of {name}"):
                continue
            shape = shape_of(name, num_ranks=SLEEPERS, per_rank=None)
            cost = simulate(make_table(shape, micro), shape.num_stages)
            found, causes = take_turns(
                worker, Turn, "bubble", SLEEPERS, [name], rounds=BUBBLE_ROUNDS, limit_s=LIMIT_S
            )
            self.missing += [f"bubble of {_one_line(cause)}." for cause in causes.values()]
            if name in found:
                busy_s, taken_s = 3 * micro * shape.per_rank * sleep_s, found[name].s
                ideal_s = busy_s / (1 - cost.bubble)
                bubbles = (f"{cost.bubble:.3f}", f"{1 - busy_s / taken_s:.3f}")
                times = (f"{ideal_s * 1e3:.0f}", f"{taken_s * 1e3:.0f}")
                missed = " (missed)" if taken_s / ideal_s > WITHIN else ""
                self.bubbles.append(
                    (name, *bubbles, *times, f"{taken_s / ideal_s:.3f}", f"<= {WITHIN}{missed}")
                )
                print(f"{name}: {taken_s / ideal_s:.3f} of what its table says", flush=True)

    def markdown(self) -> str:
        parts = [f"{conditions()}; medians of 5 rounds, of 3 with 8 ranks, the tools taking turns."]
        if self.steps:
            parts.append(table(STEP_HEADS, self.steps))
        if self.goals:
            parts += ["Beside the peers, in the same run:", table(GOAL_HEADS, self.goals)]
        if self.bubbles:
            parts.append(
                f"{SLEEPERS} ranks, {bubble_worker.MICRO} micro batches; a layer sleeps "
                f"{bubble_worker.SLEEP_S * 1e3:.0f} ms in its forward, and as long for each half of its "
                f"backward; medians of {BUBBLE_ROUNDS} batches:"
            )
            parts.append(table(BUBBLE_HEADS, self.bubbles))
        if self.missing:
            parts.append("\n".join(f"- {line}" for line in self.missing))
        return "\n\n".join(parts) + "\n"


def _one_line(text: str) -> str:
    """The tool and the last words of what failed."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"


def main() -> int:
    names = [*(part.name for part in PARTS), BUBBLES]
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("parts", nargs="*", help=f"default: all of {', '.join(names)}")
    parser.add_argument("--publish", action="store_true", help=f"write the results into {GUIDE.name}")
    parser.add_argument(
        "--minutes", type=float, default=11, help="after so many nothing more is begun (%(default)s)"
    )
    given = parser.parse_args()
    unknown = set(given.parts) - set(names)
    if unknown:
        parser.error(f"unknown parts {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    if given.publish and given.parts:
        parser.error("--publish wants all parts; leave their names out")
    wanted = given.parts or names
    report = Report(time.monotonic() + 60 * given.minutes)
    no_deepspeed = why_not_compiled() if wanted != [BUBBLES] else ""
    for part in PARTS:
        if part.name in wanted:
            report.measure(part, not no_deepspeed)
    if BUBBLES in wanted:
        report.measure_bubbles()
    if no_deepspeed:
        report.missing.append(f"DeepSpeed is not there: {_one_line(no_deepspeed)}.")
    text = report.markdown()
    print(f"\n{text}")
    if given.publish:
        replace_section(GUIDE, COMMAND, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
