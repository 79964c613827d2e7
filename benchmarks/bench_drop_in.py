"""The same programs under dslaunch's package deepspeed and under DeepSpeed's: losses, time, memory, start:
on CPUs, over gloo.

    python benchmarks/bench_drop_in.py [--short] [--publish]

A program of its own (deepspeed.initialize) and one of Hugging Face's Trainer, 20 steps on two ranks, in
processes of their own, the two packages taking turns. What differs between them is PYTHONPATH. Nothing here
fails on a time, nor on a loss: the table says how far losses are apart. --publish writes the tables into
docs/reference/benchmarks.md.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.guide_section import arguments, conditions, left_out, paragraphs, publish, table
from benchmarks.launch_peers import DEEPSPEED_FOLDER, why_no_deepspeed
from benchmarks.team import environments
from dslaunch import drop_in

WORKER = Path(__file__).with_name("drop_in_worker.py")
COMMAND = "make bench-drop-in"
RANKS = 2
ROUNDS = 2
IMPORTS = 5
TIMEOUT_S = 600
IMPORT_GOAL = 0.1
# Limit of the drift of 20 steps between the two: sums are made in another order,
# and in bfloat16 weights that are rounded.
AGREE = {"fp32": 1e-4, "bf16": 2e-2}

CASES = (
    ("engine", "0", "fp32"),
    ("engine", "1", "bf16"),
    ("engine", "2", "fp32"),
    ("engine", "3", "fp32"),
    ("engine", "3", "bf16"),
    ("engine", "2", "bf16", "offload"),
    ("trainer", "2", "bf16"),
    ("trainer", "3", "bf16"),
)


class Run(NamedTuple):
    """Answer of rank 0 of one run. `start_s`: from the start of the process to the first step."""

    version: str
    losses: list[float]
    step_s: float
    start_s: float
    peak_bytes: float


def folders() -> dict[str, Path]:
    return {"dslaunch": Path(drop_in.FOLDER), "DeepSpeed": DEEPSPEED_FOLDER}


def run(case: tuple[str, ...], folder: Path) -> Run:
    """Run the case with this folder first on PYTHONPATH.

    Errors: RuntimeError if rank 0 has no answer
    """
    ranks = []
    for rank, env in enumerate(environments(RANKS)):
        env |= {"BEGUN": repr(time.monotonic()), "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
        # DeepSpeed compiles with the ninja of this environment
        env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
        command = [sys.executable, str(WORKER), *case]
        pipe = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
        ranks.append(subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True))
    try:
        out, err = ranks[0].communicate(timeout=TIMEOUT_S)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    answers = [line for line in out.splitlines() if line.startswith("{") and '"step_s"' in line]
    if not answers:
        raise RuntimeError(f"{' '.join(case)} with {folder}: no answer: {err.strip()[-2000:]}")
    return Run(**json.loads(answers[-1]))


def measure(case: tuple[str, ...], tools: dict[str, Path], rounds: int) -> dict[str, Run]:
    """The medians of some runs, the tools taking turns; the losses are those of the last."""
    runs: dict[str, list[Run]] = {tool: [] for tool in tools}
    for folder in tools.values():
        run(case, folder)  # time to compile or cache is not measured
    for _ in range(rounds):
        for tool, folder in tools.items():
            runs[tool].append(run(case, folder))
    medians = {}
    for tool, seen in runs.items():
        last = seen[-1]
        numbers = (
            statistics.median(getattr(one, name) for one in seen)
            for name in ("step_s", "start_s", "peak_bytes")
        )
        medians[tool] = Run(last.version, last.losses, *numbers)
    return medians


def import_times(tools: dict[str, Path], statement: str) -> dict[str, float]:
    """Seconds of `import deepspeed` in a fresh process, the least of some, the tools taking turns."""
    program = (
        f"{statement}; import time; t = time.perf_counter(); import deepspeed; print(time.perf_counter() - t)"
    )
    times_of: dict[str, list[float]] = {tool: [] for tool in tools}
    for _ in range(IMPORTS):
        for tool, folder in tools.items():
            env = {**os.environ, "PYTHONPATH": str(folder), "DS_ACCELERATOR": "cpu"}
            done = subprocess.run(
                [sys.executable, "-c", program],
                env=env,
                check=True,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
            )
            times_of[tool].append(float(done.stdout.splitlines()[-1]))
    return {tool: min(times) for tool, times in times_of.items()}


def apart(runs: dict[str, Run]) -> float:
    """The largest difference of a loss."""
    first, second = (one.losses for one in runs.values())
    return max(abs(a - b) for a, b in zip(first, second, strict=True))


def _ratio(ours: float, theirs: float, goal: float | None = None) -> str:
    missed = "" if goal is None or ours <= goal * theirs else " (missed)"
    return f"{ours / theirs:.2f}{missed}"


def case_row(case: tuple[str, ...], runs: dict[str, Run]) -> tuple[str, ...]:
    name = f"{case[0]}, stage {case[1]}, {', '.join(case[2:])}"
    ours = runs["dslaunch"]
    cells = [name, f"{ours.losses[0]:.4f} -> {ours.losses[-1]:.4f}"]
    theirs = runs.get("DeepSpeed")
    if theirs is None:
        return (*cells, "", f"{ours.step_s * 1e3:.0f}", f"{ours.peak_bytes / 1e6:.0f}", f"{ours.start_s:.1f}")
    difference, allowed = apart(runs), AGREE[case[2]]
    cells.append(
        f"{difference:.1e}{'' if difference <= allowed else ' (more than ' + format(allowed, 'g') + ')'}"
    )
    for scale, digits, name in ((1e3, 0, "step_s"), (1e-6, 0, "peak_bytes"), (1, 1, "start_s")):
        mine, other = getattr(ours, name), getattr(theirs, name)
        cells.append(f"{mine * scale:.{digits}f} / {other * scale:.{digits}f} = {_ratio(mine, other)}")
    return tuple(cells)


def main() -> None:
    given = arguments(__doc__, short="one round of two cases").parse_args()
    missing = why_no_deepspeed()
    tools = {tool: folder for tool, folder in folders().items() if not (missing and tool == "DeepSpeed")}
    rows, versions = [], {}
    for case in CASES[::4] if given.short else CASES:
        runs = measure(case, tools, 1 if given.short else ROUNDS)
        versions |= {tool: one.version for tool, one in runs.items()}
        rows.append(case_row(case, runs))
        print(" | ".join(rows[-1]), flush=True)
    imports = []
    for what, statement in (("import deepspeed", "pass"), ("the same, with torch loaded", "import torch")):
        times = import_times(tools, statement)
        cells = [f"{time * 1e3:.1f}" for time in times.values()]
        if not missing:
            cells.append(_ratio(times["dslaunch"], times["DeepSpeed"], IMPORT_GOAL))
        imports.append((what, *cells))
        print(" | ".join(imports[-1]), flush=True)
    head = ("", "loss", "losses apart by", "ms per step", "peak MB of rank 0", "s to the first step")
    packages = ", ".join(f"{tool} is {version}" for tool, version in versions.items())
    text = paragraphs(
        f"{conditions()}; {RANKS} ranks over gloo, one thread each; medians of {ROUNDS} runs, the packages "
        f"taking turns: {packages}. Pairs are dslaunch / DeepSpeed.",
        table(head, rows),
        f"Milliseconds to import, the least of {IMPORTS}, goal {IMPORT_GOAL:g}:",
        table(("", *tools, "ratio")[: len(imports[0])], imports),
        left_out(missing),
    )
    publish(COMMAND, text, is_wanted=given.publish)


if __name__ == "__main__":
    main()
