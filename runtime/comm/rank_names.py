"""Names of ranks in messages: their numbers, and where they are along the axes of the job."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_BETWEEN = ", "  # stands between several axes of a place


class RankNames:
    """Names of the ranks of one job."""

    def __init__(self, places: Sequence[str] = ()) -> None:
        """`places` are by rank, as "stage 1 of 2, dp 0"; none, or "", where there is nothing to say."""
        self._places = tuple(places)

    @property
    def has_places(self) -> bool:
        """Whether some rank is told by more than its number."""
        return any(self._places)

    def place(self, ranks: Iterable[int]) -> str:
        """Return the common part of the places of these ranks."""
        said = [self._places[rank].split(_BETWEEN) for rank in ranks if rank < len(self._places)]
        first = said[0] if said else []
        return _BETWEEN.join(part for part in first if part and all(part in one for one in said))

    def of(self, *ranks: int) -> str:
        """Return what they are called: "rank 2 (stage 1 of 2, dp 0)", "ranks 2-3 (stage 1 of 2)"."""
        place = self.place(ranks)
        return f"rank{'s' if len(ranks) > 1 else ''} {folded(ranks)}" + (f" ({place})" if place else "")


def folded(ranks: Iterable[int]) -> str:
    """Return numbers as "0-2,5"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
