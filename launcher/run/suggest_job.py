"""Configurations that a job could have: those that bounds allow are rehearsed, and the best is written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import LaunchError
from ..fit.answer import DEVICE, HOST, Answer
from ..fit.candidates import Candidate, model_bytes, smaller
from ..fit.finding import FitFinding
from ..fit.model import ds_config_of, read_ds_config
from ..fit.rehearse import Variant, rehearse_variants
from ..fit.suggestion import MARGIN, Suggestions, Tried, in_order
from ..fit.verdict import OUTSIDE_BYTES
from ..output.job_report import check_place, put_file
from .plan_job import PlannedJob

MOST_TRIED = 5  # placings that are rehearsed, each with up to two micro batches


def suggest(job: PlannedJob, found: FitFinding) -> Suggestions:
    """Return configurations for the job, which was rehearsed as it is.

    On hosts without GPUs each rank has its part of the host's memory, and nothing is offloaded.
    Errors: LaunchError if its arguments name no ds_config, or the memory of its hosts is not known
    """
    limit = _limit(job)
    base = read_ds_config(Path(job.plan.cwd, ds_config_of(job.plan.program.arguments)))
    worst = max(found.rehearsed, key=lambda one: sum(size for _, size in one.answer.model))
    place = HOST if job.memory.device_bytes is None else DEVICE
    sizes = model_bytes(worst.answer, base, place=place)
    num_ranks = job.plan.world_size // (1 if job.mesh is None else job.mesh.pp * job.mesh.tp)
    placings = [
        (placing, candidates)
        for placing, candidates in sizes.candidates(
            num_ranks=num_ranks, limit_bytes=limit, has_stages=job.num_stages > 1
        )
        if place == DEVICE or not (placing.has_optimizer_on_host or placing.has_parameters_on_host)
    ]
    allowed = [candidates for _, candidates in placings if candidates][:MOST_TRIED]
    first = _try(job, base, [candidates[0] for candidates in allowed])
    again = [
        next_one
        for candidates, one in zip(allowed, first, strict=True)
        if one.finding is not None and not one.fits()
        for next_one in [smaller(candidates, one.candidate, _largest(one.finding, place), limit, place=place)]
        if next_one is not None
    ]
    tried = in_order([*first, *_try(job, base, again)])
    needed = None
    if not any(one.fits() for one in tried):
        per_host = max(1, num_ranks // max(1, len(job.plan.nodes)))
        needed = sizes.hosts_needed(ranks_per_host=per_host, limit_bytes=limit)
    too_large = tuple(
        (placing, sizes.bound(placing, 1, num_ranks=num_ranks))
        for placing, candidates in placings
        if not candidates
    )
    return Suggestions(tried=tried, too_large=too_large, hosts_needed=needed, config=base)


def _limit(job: PlannedJob) -> int:
    """Return the bytes that a rank may need, of its GPU or of its part of the host's memory.

    Errors: LaunchError if the memory of a host without GPUs is not known
    """
    memory = job.memory
    if memory.device_bytes is not None:
        return int(memory.device_bytes * (1 - MARGIN))
    shares = []
    for host, total in zip(memory.hosts, memory.host_bytes, strict=True):
        if total is None:
            raise LaunchError(
                f"--suggest: the memory of {host.name}, which has no GPUs, is not known; give --host_memory"
            )
        shares.append(int(total * (1 - MARGIN)) // host.num_ranks - memory.process_bytes)
    return min(shares) + OUTSIDE_BYTES


def _largest(found: FitFinding, place: str) -> Answer:
    return max(found.rehearsed, key=lambda one: _peak(one.answer, place)).answer


def _peak(answer: Answer, place: str) -> int:
    worst = answer.worst(place)
    return 0 if worst is None else worst.peak(place).num_bytes


def _try(job: PlannedJob, base: dict[str, Any], candidates: Sequence[Candidate]) -> list[Tried]:
    """Rehearse the job with each of these configurations."""
    if not candidates:
        return []
    variants = [
        Variant(name=one.text, config=one.config(base), micro_batch_size=one.micro_batch_size)
        for one in candidates
    ]
    results = rehearse_variants(job.plan, job.kinds, job.rehearsal, variants)
    return [_tried(job, one, result) for one, result in zip(candidates, results, strict=True)]


def _tried(job: PlannedJob, candidate: Candidate, result: tuple[Answer, ...] | LaunchError) -> Tried:
    try:
        if isinstance(result, LaunchError):
            raise result
        return Tried(candidate=candidate, finding=job.find(result))
    except LaunchError as error:
        return Tried(candidate=candidate, finding=None, why_not=str(error).partition("; plan its")[0])


def check_config_place(path: Path) -> None:
    """Errors: LaunchError if no ds_config can be written there, or if there is a file already"""
    check_place(path, option="--out")
    if path.exists():
        raise LaunchError(f"--out={path} is there already; give another name, or move it away")


def write_config(path: Path, suggested: Suggestions) -> None:
    """Write the ds_config of the best configuration, if there is one."""
    if suggested.best is not None:
        config = suggested.best.candidate.config(suggested.config)
        put_file(path, (json.dumps(config, indent=2) + "\n").encode())
