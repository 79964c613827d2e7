"""`python -m tests.runtime.plan.table [WORD ...]` prints rows whose name contains one of the words."""

from __future__ import annotations

import sys

from tests.fake_cuda.ranks import Parent
from tests.runtime.plan.beside import measure, predict
from tests.runtime.plan.rows import ROWS
from tests.runtime.ranks import RankFailed, Ranks


def main(words: list[str]) -> None:
    parent = Parent()
    for row in ROWS:
        if words and not any(word in row.name for word in words):
            continue
        seen = predict(row)
        if seen.problem:
            print(f"{row.name:60} PROBLEM {seen.problem}", flush=True)
        ranks = Ranks(parent.fork)
        try:
            real = ranks(measure, row, world_size=row.world_size, deadline_s=60.0)[row.rank]
        except RankFailed as error:
            print(f"{row.name:60} FAILED {str(error)[-1500:]}", flush=True)
            continue
        finally:
            ranks.stop()
        differences = [100 * (one / other - 1) for one, other in zip(seen.peaks, real.peaks, strict=True)]
        marks = "".join("*" if abs(one) > 3 else " " for one in differences)
        print(
            f"{row.name:60} {marks} {seen.peaks} {real.peaks} "
            + " ".join(f"{one:+.2f}%" for one in differences)
            + f" pinned {seen.pinned} {real.pinned}"
            + ("" if seen.sent == real.sent else f" SENT {seen.sent} {real.sent}"),
            flush=True,
        )
    parent.stop()


if __name__ == "__main__":
    from tests.runtime.plan import table  # not __main__, which ranks cannot import

    table.main(sys.argv[1:])
