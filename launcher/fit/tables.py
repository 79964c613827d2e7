"""The tables below the verdict: bytes of each kind of rank, peaks of each phase, hosts, and the wire."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ...shared.table import table
from ..job.mesh import HostSlots
from ..wording import shown_size
from .answer import ALL_HOST, DEVICE, HOST, NO_PEAK, PINNED, Rehearsed, crosses
from .step_time import TimeRange, shown_range, whole_step
from .verdict import OUTSIDE, OUTSIDE_BYTES, HostUse, gib

MAX_COLUMNS = 6  # kinds of rank that are shown beside each other
_NONE = "-"
# The order of rows; kinds that a later runtime adds come after them.
_KINDS = (
    "parameters", "gathered parameters", "gradients", "masters and optimizer states", "communication",
    "temporaries of the step", "activations", "of the program",
)  # fmt: skip


def describe(
    rehearsed: Sequence[Rehearsed],
    uses: Sequence[HostUse],
    hosts: Sequence[HostSlots],
    *,
    has_gpus: bool,
    times: Sequence[Mapping[str, TimeRange]] = (),
    times_from: str = "",
    columns: int | None = None,
) -> list[str]:
    """Return all tables, with an empty line before each. `times_from`: where the speeds are from."""
    shown, left_out = _shown(rehearsed)
    lines: list[str] = []
    for title, rows, head in (
        _ranks_table(shown, has_gpus=has_gpus),
        _phases_table(shown, has_gpus=has_gpus),
        _hosts_table(uses),
        _wire_table(shown, hosts),
        _time_table(rehearsed, shown, times, times_from),
    ):
        if rows:
            numbers = range(1, len(head))
            lines += [
                "",
                title,
                *(f"  {line}" for line in table(rows, head=head, numbers=numbers, columns=columns)),
            ]
    if left_out:
        names = ", ".join(one.name for one in left_out[:MAX_COLUMNS])
        lines += [
            "",
            f"not shown, because they need less: {names}" + (" ..." if left_out[MAX_COLUMNS:] else ""),
        ]
    return lines


_Table = tuple[str, list[list[str]], list[str]]


def _shown(rehearsed: Sequence[Rehearsed]) -> tuple[list[Rehearsed], list[Rehearsed]]:
    """Return the kinds of rank with the highest peaks, in order, and the others."""
    largest = sorted(rehearsed, key=_most, reverse=True)[:MAX_COLUMNS]
    return (
        [one for one in rehearsed if one in largest],
        [one for one in rehearsed if one not in largest],
    )


def _most(one: Rehearsed) -> int:
    worst = one.answer.worst(DEVICE)
    return worst.peak(DEVICE).num_bytes if worst else one.answer.host_bytes


def _column(one: Rehearsed) -> str:
    return one.name if len(one.alike) == 1 else f"{one.name}, as {len(one.alike)} ranks"


def _ranks_table(shown: Sequence[Rehearsed], *, has_gpus: bool) -> _Table:
    """Return the parts of each rank's highest moment, then its host memory and files."""
    rows: list[list[str]] = []
    if has_gpus:
        peaks = [worst.peak(DEVICE) if (worst := one.answer.worst(DEVICE)) else NO_PEAK for one in shown]
        for kind in _kinds([dict(one.kinds) for one in peaks]):
            rows.append([kind, *(_cell(dict(one.kinds).get(kind, 0)) for one in peaks)])
        rows.append([OUTSIDE, *(_cell(OUTSIDE_BYTES) for _ in shown)])
        rows.append(["on the GPU, at the peak", *(_cell(one.num_bytes + OUTSIDE_BYTES) for one in peaks)])
    for place, label in (
        (HOST, "in host memory"),
        (PINNED, "in host memory, pinned"),
        (ALL_HOST, "in host memory, both at once"),
    ):
        found = [one.answer.worst(place) for one in shown]
        if place == ALL_HOST and not any(one.answer.worst(PINNED) for one in shown):
            continue
        if any(found):
            rows.append([label, *(_cell(one.peak(place).num_bytes if one else 0) for one in found)])
    for kind, label in (("offloaded", "in files"), ("checkpoint", "of a checkpoint, in files")):
        found_bytes = [dict(one.answer.file_bytes).get(kind, 0) for one in shown]
        if any(found_bytes):
            rows.append([label, *map(_cell, found_bytes)])
    return "Each kind of rank at its peak:", rows, ["", *map(_column, shown)]


def _kinds(found: Sequence[dict[str, int]]) -> Iterator[str]:
    there = {kind for one in found for kind, num_bytes in one.items() if num_bytes}
    yield from (kind for kind in _KINDS if kind in there)
    yield from sorted(there - set(_KINDS))


def _phases_table(shown: Sequence[Rehearsed], *, has_gpus: bool) -> _Table:
    """Return the peak of each phase: on the GPU, and in host memory."""
    names = dict.fromkeys(stretch.name for one in shown for stretch in one.answer.stretches)
    rows: list[list[str]] = []
    head = [""]
    for one in shown:
        head += [f"{one.name}: GPU", "host"] if has_gpus else [one.name]
    for name in names:
        cells: list[str] = []
        for one in shown:
            found = [stretch for stretch in one.answer.stretches if stretch.name == name]
            on_gpu = max((stretch.peak(DEVICE).num_bytes for stretch in found), default=0)
            on_host = max((stretch.host_bytes for stretch in found), default=0)
            cells += [_cell(on_gpu), _cell(on_host)] if has_gpus else [_cell(on_host)]
        if any(cell != _NONE for cell in cells):
            rows.append([name, *cells])
    return "Tensors at the peak of each phase:", rows, head


def _hosts_table(uses: Sequence[HostUse]) -> _Table:
    """Return one row for each group of neighbouring hosts that are alike."""
    groups: list[list[HostUse]] = []
    for one in uses:
        is_same = bool(groups) and _size(groups[-1][0]) == _size(one)
        if is_same:
            groups[-1].append(one)
        else:
            groups.append([one])
    rows = [
        [
            group[0].name if len(group) == 1 else f"{group[0].name} to {group[-1].name}",
            str(group[0].num_ranks),
            gib(group[0].needed_bytes),
            _NONE if group[0].total_bytes is None else gib(group[0].total_bytes),
        ]
        for group in groups
    ]
    return "Host memory:", rows, ["", "ranks", "needed", "there"]


def _size(one: HostUse) -> tuple[int, int, int | None]:
    return one.num_ranks, one.needed_bytes, one.total_bytes


def _wire_table(shown: Sequence[Rehearsed], hosts: Sequence[HostSlots]) -> _Table:
    """Return what each kind of rank sends in its second step, by axis and by whether it leaves the host."""
    rows: list[list[str]] = []
    keys: dict[tuple[str, str, str], list[int]] = {}
    for column, one in enumerate(shown):
        for sent in one.answer.steps[-1].sent if one.answer.steps else ():
            where = "between hosts" if crosses(sent.ranks, hosts) else "inside a host"
            for kind, num_bytes in sent.kinds:
                keys.setdefault((sent.axis, kind, where), [0] * len(shown))[column] += num_bytes
    for (axis, kind, where), sizes in keys.items():
        rows.append([f"{axis}, {kind.replace('_', ' ')}, {where}", *map(_cell, sizes)])
    return "Sent by a rank in one step:", rows, ["", *map(_column, shown)]


def _time_table(
    rehearsed: Sequence[Rehearsed],
    shown: Sequence[Rehearsed],
    times: Sequence[Mapping[str, TimeRange]],
    times_from: str,
) -> _Table:
    """Return the second step's time: numbers by measured speeds, ranges by data sheets."""
    of_rank = {one.rank: parts for one, parts in zip(rehearsed, times, strict=False)}
    columns = [of_rank[one.rank] for one in shown if one.rank in of_rank]
    rows = [
        [part, *(shown_range(parts[part]) for parts in columns)]
        for part in (columns[0] if columns else ())
        if any(parts[part].high for parts in columns)
    ]
    if rows:
        rows.append(["all together", *(shown_range(whole_step(parts)) for parts in columns)])
    return f"Time of a step, by {times_from}:", rows, ["", *map(_column, shown)]


def _cell(num_bytes: int) -> str:
    return shown_size(num_bytes) if num_bytes else _NONE
