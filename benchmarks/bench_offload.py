"""Memory and disk that training needs, and time of a step, wherever values lie:
on CPUs, over gloo.

    python benchmarks/bench_offload.py [FOLDER] [--short] [--publish]

FOLDER is on a local disk (default: a temporary one beside this checkout). Each row is a training of its own,
one after the other, with the same model and batches; the losses must agree. Peaks are of resident memory,
read from the system, beside the formula's bytes. On a run without GPUs device "cpu" has no effect, so there
is no row for it. --short trains a small model on one rank for a step. Nothing here fails on a time. --publish
writes the table into docs/reference/benchmarks.md.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.guide_section import CHECKOUT, arguments, conditions, paragraphs, publish, table
from benchmarks.offload_worker import Taken, Turn
from benchmarks.team import Team

WORKER = str(Path(__file__).with_name("offload_worker.py"))
COMMAND = "make bench-offload"
RANKS = (1, 2)
MICRO_BATCHES = (1, 4)
ROWS = {  # stage, offload_optimizer.device, offload_param.device
    "stage 2": (2, "none", "none"),
    "stage 2, optimizer on nvme": (2, "nvme", "none"),
    "stage 3": (3, "none", "none"),
    "stage 3, optimizer on nvme": (3, "nvme", "none"),
    "stage 3, both on nvme": (3, "nvme", "nvme"),
}
WHOLE = {"width": 768, "blocks": 12, "sequence": 64, "num_steps": 5}  # 86 million parameters
SHORT = {"width": 512, "blocks": 6, "sequence": 32, "num_steps": 1}  # 19 million
# losses: a rank that is alone adds micro batches in bfloat16 where nothing is offloaded,
# and in float32 elsewhere
AGREE = 0.05

Found = dict[tuple[int, int, str], Taken]  # (ranks, micro batches, row) -> answer


def measure(turn: Turn, num_ranks: int) -> Taken:
    """Return the answer of rank 0.

    Errors: RuntimeError if a rank failed
    """
    with tempfile.TemporaryDirectory() as said:
        team = Team(str(turn), [WORKER, json.dumps(turn._asdict())], num_ranks, Path(said) / "rank")
        try:
            return Taken(**json.loads(team.ask("")[0]))
        finally:
            team.end()


def measure_all(shape: dict[str, int], folder: str, *, all_ranks: Sequence[int]) -> Found:
    """Errors: RuntimeError if a rank failed, or rows did not train the same"""
    answers: Found = {}
    for num_ranks in all_ranks:
        for num_micro_batches in MICRO_BATCHES:
            for row, (stage, states, parameters) in ROWS.items():
                turn = Turn(
                    stage=stage,
                    states=states,
                    parameters=parameters,
                    num_micro_batches=num_micro_batches,
                    folder=folder,
                    **shape,
                )
                taken = answers[num_ranks, num_micro_batches, row] = measure(turn, num_ranks)
                print(
                    f"{num_ranks} ranks, {num_micro_batches} micro batches, {row}: {_mb(taken.peak_bytes)} "
                    f"of {_mb(taken.formula_bytes)} MB, {taken.s * 1e3:.0f} ms",
                    flush=True,
                )
            losses = {row: answers[num_ranks, num_micro_batches, row].loss for row in ROWS}
            if max(losses.values()) - min(losses.values()) > AGREE:
                raise RuntimeError(f"{num_ranks} ranks: the rows did not train the same: {losses}")
    return answers


def markdown(found: Found) -> str:
    heads = (
        "ranks",
        "micro batches",
        "",
        "memory, MB",
        "formula",
        "files, MB",
        "formula",
        "ms per step",
        "/ not offloaded",
    )
    rows = []
    for (num_ranks, num_micro_batches, row), taken in found.items():
        at_home = found[num_ranks, num_micro_batches, row.partition(",")[0]]
        rows.append(
            (
                str(num_ranks),
                str(num_micro_batches),
                row,
                _mb(taken.peak_bytes),
                _mb(taken.formula_bytes),
                _mb(taken.disk_bytes),
                _mb(taken.disk_formula_bytes),
                f"{taken.s * 1e3:.0f}",
                f"{taken.s / at_home.s:.2f}",
            )
        )
    numel = next(iter(found.values())).numel
    return paragraphs(
        f"{conditions()}; {numel / 1e6:.0f} million parameters in bfloat16, AdamW; of rank 0, "
        "medians of the steps.",
        table(heads, rows),
    )


def _mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:.0f}"


def main() -> None:
    parser = arguments(__doc__, short="a small model, one rank, one step")
    parser.add_argument("folder", nargs="?", help="a folder on a local disk")
    options = parser.parse_args()
    shape = SHORT if options.short else WHOLE
    with tempfile.TemporaryDirectory(dir=options.folder or CHECKOUT.parent) as folder:
        answers = measure_all(shape, folder, all_ranks=RANKS[:1] if options.short else RANKS)
    publish(COMMAND, markdown(answers), is_wanted=options.publish)


if __name__ == "__main__":
    main()
