"""A training step of a Llama whose layers are divided over two ranks, beside DeepSpeed's AutoTP and torch's
parallelize_module() with fully_shard(), and of blocks in two stages, beside DeepSpeed and torch:
on CPUs, over gloo. At the end, how long batches of each schedule take where layers sleep, beside what its
table says.

    python tests/benchmarks/bench_parallel.py [tensor] [stages] [bubbles]

Each tool has processes of its own; they take turns with the same model, batches and AdamW, in float32, and
the last losses of all must agree. Nothing here fails on a time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(CHECKOUT))

from dslaunch.runtime.pipeline.schedule import NAMES, make_table, shape_of, simulate  # noqa: E402
from tests.benchmarks import pipeline_worker  # noqa: E402
from tests.benchmarks.guide_section import conditions, table  # noqa: E402
from tests.benchmarks.launch_peers import why_no_deepspeed  # noqa: E402
from tests.benchmarks.parallel_worker import SHAPES, STEPS, TOOLS, TP, Turn  # noqa: E402
from tests.benchmarks.training_turns import median_turns  # noqa: E402

WORKER = Path(__file__).with_name("parallel_worker.py")
RANKS = (2, 4)
ROUNDS = 7


HEADS = ("model", "layout", "tool", "ms a step", "MB at most", "dslaunch 1 / tool")
SLEEPERS = 4


def _compare(worker: Path, shapes: Iterable[str], tools: Sequence[str], layout: str) -> list[tuple[str, ...]]:
    rows = []
    for shape in shapes:
        for num_ranks in RANKS:
            found = median_turns(worker, Turn, shape, num_ranks, tools, rounds=ROUNDS)
            ours = found["dslaunch 1"]
            for tool, turn in found.items():
                ratio = f"{ours.s / turn.s:.2f}"
                where = layout.format(num_ranks // 2)
                rows.append((shape, where, tool, f"{turn.s * 1e3:.0f}", f"{turn.memory_mb:.0f}", ratio))
            print(f"{shape}, {num_ranks} ranks: done", file=sys.stderr, flush=True)
    return rows


def _bubbles() -> list[tuple[str, ...]]:
    """Batches of layers that sleep, on ranks that do nothing else."""
    rows = []
    sleep_s, micro = pipeline_worker.SLEEP_S, pipeline_worker.MICRO
    worker = Path(pipeline_worker.__file__)
    for name in NAMES:
        shape = shape_of(name, num_ranks=SLEEPERS, per_rank=None)
        cost = simulate(make_table(shape, micro), shape.num_stages)
        busy_s = 3 * micro * shape.per_rank * sleep_s
        found = median_turns(worker, Turn, "bubble", SLEEPERS, [name], rounds=ROUNDS)[name]
        ideal_s = busy_s / (1 - cost.bubble)
        measured = 1 - busy_s / found.s
        rows.append(
            (
                name,
                f"{cost.bubble:.3f}",
                f"{measured:.3f}",
                f"{ideal_s * 1e3:.0f}",
                f"{found.s * 1e3:.0f}",
                f"{found.s / ideal_s:.3f}",
            )
        )
    return rows


def main() -> None:
    wanted = sys.argv[1:] or ["tensor", "stages", "bubbles"]
    missing = why_no_deepspeed()

    def there(tools: Iterable[str]) -> list[str]:
        return [tool for tool in tools if not (missing and tool.startswith("DeepSpeed"))]

    rows = []
    if "tensor" in wanted:
        rows += _compare(WORKER, SHAPES, there(TOOLS), f"data {{}} x tensor {TP}")
    if "stages" in wanted:
        stages = Path(pipeline_worker.__file__)
        rows += _compare(stages, pipeline_worker.SHAPES, there(pipeline_worker.TOOLS), "data {} x stages 2")
    print(f"{conditions()}; medians of {ROUNDS} rounds of {STEPS} steps, the tools taking turns.\n")
    if rows:
        print(table(HEADS, rows))
    if "bubbles" in wanted:
        heads = ("schedule", "bubble by its table", "as measured", "ms by its table", "ms", "ratio")
        print(f"\n{SLEEPERS} ranks, {pipeline_worker.MICRO} micro batches, layers that sleep:\n")
        print(table(heads, _bubbles()))
    if missing:
        print(f"\nLeft out: DeepSpeed, because {missing}.")


if __name__ == "__main__":
    main()
