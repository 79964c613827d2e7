"""Predicted peaks beside measured ones, row by row.

`python -m tests.runtime.plan.table [WORD ...]` prints the rows whose name contains one of the words, or all;
with --publish they are the table of docs/reference/plan-accuracy.md.
"""

from __future__ import annotations

import argparse
import datetime
import os
from collections.abc import Iterator
from typing import NamedTuple

import torch

from benchmarks.guide_section import CHECKOUT, replace_section
from tests.fake_cuda.ranks import Parent
from tests.runtime.compat.test_estimate import theirs
from tests.runtime.plan.beside import Row, Seen, measure, predict
from tests.runtime.plan.rows import ROWS
from tests.runtime.ranks import RankFailed, Ranks

PAGE = CHECKOUT / "docs" / "reference" / "plan-accuracy.md"
COMMAND = "make bench-plan"
_HEAD = (
    "| program | layout | ranks | predicted | measured | difference | pinned: predicted | measured "
    "| sent is equal | DeepSpeed's estimate | Accelerate's estimate |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|"
)


class Compared(NamedTuple):
    """A row, as planned and as run."""

    row: Row
    planned: Seen
    real: Seen

    @property
    def difference(self) -> float:
        """Return the larger one of both steps' differences, as a part of the measured peak."""
        pairs = zip(self.planned.peaks, self.real.peaks, strict=True)
        return max((one / other - 1 for one, other in pairs), key=abs)


def compare(words: list[str]) -> Iterator[Compared]:
    """Plan and run each row."""
    parent = Parent()
    for row in ROWS:
        if words and not any(word in row.name for word in words):
            continue
        ranks = Ranks(parent.fork)
        try:
            planned = predict(row)
            real: Seen = ranks(measure, row, world_size=row.world_size, deadline_s=60.0)[row.rank]
        except (RankFailed, TimeoutError) as error:
            print(f"{row.name}: {str(error)[-1500:]}", flush=True)
            continue
        finally:
            ranks.stop()
        yield Compared(row, planned, real)
    parent.stop()


def by_deepspeed(one: Compared) -> str:
    """Return the bytes of parameters, gradients and states by DeepSpeed's functions for stages 2 and 3."""
    zero = one.row.config["zero_optimization"]
    total, largest = one.real.num_params
    offload = "offload_optimizer" in zero
    if zero["stage"] == 2:
        return _kib(theirs(2).estimate_zero2_model_states_mem_needs(total, one.row.world_size, 1, offload)[1])
    if zero["stage"] == 3:
        with_params = "offload_param" in zero
        found = theirs(3).estimate_zero3_model_states_mem_needs(
            total, largest, one.row.world_size, 1, offload, with_params
        )
        return _kib(found[1])
    return ""


def by_accelerate(one: Compared) -> str:
    """Return what `accelerate estimate-memory` says of training with Adam, which knows of no other rank.

    Source: accelerate 1.15, commands/estimate.py, estimate_training_usage()
    """
    total, _ = one.real.num_params
    is_fp32 = not any(one.row.config.get(name, {}).get("enabled") for name in ("bf16", "fp16"))
    return _kib(4 * total * (4 if is_fp32 else 2))


def line(one: Compared) -> str:
    """Return a row of the table."""
    cells = [
        one.row.program,
        one.row.layout + (f", rank {one.row.rank}" if one.row.rank else ""),
        str(one.row.world_size),
        _kib(max(one.planned.peaks)),
        _kib(max(one.real.peaks)),
        f"{100 * one.difference:+.2f} %",
        _kib(one.planned.pinned) if one.real.pinned >= 2**12 else "",
        _kib(one.real.pinned) if one.real.pinned >= 2**12 else "",
        "yes" if one.planned.sent == one.real.sent else "no",
        by_deepspeed(one),
        by_accelerate(one),
    ]
    return f"| {' | '.join(cells)} |"


def text_of(found: list[Compared]) -> str:
    """Return the table with what it shows."""
    differences = [abs(one.difference) for one in found]
    num_near, num_equal = (sum(one <= most for one in differences) for most in (0.03, 0.0005))
    day = datetime.datetime.now(tz=datetime.timezone.utc).date()
    return "\n".join(
        [
            f"{len(found)} rows, of which {num_near} differ by at most 3 % and {num_equal} by at most "
            f"0.05 %; the largest difference is "
            f"{100 * max(differences):.1f} %. Bytes on the wire are equal in "
            f"{sum(one.planned.sent == one.real.sent for one in found)} rows.",
            f"Run on {day} with torch {torch.__version__}. Sizes are in KiB, the larger one of both steps.",
            "",
            _HEAD,
            *map(line, found),
        ]
    )


def _kib(nbytes: int) -> str:
    return f"{nbytes / 2**10:,.0f}"


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--publish", action="store_true", help=f"write the table into {PAGE.name}")
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    found = []
    for one in compare(given.words):
        print(line(one), one.planned.problem, flush=True)
        if not one.planned.problem:
            found.append(one)
    if given.publish:
        replace_section(PAGE, COMMAND, text_of(found))


if __name__ == "__main__":
    from tests.runtime.plan import table  # not __main__, which ranks cannot import

    table.main()
