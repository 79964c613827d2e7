"""The time from a fault to the next step: dslaunch, torchrun, NVRx and torchft, with six faults.

Run: python benchmarks/bench_recovery.py --help          (as root: it makes the hosts on this machine)

Four hosts, each a network, process and mount namespace with an sshd of its own, share this machine's cores.
Every rank notes what it does when, so all tools are measured in the same way; of ours the stages are those
that dslaunch tells. Nothing here fails on a time.

Files, each importing only those before it: recovery_worker -> recovery_peers -> recovery_run -> this one.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.guide_section import arguments, conditions, paragraphs, publish, table
from benchmarks.recovery_peers import Tool, tools
from benchmarks.recovery_run import FAULTS, WAIT_S, Measured, NotMeasured, many, measure
from dslaunch.launcher.run_state.recovery import STAGES
from tests.lab import Lab, LabError

NUM_HOSTS = 4
LIMIT_S = 580.0  # time of all runs; what has not begun by then is left out
LATE = "not measured: the time was up"


def main() -> int:
    parser = arguments(__doc__, short="the first of the tools, one rank killed: to see that it works")
    parser.add_argument("--only", help="of the tools this one", choices=[one.name for one in tools()])
    parser.add_argument("--often", type=int, default=10, help="how often a rank of one job of ours is killed")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds after which no run begins")
    parser.add_argument("--lab", default="bench-recovery", help="name of the lab to make")
    args = parser.parse_args()
    reason = Lab.can_be_made()
    if reason is not None:
        print(f"no hosts can be made here: {reason}")
        return 0
    began = time.monotonic()
    found: dict[tuple[str, str], Measured | str] = {}
    used = [one for one in tools() if not one.why_missing and args.only in (None, one.name)]
    faults = list(FAULTS)
    if args.short:
        used, faults = used[:1], ["rank killed"]
    try:
        with Lab.up(NUM_HOSTS, name=args.lab) as lab:
            for some in (used[:2], used[2:]):  # where the time is short, it is that of the last ones
                for fault in faults:
                    for tool in some:
                        found[fault, tool.name] = _measured(lab, tool, fault, began, args.limit)
            often = _often(lab, 2 if args.short else args.often, began)
    except LabError as error:
        print(f"bench_recovery: {error}", file=sys.stderr)
        return 1
    text = paragraphs(
        f"{conditions()}; one run of each.",
        _beside(found, faults, used),
        "Seconds of each stage of dslaunch's recoveries, as it tells them:",
        _stages(found, faults),
        often,
        "How each is run: " + "; ".join(f"{one.name}: {one.about}" for one in used) + ".",
        *(f"Left out: {one.name}: {one.why_missing}." for one in tools() if one.why_missing),
        *(f"{tool}, {fault}: {one}." for (fault, tool), one in found.items() if _is_failure(one)),
    )
    publish("make bench-recovery", text, is_wanted=args.publish)
    print(f"it took {time.monotonic() - began:.0f} s")
    return 0


def _is_failure(one: Measured | str) -> bool:
    return isinstance(one, str) and one != LATE


def _often(lab: Lab, num: int, began: float) -> str:
    """Kill a rank of one job of ours so many times; return a sentence on it."""
    try:
        times = sorted(many(lab, num))
    except NotMeasured as error:
        return f"A rank killed {num} times in one job: {error}."
    finally:
        lab.restore()
    print(f"{time.monotonic() - began:5.0f} s  rank killed {num} times: {times}", flush=True)
    if len(times) < 2:
        return ""
    late = times[math.ceil(0.95 * len(times)) - 1]
    return (
        f"A rank of one job of dslaunch killed {len(times)} times, by `dslaunch drill`: in all a median of "
        f"{statistics.median(times):.2f} s to the next step, the 95th percentile {late:.2f} s."
    )


def _measured(lab: Lab, tool: Tool, fault: str, began: float, limit_s: float) -> Measured | str:
    """Measure one tool with one fault; return why not, if that fails."""
    if time.monotonic() - began > limit_s:
        return LATE
    try:
        one: Measured | str = measure(lab, tool, fault)
    except NotMeasured as error:
        one = str(error)
    finally:
        lab.restore()
    print(f"{time.monotonic() - began:5.0f} s  {fault}, {tool.name}: {one}", flush=True)
    return one


def _beside(
    found: Mapping[tuple[str, str], Measured | str], faults: Sequence[str], used: Sequence[Tool]
) -> str:
    head = (
        "fault",
        "",
        "in all",
        "to new workers",
        "import",
        "groups",
        "load",
        "step",
        "steps again",
    )
    rows = []
    for fault in faults:
        for tool in used:
            one = found[fault, tool.name]
            failed = "not measured" if one == LATE else f"not within {WAIT_S:.0f} s"
            cells = [failed, *[""] * 6] if isinstance(one, str) else one.cells()
            rows.append([fault, tool.name, *cells])
    return table(head, rows)


def _stages(found: Mapping[tuple[str, str], Measured | str], faults: Sequence[str]) -> str:
    rows = []
    for fault in faults:
        one = found.get((fault, "dslaunch"))
        stages = one.stages_s if isinstance(one, Measured) else {}
        seconds = (stages.get(stage.title) for stage in STAGES)
        rows.append([fault, *("" if one is None else f"{one:.2f}" for one in seconds)])
    return table(("fault", *(stage.title for stage in STAGES)), rows)


if __name__ == "__main__":
    sys.exit(main())
