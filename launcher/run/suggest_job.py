"""Configurations that a job could have: those that bounds allow are rehearsed, and the best is written."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..errors import LaunchError
from ..fit.candidates import PLACINGS, Candidate, Placing, Setup
from ..fit.finding import FitFinding
from ..fit.suggestion import MARGIN, Suggestions, Tried, in_order
from ..output.job_report import check_place, put_file
from .plan_job import PlannedJob
from .search_job import Attempted, Search, config_of

MOST_TRIED = 5  # configurations that are rehearsed at once
NUM_ROUNDS = 2


def suggest(job: PlannedJob, found: FitFinding, *, has_meshes: bool = True) -> Suggestions:
    """Return configurations for the job, which was rehearsed as it is.

    `has_meshes`: with other meshes, which the ds_config alone does not set.
    On hosts without GPUs each rank has its part of the host's memory, and nothing is offloaded.
    Errors: LaunchError if its arguments name no ds_config, or if the memory of its hosts is not known
    """
    _check_memory(job)
    search = Search(job, found, config=config_of(job), margin=MARGIN)
    configurations = search.configurations(has_meshes=has_meshes)
    seconds = {one: search.seconds(one) for one in configurations}
    tried = [Tried(candidate=search.given, finding=found)]
    for _ in range(NUM_ROUNDS):
        number = MOST_TRIED - sum(one.fits() for one in tried[1:])
        following = _following(search, sorted(configurations, key=seconds.__getitem__), tried, number)
        tried += search.rehearse([Attempted(one) for one in following])
    others = {one.setup for one in configurations if _has_room(search, one)} - {
        one.candidate.setup for one in tried
    }
    fits = any(one.fits() for one in tried)
    ordered = in_order(sorted(tried, key=lambda one: search.seconds(one.candidate)))
    return Suggestions(
        tried=ordered,
        too_large=tuple(_too_large(search, configurations)),
        hosts=None if fits else search.more_hosts(),
        config=config_of(job),
        num_others=len(others),
        notes=tuple(_notes(job, search, ordered[0], has_meshes=has_meshes)),
    )


def _check_memory(job: PlannedJob) -> None:
    """Errors: LaunchError if the memory of a host without GPUs is not known"""
    memory = job.memory
    if memory.device_bytes is not None:
        return
    unknown = [
        host.name for host, total in zip(memory.hosts, memory.host_bytes, strict=True) if total is None
    ]
    if unknown:
        raise LaunchError(
            f"--suggest: the memory of {unknown[0]}, which has no GPUs, is not known; give --host_memory"
        )


def _following(
    search: Search, configurations: Sequence[Candidate], tried: Sequence[Tried], number: int
) -> list[Candidate]:
    """Return what is rehearsed next: of the setups that should fit the fastest, each with its fastest micro
    batch; then, by what they should need, those whose bound is below the memory.
    """
    is_tried = {one.candidate for one in tried}
    failed = {one.candidate.setup for one in tried if one.finding is None}
    fitting = {one.candidate.setup for one in tried[1:] if one.fits()}  # without the job as it is
    left = [
        one
        for one in configurations
        if one not in is_tried and one.setup not in failed | fitting and _has_room(search, one)
    ]
    room = search.forecast.room
    expected = {one: search.forecast.expected(one) for one in left}
    hopeful = [one for one in left if room.holds(expected[one])]
    seen = {one.candidate.setup for one in tried}
    rest = sorted((one for one in left if one.setup not in seen), key=lambda one: sum(expected[one]))
    chosen: dict[Setup, Candidate] = {}
    for one in [*hopeful, *rest]:
        if len(chosen) < number:
            chosen.setdefault(one.setup, one)
    return list(chosen.values())


def _has_room(search: Search, one: Candidate) -> bool:
    """Tell whether a configuration is below the memory by its bound."""
    forecast = search.forecast
    bound = forecast.sizes.bound(one.setup, one.micro_batch_size, world_size=forecast.world_size)
    return forecast.room.holds(bound)


def _too_large(search: Search, configurations: Sequence[Candidate]) -> Iterator[tuple[Placing, int]]:
    """Yield each placing that nothing else makes small enough, with what it needs at least."""
    forecast = search.forecast
    for placing in PLACINGS:
        needs = [
            forecast.sizes.bound(one.setup, one.micro_batch_size, world_size=forecast.world_size)
            for one in configurations
            if one.placing == placing
        ]
        if needs and not any(forecast.room.holds(need) for need in needs):
            yield placing, min(search.rank_bytes(need) for need in needs)


def _notes(job: PlannedJob, search: Search, first: Tried, *, has_meshes: bool) -> Iterator[str]:
    """Yield what the best configuration asks for beside its ds_config, and what was not tried."""
    is_model = job.rehearsal.model is not None
    best = first.candidate.setup if first.fits() else None
    if best is not None and is_model and best.is_checkpointed:
        yield (
            "beside the ds_config: the program switches checkpointing on, as "
            "model.gradient_checkpointing_enable() does"
        )
    if best is not None and job.plan.mesh is not None and best.mesh is not None and best.says_mesh:
        yield f"beside the ds_config: --mesh={best.mesh.text} in place of --mesh={job.plan.mesh.text}"
    if not is_model:
        yield (
            "not tried: activation checkpointing, which the program itself switches; plan it once with and "
            "once without"
        )
    if not has_meshes:
        yield "not tried: meshes, which are not in the ds_config"
    elif search.divides_by_itself:
        yield "not tried: meshes, because the ds_config says how layers or sequences are divided"
    elif not is_model and job.plan.mesh is None:
        yield (
            "not tried: meshes, because --mesh is not given; for a program that takes its tp from it write "
            "--mesh=tp=1"
        )
    if job.lengths is not None:
        yield "lengths: these rows are for micro batches with the longest samples, memory and time"


def check_config_place(path: Path) -> None:
    """Errors: LaunchError if no ds_config can be written there, or if there is a file already"""
    check_place(path, option="--out")
    if path.exists():
        raise LaunchError(f"--out={path} is there already; give another name, or move it away")


def write_config(path: Path, suggested: Suggestions) -> None:
    """Write the ds_config of the best configuration, if there is one.

    Errors: LaunchError if it cannot be written
    """
    if suggested.best is None:
        return
    config = suggested.best.candidate.config(suggested.config)
    try:
        put_file(path, (json.dumps(config, indent=2) + "\n").encode())
    except OSError as error:
        raise LaunchError(f"--out={path}: cannot be written: {error.strerror}") from None
