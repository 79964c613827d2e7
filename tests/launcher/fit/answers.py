"""Small answers of rehearsals, in whole GiB."""

from __future__ import annotations

from typing import Any

from dslaunch.launcher.fit.answer import Answer, Rehearsed, read_answer
from dslaunch.launcher.fit.verdict import JobMemory
from dslaunch.launcher.job.mesh import HostSlots

GIB = 2**30


def peak(module: str = "", **gibs: float) -> dict[str, Any]:
    kinds = {name.replace("_", " "): int(value * GIB) for name, value in gibs.items()}
    return {"bytes": sum(kinds.values()), "kinds": kinds, "module": module}


def sent(axis: str, ranks: list[int], kind: str, num_bytes: int) -> dict[str, Any]:
    return {
        "axis": axis,
        "ranks": ranks,
        "bytes": {kind: num_bytes},
        "number": {kind: 1},
        "update_bytes": {},
    }


def answer(*, activations: float = 8, host: float = 2, pinned: float = 0, **more: Any) -> Answer:
    """Return two phases: the second has the peak on the device."""
    given = {
        "problem": None,
        "guesses": [],
        "num_steps": 2,
        "phases": [
            {"name": "building the model", "clock": 0, "peaks": {"device": peak(parameters=3)}},
            {
                "name": "step 1: backward",
                "clock": 50,
                "peaks": {
                    "device": peak("lm_head", parameters=3, gradients=1, activations=activations),
                    "host": peak(of_the_program=host),
                    "pinned": peak(masters_and_optimizer_states=pinned),
                    "all host": peak(of_the_program=host, masters_and_optimizer_states=pinned),
                },
            },
        ],
        "curve": [{"clock": 0, "bytes": {"parameters": 3 * GIB}}],
        "steps": [
            {
                "on_device": [
                    {
                        "dtype": "bfloat16",
                        "intensity": 8,
                        "is_update": False,
                        "flops": 10**12,
                        "moved_bytes": GIB,
                        "number": 9,
                    }
                ],
                "host_bytes": 0,
                "copied_bytes": {},
                "update_copied_bytes": {},
                "sent": [
                    sent("dp", [], "reduce_scatter", GIB),
                    sent("tp", [0, 1], "all_reduce", 2 * GIB),
                ],
            }
        ],
        "file_bytes": {"offloaded": 0, "checkpoint": GIB},
        "model": {"num_trained": 10},
        **more,
    }
    return read_answer(given)


def rehearsed(
    found: Answer | None = None, *, rank: int = 0, place: str = "", num_alike: int = 4
) -> Rehearsed:
    return Rehearsed(
        rank=rank, place=place, alike=tuple(range(rank, rank + num_alike)), answer=found or answer()
    )


def memory(
    *, device: float | None = 22.5, hosts: tuple[float | None, ...] = (None, None), num_ranks: int = 2
) -> JobMemory:
    return JobMemory(
        device_bytes=None if device is None else int(device * GIB),
        hosts=tuple(HostSlots(f"node{number}", num_ranks) for number in range(1, len(hosts) + 1)),
        host_bytes=tuple(None if one is None else int(one * GIB) for one in hosts),
        process_bytes=GIB,
    )
