"""The result of a rehearsal as plain data: bytes by kind, bytes on the wire, and work, of a kind of rank."""

from __future__ import annotations

from typing import Any

from .memory import DEVICE, PLACES, RunMemory
from .program import Rehearsal
from .work import RankWork

NUM_POINTS = 300  # points of the curve over the run


def answer_of(rehearsal: Rehearsal) -> dict[str, Any]:
    """Return what the launcher reads.

    Units: bytes; `flops` are multiplications and additions; `clock` counts operations
    """
    memory = rehearsal.memory
    return {
        "device": rehearsal.device.type,
        "mesh": rehearsal.mesh,
        "told": rehearsal.stages.told,
        "waits_for": rehearsal.waits_for,
        "problem": None if rehearsal.problem is None else rehearsal.problem._asdict(),
        "guesses": [{"line": line, "what": what} for line, what in rehearsal.guesses.lines.items()],
        "num_steps": len(rehearsal.steps),
        "phases": [_phase(memory, number) for number in range(len(memory.phases))],
        "curve": [
            {"clock": clock, "bytes": kinds} for clock, kinds in memory.curve(DEVICE, num_points=NUM_POINTS)
        ],
        "steps": [_work(one) for one in rehearsal.steps],
        "file_bytes": {"offloaded": rehearsal.disk.nbytes, "checkpoint": rehearsal.saved_bytes},
        "model": rehearsal.described(),
    }


def _phase(memory: RunMemory, number: int) -> dict[str, Any]:
    phase = memory.phases[number]
    peaks = {}
    for place in PLACES:
        moment = phase.peaks.get(place)
        if moment is not None and moment.nbytes:
            peaks[place] = {
                "bytes": moment.nbytes,
                "kinds": dict(memory.at(moment.clock, place)),
                "module": moment.module or "",
            }
    return {"name": phase.name, "clock": phase.begin, "peaks": peaks}


def _work(work: RankWork) -> dict[str, Any]:
    return {
        "on_device": [group._asdict() | amounts._asdict() for group, amounts in work.on_device.items()],
        "host_bytes": work.host_bytes,
        "copied_bytes": dict(work.copied_bytes),
        "update_copied_bytes": dict(work.update_copied_bytes),
        "sent": [
            {
                "axis": axis,
                "ranks": list(ranks),
                "bytes": dict(sent.bytes),
                "number": dict(sent.number),
                "update_bytes": dict(+sent.update_bytes),
            }
            for (axis, ranks), sent in work.sent.items()
        ],
    }
