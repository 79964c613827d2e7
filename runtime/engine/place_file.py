"""File that tells the launcher this rank's place along the axes of its job: its report of a failure names
it.
"""

from __future__ import annotations

import contextlib
import os

from ..environment import WorkerEnvironment
from ..mesh.domain import Domains

_written: set[str] = set()  # files that this process wrote, and not the program itself


def write_place(worker: WorkerEnvironment, domains: Domains) -> None:
    """Write it into the file that the launcher has named, whole or not at all. Without axes the file is
    removed if an earlier engine of this process wrote it. Nothing happens where the launcher has named none,
    or its folder is gone.
    """
    place = domains.axes.place(domains.job.index)
    experts = [together for together, _ in domains.of_experts.values()]
    if len(experts) == 1:
        place = ", ".join(filter(None, (place, f"ep {experts[0].index}")))
    if worker.place_file is None:
        return
    with contextlib.suppress(OSError):
        if place:
            partial = f"{worker.place_file}.{os.getpid()}"
            with open(partial, "w", encoding="utf-8") as file:
                file.write(place)
            os.replace(partial, worker.place_file)
            _written.add(worker.place_file)
        elif worker.place_file in _written:
            _written.remove(worker.place_file)
            os.unlink(worker.place_file)
