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

import sys
import time
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.deepspeed_extensions import why_not_compiled
from benchmarks.guide_section import arguments, conditions, goal, paragraphs, publish, table
from benchmarks.models import SLEEP_S
from benchmarks.training_turns import TRAINING, take_turns
from benchmarks.training_worker import MICRO, PARTS, Turn
from dslaunch.runtime.pipeline.schedule import NAMES, make_table, shape_of, simulate

COMMAND = "make bench-parallel"
BUBBLES = "bubbles"
BUBBLE_ROUNDS = 3
LIMIT_S = 150  # limit of one tool with one model, its start too; some take 30 s on idle cores
STEP_HEADS = ("layout", "model", "tool", "ms a step", "MB of the rank that has most")
GOAL_HEADS = ("layout", "model", "dslaunch", "peer", "time, ratio", "memory, ratio", "goal")
BUBBLE_HEADS = ("schedule", "bubble by its table", "as measured", "ms by its table", "ms", "ratio", "goal")
WITHIN = 1.05  # ratio of a batch of layers that sleep to its table, at most


ROUNDS, ROUNDS_OF_8 = 5, 3
PEERS = {  # part -> ours, and the peers that do the same
    "tensor": (("dslaunch 1", "DeepSpeed 1"), ("dslaunch 1", "torch"), ("dslaunch 3", "torch")),
    "stages": (("dslaunch 1", "DeepSpeed 1"), ("dslaunch 1", "torch")),
    "sequences": (("dslaunch 1", "DeepSpeed 1"), ("dslaunch 3", "DeepSpeed 3")),
    "experts": (("dslaunch 2", "DeepSpeed 2"),),
    "together": (("dslaunch 1", "torch"), ("dslaunch 3", "torch")),
}
NO_PEER = {  # parts without a peer, and why
    "sequences": "sp4: torch alone is not there, for its `context_parallel()` has kernels for GPUs only.",
    "experts": "ep4: DeepSpeed refuses its MoE at stage 3, and torch alone has no layer of experts.",
    "together": "pp2 x dp2 x tp2: DeepSpeed is not there: in its pipelines Megatron-LM divides the layers.",
}
PARTS_HERE = (*PEERS, BUBBLES)


class Report:
    """Results, as rows of tables."""

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

    def measure(self, name: str, has_deepspeed: bool) -> None:
        part = PARTS[name]
        tools = [tool for tool in part.tools if has_deepspeed or not tool.startswith("DeepSpeed")]
        for shape in part.shapes:
            what = f"{part.layout}, {shape}"
            if self.is_late(what):
                continue
            rounds = ROUNDS_OF_8 if part.num_ranks == 8 else ROUNDS
            worker = [TRAINING, name, shape]
            turns, causes = take_turns(worker, Turn, part.num_ranks, tools, rounds=rounds, limit_s=LIMIT_S)
            self.missing += [f"{what}: {_one_line(cause)}." for cause in causes.values()]
            self._add(name, shape, turns)
        if name in NO_PEER:
            self.missing.append(NO_PEER[name])

    def _add(self, name: str, shape: str, found: Mapping[str, Turn]) -> None:
        layout = PARTS[name].layout
        for tool, turn in found.items():
            row = (layout, shape, tool, f"{turn.s * 1e3:.0f}", f"{turn.memory_mb:.0f}")
            self.steps.append(row)
            print("{}, {}: {} {} ms, {} MB".format(*row), flush=True)
        for ours, peer in PEERS[name]:
            if ours in found and peer in found:
                time_ratio = found[ours].s / found[peer].s
                memory_ratio = found[ours].memory_mb / found[peer].memory_mb
                missed = [
                    name for name, ratio in (("time", time_ratio), ("memory", memory_ratio)) if ratio > 1
                ]
                said = f"<= 1 ({' and '.join(missed)} missed)" if missed else "<= 1"
                ratios = (f"{time_ratio:.2f}", f"{memory_ratio:.2f}")
                self.goals.append((layout, shape, ours, peer, *ratios, said))

    def measure_bubbles(self) -> None:
        """Measure batches of layers that sleep, on ranks that do nothing else."""
        part, worker = PARTS[BUBBLES], [TRAINING, BUBBLES, "bubble"]
        for name in NAMES:
            if self.is_late(f"bubble of {name}"):
                continue
            shape = shape_of(name, num_ranks=part.num_ranks, per_rank=None)
            cost = simulate(make_table(shape, MICRO), shape.num_stages)
            turns, causes = take_turns(
                worker, Turn, part.num_ranks, [name], rounds=BUBBLE_ROUNDS, limit_s=LIMIT_S
            )
            self.missing += [f"bubble of {_one_line(cause)}." for cause in causes.values()]
            if name in turns:
                busy_s, taken_s = 3 * MICRO * shape.per_rank * SLEEP_S, turns[name].s
                ideal_s = busy_s / (1 - cost.bubble)
                bubbles = (f"{cost.bubble:.3f}", f"{1 - busy_s / taken_s:.3f}")
                times = (f"{ideal_s * 1e3:.0f}", f"{taken_s * 1e3:.0f}")
                ratio = taken_s / ideal_s
                self.bubbles.append((name, *bubbles, *times, f"{ratio:.3f}", goal(ratio, WITHIN)))
                print(f"{name}: {ratio:.3f} of what its table says", flush=True)

    def markdown(self) -> str:
        parts = [
            f"{conditions()}; medians of {ROUNDS} rounds, of {ROUNDS_OF_8} with 8 ranks, the tools taking "
            "turns."
        ]
        if self.steps:
            parts.append(table(STEP_HEADS, self.steps))
        if self.goals:
            parts += ["Beside the peers, in the same run:", table(GOAL_HEADS, self.goals)]
        if self.bubbles:
            parts.append(
                f"{PARTS[BUBBLES].num_ranks} ranks, {MICRO} micro batches; a layer sleeps "
                f"{SLEEP_S * 1e3:.0f} ms in its forward, and as long for each half of its "
                f"backward; medians of {BUBBLE_ROUNDS} batches:"
            )
            parts.append(table(BUBBLE_HEADS, self.bubbles))
        if self.missing:
            parts.append("\n".join(f"- {line}" for line in self.missing))
        return paragraphs(*parts)


def _one_line(text: str) -> str:
    """Return the tool and the last words of its error."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("parts", nargs="*", help=f"default: all of {', '.join(PARTS_HERE)}")
    parser.add_argument(
        "--minutes", type=float, default=11, help="after so many nothing more is begun (%(default)s)"
    )
    given = parser.parse_args()
    unknown = set(given.parts) - set(PARTS_HERE)
    if unknown:
        parser.error(f"unknown parts {', '.join(sorted(unknown))}; there are {', '.join(PARTS_HERE)}")
    if given.publish and given.parts:
        parser.error("--publish wants all parts; leave their names out")
    wanted = given.parts or PARTS_HERE
    report = Report(time.monotonic() + 60 * given.minutes)
    no_deepspeed = why_not_compiled() if {*wanted} != {BUBBLES} else ""
    for name in PARTS_HERE:
        if name == BUBBLES and name in wanted:
            report.measure_bubbles()
        elif name in wanted:
            report.measure(name, not no_deepspeed)
    if no_deepspeed:
        report.missing.append(f"DeepSpeed is not there: {_one_line(no_deepspeed)}.")
    publish(COMMAND, report.markdown(), is_wanted=given.publish)
    return 0


if __name__ == "__main__":
    sys.exit(main())
