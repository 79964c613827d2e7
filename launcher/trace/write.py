"""The end of a traced attempt: from the hosts' files to one file, and a table."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from ..errors import LaunchError
from ..job.plan import Plan
from ..job.trace_ranks import traced_ranks
from ..job.verdict import RankFailure, Verdict, signal_name
from ..options.trace import TraceOptions
from ..output.console import Console
from ..sync.trace_files import TraceFiles
from ..wording import count, shown_size
from .merge import Merged, write_merged
from .rank_trace import RankTrace, read_rank, spans_name
from .shown import head_of, lines_of
from .times import times_of

MAX_SILENT_BYTES = 8 << 20  # more take longer than two seconds


def write_trace(
    options: TraceOptions, plan: Plan, files: TraceFiles, console: Console, verdict: Verdict, *, path: str
) -> bool:
    """Merge the files of an attempt, and print where its time went; return whether there is a file.

    Errors: LaunchError if that cannot be written; the table was printed then
    """
    nbytes = files.num_bytes()
    if nbytes > MAX_SILENT_BYTES:
        console.say(f"--trace: putting {shown_size(nbytes)} of the ranks together")
    ends = _ends(verdict, (one.rank for node in plan.nodes for one in node.ranks))
    began_at = time.monotonic()
    places = [(node.host.name, rank) for node in plan.nodes for rank in traced_ranks(node)]
    traces: list[RankTrace] = []
    for host, rank in places:
        console.progress_of(f"--trace: {len(traces)} of {count(len(places), 'rank')} read", began_at)
        traces.append(
            read_rank(
                Path(files.folder, host),
                rank=rank,
                host=host,
                clock=files.clock_of(host),
                wanted=(options.first, options.last),
                how_it_ended=ends.get(rank, ""),
                was_brought=files.was_brought(host, spans_name(rank)),
            )
        )
    files.empty()
    problems = [(one.rank, problem) for one in traces for problem in one.problems]
    found = [one for one in traces if one.steps]
    if not found:
        if "started" not in dict(verdict.phases_s):  # another message has the reason
            return False
        for rank, problem in problems:
            console.warn(f"--trace: rank {rank}: {problem}")
        if traces:
            console.warn(f"--trace: no rank has made a step of {options.steps}, so there is no file")
        return False
    times = [one for one in map(times_of, found) if one is not None]
    error_s = max(one.clock_error_s for one in found)
    said = [f"rank {rank}: {problem}" for rank, problem in problems]
    head = head_of(times, said, clock_error_s=error_s)
    merged: Merged | None = None
    try:
        merged = write_merged(
            path,
            found,
            head,
            told=lambda num: console.progress_of(f"--trace: {count(num, 'event')} written", began_at),
        )
    finally:
        console.end_progress()
        for rank, problem in (*(merged.notes if merged is not None else ()), *problems):
            console.warn(f"--trace: rank {rank}: {problem}")
        for line in filter(None, lines_of({**head, "problems": []}, path=path)):
            console.say(line)
    console.say(
        f"trace of {count(len(found), 'rank')}, {count(merged.num_events, 'event')}, "
        f"{shown_size(merged.num_bytes)}: {path}; open it at https://ui.perfetto.dev"
    )
    return True


def _ends(verdict: Verdict, ranks: Iterable[int]) -> Mapping[int, str]:
    """Describe the ends of ranks that did not end well."""
    failures = (verdict.culprit, *verdict.others)
    is_stopped = verdict.culprit is not None or verdict.interrupted_by is not None
    stopped = dict.fromkeys(ranks, "it was stopped when the job was") if is_stopped else {}
    return stopped | {
        one.rank: f"it was killed by {signal_name(one.signal)}"
        if one.signal
        else f"it exited with code {one.code}"
        for one in failures
        if isinstance(one, RankFailure)
    }


def free_path(options: TraceOptions, name: str, *, node_rank: int | None = None) -> str:
    """Return the path of the file: a name of ours is one that no file has.

    `node_rank`: of a job without SSH, in which each node writes its own.
    """
    of_node = "" if node_rank is None else f"-node{node_rank}"
    if options.place:
        stem, dot, end = options.place.rpartition(".json")
        return os.path.abspath(f"{stem}{of_node}{dot}{end}")
    number = 1
    while True:
        more = f"-{number}" if number > 1 else ""
        path = os.path.abspath(f"trace-{name}{of_node}{more}.json.gz")
        if not os.path.lexists(path):
            return path
        number += 1


def refuse_place(options: TraceOptions) -> None:
    """Check the place now, since the job may take days. Errors: LaunchError if no file can be made there"""
    if options.place and os.path.isdir(options.place):
        raise LaunchError(f"--trace_to={options.place}: is a folder; give the name of a file")
    folder = os.path.dirname(os.path.abspath(options.place or "trace"))
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
        why = "is no folder" if not os.path.isdir(folder) else "cannot be written by you"
        raise LaunchError(
            f"--trace: {folder} {why}, so no trace could be kept; give --trace_to=FILE elsewhere"
        )
