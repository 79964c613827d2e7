"""The printed table of where the time of a trace went."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...shared.table import table
from ..errors import LaunchError
from ..inputs.rank_set import format_ranks
from .merge import not_ours, read_head
from .times import MAX_NAMED, RankTimes

MAX_ROWS = 16  # ranks that are printed unless they are asked for
_HEAD = (
    *("ms in a step", "step", "compute", "comm", "hidden", "exposed"),
    *("optimizer", "data", "disk", "checkpoint", "idle"),
)


def head_of(times: Sequence[RankTimes], problems: Sequence[str], *, clock_error_s: float) -> dict[str, Any]:
    """Return the part of it that a file keeps."""
    return {
        "version": 1,
        "ranks": [one.as_json() for one in times],
        "problems": list(problems),
        "clock_error_s": clock_error_s,
    }


def lines_of_file(path: str, *, ranks: Sequence[range] | None = None) -> list[str]:
    """Return the lines for a file, whatever is in it.

    Errors: LaunchError if it is no such file, or has none of these ranks
    """
    head = read_head(path)
    try:
        return lines_of(head, ranks=ranks, path=path)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError):  # it was changed
        raise not_ours(path) from None


def lines_of(head: dict[str, Any], *, ranks: Sequence[range] | None = None, path: str = "") -> list[str]:
    """Return the lines of the table, for `ranks` alone if given. Errors: LaunchError if the file has none of
    them, or is of another version
    """
    try:
        times = [RankTimes.from_json(one) for one in head["ranks"]]
        problems, error_s = [str(one) for one in head["problems"]], float(head["clock_error_s"])
    except (LookupError, TypeError, ValueError):
        raise LaunchError(f"{path}: what it keeps is of another version of dslaunch; use that one") from None
    if ranks is not None:
        known = format_ranks(one.rank for one in times)
        times = [one for one in times if any(one.rank in these for these in ranks)]
        if not times:
            raise LaunchError(f"{path}: it has none of these ranks; it has {known or 'none'}")
    lines: list[str] = []
    if times:
        lines += _table(times[:MAX_ROWS] if ranks is None else times)
        if ranks is None and len(times) > MAX_ROWS:
            lines.append(f"and {len(times) - MAX_ROWS} ranks more: dslaunch trace {path} --trace_ranks all")
        lines += ["", *_named("waiting that nothing hides", times, "exposed")]
        lines += ["", *_named("operators, by own time", times, "operators")]
        if len({one.host for one in times}) > 1:
            lines += ["", f"the clocks of the hosts are brought together, to {error_s * 1e3:.3f} ms"]
    return lines + ([""] if lines and problems else []) + problems


def _table(times: Sequence[RankTimes]) -> list[str]:
    rows = []
    for one in times:
        hidden = "-" if one.hidden is None else f"{one.hidden * 100:.0f} %"
        parts = (one.optimizer_s, one.data_s, one.disk_s, one.checkpoint_s, one.idle_s)
        rows.append(
            (
                f"{one.host}: rank {one.rank}, {one.on}",
                *(map(_ms, (one.step_s, one.compute_s, one.communication_s))),
                hidden,
                *(map(_ms, (one.exposed_s, *parts))),
            )
        )
    steps = sorted({number for one in times for number in one.steps})
    kept = [
        place
        for place, title in enumerate(_HEAD)
        if title not in ("disk", "checkpoint") or any(row[place] != "0.0" for row in rows)
    ]
    shown = table(
        [[row[place] for place in kept] for row in rows],
        head=[_HEAD[place] for place in kept],
        numbers=range(1, len(kept)),
    )
    word = "step" if len(steps) == 1 else "steps"
    return [f"where the time of {word} {format_ranks(steps)} went:", "", *shown]


def _named(title: str, times: Sequence[RankTimes], field: str) -> list[str]:
    """Return the longest of all ranks together: the mean, and the rank that has the most of it. A rank
    without any operator has ended before it wrote them, and counts for no mean.
    """
    times = [one for one in times if one.operators or field != "operators"]
    by_name: dict[str, list[tuple[float, int, float]]] = {}
    for one in times:
        for name, s, count in getattr(one, field):
            by_name.setdefault(name, []).append((s, one.rank, count))
    if not by_name:
        return [f"{title}: none"]
    means = {name: sum(s for s, *_ in each) / len(times) for name, each in by_name.items()}
    step_s = sum(one.step_s for one in times) / len(times)
    rows = []
    for name in sorted(means, key=lambda name: (-means[name], name))[:MAX_NAMED]:
        most, rank, count = max(by_name[name])
        share = f"{means[name] / step_s * 100:.1f} %" if step_s else "-"
        row = (
            _ms(means[name]),
            share,
            _ms(most),
            f"{rank}",
            f"{count:.1f}".removesuffix(".0"),
            name if len(name) < 100 else f"{name[:97]}...",
        )
        rows.append(row)
    head = ("ms", "of a step", "most", "rank", "times", title)
    return table(rows, head=head, numbers=range(5))


def _ms(s: float | None) -> str:
    return "-" if s is None else f"{s * 1e3:.1f}"
