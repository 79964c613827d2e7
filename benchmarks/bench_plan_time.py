"""Time of a step as `dslaunch plan` tells it beside that of real steps: twelve layouts on CPUs.

    python benchmarks/bench_plan_time.py [--short] [--publish]

The machine is measured once for each number of ranks (`dslaunch check --bandwidth`), all layouts run by
turns, the runs of one layout are held against its plan (`dslaunch plan --from_run`), and each is planned.
Nothing here fails on a time. --publish writes the table into docs/reference/plan-accuracy.md.
"""

from __future__ import annotations

import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.guide_section import CHECKOUT, arguments, conditions, paragraphs, replace_section, table
from benchmarks.plan_time_worker import MARK

PAGE = CHECKOUT / "docs" / "reference" / "plan-accuracy.md"
COMMAND = "make bench-plan-time"
DSLAUNCH = str(Path(sys.executable).with_name("dslaunch"))
WORKER = str(Path(__file__).with_name("plan_time_worker.py"))
ROUNDS = 3
STEPS = 10
GOAL = 0.2
NUM_BEST = 3
LIMIT_S = 300


class Layout(NamedTuple):
    """One way to train the same samples."""

    name: str
    stage: int
    micro_batch_size: int
    num_micro_batches: int
    num_ranks: int = 2
    offload: str = ""
    is_checkpointed: bool = False

    @property
    def hosts(self) -> tuple[str, ...]:
        """Return the options that name its hosts."""
        return "-H", f"localhost:{self.num_ranks}"

    def config(self, folder: Path) -> dict[str, Any]:
        """Return its ds_config."""
        zero: dict[str, Any] = {"stage": self.stage}
        if self.offload:
            zero["offload_optimizer"] = {"device": self.offload, "nvme_path": str(folder)}
        return {
            "train_micro_batch_size_per_gpu": self.micro_batch_size,
            "gradient_accumulation_steps": self.num_micro_batches,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": zero,
        }

    def words(self, folder: Path, steps: int) -> list[str]:
        """Return the program and its arguments."""
        path = folder / f"{self.name.replace(' ', '-').replace(',', '')}.json"
        path.write_text(json.dumps(self.config(folder)))
        checkpointed = ["--checkpointed"] if self.is_checkpointed else []
        return [
            WORKER, f"--steps={steps}", *checkpointed,
            "--deepspeed", "--deepspeed_config", str(path),
        ]  # fmt: skip


LAYOUTS = (
    Layout("stage 1, 8 x 1", 1, 8, 1),
    Layout("stage 1, 2 x 4", 1, 2, 4),
    Layout("stage 2, 4 x 2", 2, 4, 2),
    Layout("stage 2, 1 x 8", 2, 1, 8),
    Layout("stage 3, 8 x 1", 3, 8, 1),
    Layout("stage 3, 4 x 2", 3, 4, 2),
    Layout("stage 3, 1 x 8", 3, 1, 8),
    Layout("stage 1, 8 x 1, checkpointed", 1, 8, 1, is_checkpointed=True),
    Layout("stage 3, 4 x 2, checkpointed", 3, 4, 2, is_checkpointed=True),
    Layout("stage 2, 8 x 1, optimizer on nvme", 2, 8, 1, offload="nvme"),
    Layout("4 ranks, stage 1, 4 x 1", 1, 4, 1, num_ranks=4),
    Layout("4 ranks, stage 3, 2 x 2", 3, 2, 2, num_ranks=4),
)
CALIBRATED_BY = {one.num_ranks: one for one in (LAYOUTS[0], LAYOUTS[10])}


def dslaunch(*words: str, folder: Path) -> str:
    """Return what the command prints. Errors: RuntimeError if it fails"""
    env = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    done = subprocess.run(
        [DSLAUNCH, *words],
        env={**env, "XDG_STATE_HOME": str(folder)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"dslaunch {' '.join(words)}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def logs_of(layout: Layout, folder: Path, number: int) -> Path:
    """Return the folder of one run's logs."""
    return folder / "logs" / f"{layout.name.replace(' ', '-')}-{number}"


def run(layout: Layout, folder: Path, number: int, steps: int) -> float:
    """Return the median time of a step in a real run."""
    logs = logs_of(layout, folder, number)
    logs.mkdir(parents=True)
    out = dslaunch(*layout.hosts, "--log_dir", str(logs), *layout.words(folder, steps), folder=folder)
    return float(next(line.partition(MARK)[2] for line in out.splitlines() if MARK in line))


def plan(layout: Layout, folder: Path, steps: int, *options: str) -> tuple[float, float]:
    """Return the time of a step as planned by speeds alone, and as corrected by the runs that are kept."""
    words = ("plan", *layout.hosts, "--gpu=none", *options, "--json", *layout.words(folder, steps))
    planned = json.loads(dslaunch(*words, folder=folder))
    (parts,), factors = planned["step_seconds"], planned["speeds"]["factors"]
    by_speeds = sum(one["high"] / factors.get(name, 1.0) for name, one in parts.items())
    return by_speeds, sum(one["high"] for one in parts.values())


class Timed(NamedTuple):
    """One layout: seconds of a step."""

    layout: Layout
    by_speeds: float
    after_runs: float
    measured: tuple[float, ...]  # one for each round

    @property
    def middle(self) -> float:
        """Return the median of the rounds."""
        return statistics.median(self.measured)

    @property
    def error(self) -> float:
        """Return how far the plan is off, as a part of what was measured."""
        return self.after_runs / self.middle - 1

    @property
    def ratios(self) -> tuple[float, float]:
        """Return what was planned over what was measured: by speeds alone, and after runs."""
        return self.by_speeds / self.middle, self.after_runs / self.middle

    def is_told_apart(self, other: Timed) -> bool:
        """Tell whether each round of one is longer than all of the other."""
        return min(self.measured) > max(other.measured) or min(other.measured) > max(self.measured)


def measure(layouts: tuple[Layout, ...], folder: Path, *, rounds: int, steps: int) -> list[Timed]:
    """Measure the machine, run the layouts by turns, and plan them."""
    calibrated_by = [CALIBRATED_BY[number] for number in sorted({one.num_ranks for one in layouts})]
    for one in calibrated_by:
        dslaunch("check", *one.hosts, "--bandwidth", folder=folder)
    times: dict[str, list[float]] = {one.name: [] for one in layouts}
    for number in range(rounds):
        for one in layouts:
            times[one.name].append(run(one, folder, number, steps))
            print(f"round {number + 1}: {one.name}: {times[one.name][-1] * 1e3:.0f} ms", flush=True)
    for one in calibrated_by:
        for number in range(rounds):
            plan(one, folder, steps, "--from_run", str(logs_of(one, folder, number)))
    found = [Timed(one, *plan(one, folder, steps), tuple(times[one.name])) for one in layouts]
    for timed in found:
        print(f"{timed.layout.name}: {timed.error:+.0%}", flush=True)
    return found


def markdown(found: list[Timed], *, rounds: int) -> str:
    """Return the table, with what it shows."""
    num_near = sum(abs(one.error) <= GOAL for one in found)
    is_missed = "" if num_near == len(found) else " (missed)"
    rows = [
        (
            one.layout.name + (" (the runs)" if one.layout in CALIBRATED_BY.values() else ""),
            *(f"{seconds * 1e3:.0f}" for seconds in (one.by_speeds, one.after_runs)),
            f"{one.middle * 1e3:.0f} ({min(one.measured) * 1e3:.0f} to {max(one.measured) * 1e3:.0f})",
            *(f"{ratio:.2f}" for ratio in one.ratios),
        )
        for one in found
    ]
    day = datetime.datetime.now(tz=datetime.timezone.utc).date()
    return paragraphs(
        f"{num_near} of {len(found)} layouts are within {GOAL:.0%} after runs of one{is_missed}; the largest "
        f"difference is {max(abs(one.error) for one in found):.0%}, and by speeds alone "
        f"{max(abs(one.ratios[0] - 1) for one in found):.0%}. {_order(found)}",
        f"{day}, {conditions()}, load {os.getloadavg()[1]:.1f}; medians of {rounds} runs by turns (from the "
        "shortest to the longest), in ms a step.",
        table(
            (
                "layout",
                "by speeds alone",
                "after runs of one",
                "measured",
                "by speeds / measured",
                "after runs / measured",
            ),
            rows,
        ),
    )


def _order(found: list[Timed]) -> str:
    """Return the best by plan and by run, and whether they are the same."""
    planned = sorted(found, key=lambda one: one.after_runs)[:NUM_BEST]
    ran = sorted(found, key=lambda one: one.middle)[:NUM_BEST]
    pairs = list(zip(planned, ran, strict=True))
    by_plan, by_run = ("; ".join(one.layout.name for one in ones) for ones in (planned, ran))
    if all(one.layout == other.layout for one, other in pairs):
        return f"The best {NUM_BEST} are in the right order: {by_plan}."
    told = f"The best {NUM_BEST} by plan: {by_plan}. By run: {by_run}"
    if any(one.is_told_apart(other) for one, other in pairs):
        return f"{told} (missed)."
    return f"{told}, which differ by less than the runs of one layout do."


def main() -> None:
    """Measure, print, and publish if that is wanted."""
    parser = arguments(__doc__, short="two layouts, one round")
    options = parser.parse_args()
    layouts, rounds, steps = (LAYOUTS[:2], 1, 3) if options.short else (LAYOUTS, ROUNDS, STEPS)
    with tempfile.TemporaryDirectory(dir=CHECKOUT.parent) as folder:
        found = measure(layouts, Path(folder), rounds=rounds, steps=steps)
    text = markdown(found, rounds=rounds)
    print(f"\n{text}")
    if options.publish:
        replace_section(PAGE, COMMAND, text)


if __name__ == "__main__":
    main()
