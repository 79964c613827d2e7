"""A training step of a Llama whose layers are divided over two ranks, beside DeepSpeed's AutoTP and torch's
parallelize_module() with fully_shard(): on CPUs, over gloo.

    python tests/benchmarks/bench_parallel.py

Each tool has processes of its own; they take turns with the same model, batches and AdamW, in float32, and
the last losses of all must agree. Nothing here fails on a time.
"""

from __future__ import annotations

import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(CHECKOUT))

from tests.benchmarks.guide_section import conditions, table  # noqa: E402
from tests.benchmarks.launch_peers import why_no_deepspeed  # noqa: E402
from tests.benchmarks.parallel_worker import SHAPES, STEPS, TOOLS, TP, Turn  # noqa: E402
from tests.benchmarks.training_turns import median_turns  # noqa: E402

WORKER = Path(__file__).with_name("parallel_worker.py")
RANKS = (2, 4)
ROUNDS = 7


def main() -> None:
    missing = why_no_deepspeed()
    tools = [tool for tool in TOOLS if not (missing and tool.startswith("DeepSpeed"))]
    rows = []
    for shape in SHAPES:
        for num_ranks in RANKS:
            found = median_turns(WORKER, Turn, shape, num_ranks, tools, rounds=ROUNDS)
            ours = found["dslaunch 1"]
            for tool, turn in found.items():
                ratio = f"{ours.s / turn.s:.2f}"
                layout = f"{num_ranks // TP} x {TP}"
                rows.append((shape, layout, tool, f"{turn.s * 1e3:.0f}", f"{turn.memory_mb:.0f}", ratio))
            print(f"{shape}, {num_ranks} ranks: done", file=sys.stderr, flush=True)
    print(f"{conditions()}; medians of {ROUNDS} rounds of {STEPS} steps, the tools taking turns.\n")
    heads = ("model", "data x tensor", "tool", "ms a step", "MB at most", "dslaunch 1 / tool")
    print(table(heads, rows))
    if missing:
        print(f"\nLeft out: DeepSpeed, because {missing}.")


if __name__ == "__main__":
    main()
