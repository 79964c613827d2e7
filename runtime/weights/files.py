"""The weights in files that rank 0 writes as they come."""

from __future__ import annotations

import logging
import os

from ..checkpoint.export.output import OutputFiles
from ..checkpoint.export.output_plan import plan_output
from ..checkpoint.export.progress_bar import ProgressMeter
from ..checkpoint.storage.url_store import open_store
from ..comm.rank_group import Job
from ..errors import CheckpointError
from .weights_pass import WeightsPass

_log = logging.getLogger("dslaunch")


def write_weights(
    weights: WeightsPass,
    job: Job,
    folder: str | os.PathLike[str],
    file_name: str,
    *,
    max_shard_size: int | str | None,
) -> None:
    """Write the weights into a folder or URL: one file of this name, or several with an index, whose names
    have the same ending.

    Order:  every rank must call this
    Errors: CheckpointError, on every rank, if it cannot be written
    """
    problem: str | None = None
    if job.is_first:
        try:
            plan = plan_output(
                weights.plan.specs(),
                aliases=weights.plan.aliases,
                file_name=file_name,
                max_shard_size=max_shard_size,
            )
            with (
                ProgressMeter(f"save to {os.fspath(folder)}", plan.num_bytes) as meter,
                OutputFiles(open_store(folder), plan) as output,
            ):
                for name, tensor in weights:
                    output.put(name, tensor.cpu())
                    meter.advance(tensor.nbytes)
        except CheckpointError as error:
            problem = str(error)
    for _ in weights:  # even if rank 0 has failed: the other ranks send
        pass
    problem = job.all_gather_objects(problem, what="the success of saving")[0]
    if problem is not None:
        raise CheckpointError(problem)
    if weights.plan.no_tensors and job.is_first:
        _log.warning("%s holds tensors only: without %s", folder, ", ".join(weights.plan.no_tensors))
