"""The newest state of a training: a snapshot in the memory of the hosts, or a checkpoint in a folder."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..errors import CheckpointError
from .files.manifest import read_manifest
from .load import LoadPlan, load_first_good, look
from .snapshots import FoundSnapshot, Snapshots, find_snapshots
from .storage.store import Store
from .training_state import Training

_log = logging.getLogger("dslaunch")


class _Candidate(NamedTuple):
    """A checkpoint that may be loaded."""

    is_snapshot: bool
    tag: str


def resume(
    training: Training,
    snapshots: Snapshots,
    store: Store | None,
    plan: LoadPlan,
    *,
    folder: str,
    is_asked: bool,
) -> tuple[str, dict[str, Any]] | None:
    """Load the newest of the snapshots and of the checkpoints in `store`, and of these the first that is not
    damaged; return where it is and its client_state, None if there is none. `folder` is the name of `store`
    in snapshots, empty without one.

    If not `is_asked`, the program has asked for the folder: then a snapshot that has more than a checkpoint,
    a client_state, is not taken; nor is anything loaded if no snapshot is newer: the caller loads then.
    Order:  a collective
    Errors: CheckpointError, on every rank
    """
    memory = snapshots.store
    found: list[_Candidate] | str = []
    try:
        memory.look()
    except OSError as error:
        _log.warning("the snapshots in memory cannot be seen: %s", error)
    if training.job.is_first:
        try:
            found = _candidates(find_snapshots(memory, folder), store, plan, is_asked=is_asked)
        except CheckpointError as error:
            found = str(error)
        except OSError as error:
            found = f"{'' if store is None else store.where} cannot be read: {error}"
    found = training.job.all_gather_objects(found, what="which checkpoint to load")[0]
    if isinstance(found, str):
        raise CheckpointError(found)
    candidates = [(memory if one.is_snapshot else store, one.tag) for one in found]
    given = [(one, tag) for one, tag in candidates if one is not None]
    if not given:
        return None
    index, place, kept = load_first_good(training, given, plan)
    is_snapshot = found[index].is_snapshot
    if is_snapshot:
        kept = snapshots.note_load(given[index][1], kept)
    elif kept:
        snapshots.has_given_state = True
    if is_snapshot and training.job.is_first:
        _tell(training)
    return place, kept


def load_snapshot(training: Training, snapshots: Snapshots, tag: str, plan: LoadPlan) -> int:
    """Load one snapshot; return the number of ranks that had written it.

    Order:  a collective
    Errors: CheckpointError, on every rank
    """
    snapshots.store.look()
    _, _, kept = load_first_good(training, [(snapshots.store, tag)], plan)
    snapshots.note_load(tag, kept)
    if training.job.is_first:
        _tell(training)
    return read_manifest(snapshots.store, tag).world_size


def _tell(training: Training) -> None:
    step = training.progress.global_steps
    print(f"dslaunch: training goes on after step {step}, from the memory of the hosts", flush=True)


def _candidates(
    snapshots: Sequence[FoundSnapshot], store: Store | None, plan: LoadPlan, *, is_asked: bool
) -> list[_Candidate]:
    """Return what may be loaded, best first, as rank 0 sees it; nothing if no snapshot is to be taken and
    the folder is all that was asked for.
    """
    tags = [] if store is None else look(store, plan)
    on_disk = [_Candidate(False, tag) for tag in tags]
    disk_step = _step_of(store, tags[0]) if store is not None and tags else -1
    newer = [one for one in snapshots if one.step > disk_step or (is_asked and one.step == disk_step)]
    if not is_asked and (not newer or not _is_alone(newer[0])):
        return []
    older = [one for one in snapshots if one not in newer]
    return [
        *(_Candidate(True, one.tag) for one in newer),
        *on_disk,
        *(_Candidate(True, one.tag) for one in older),
    ]


def _step_of(store: Store, tag: str) -> int:
    """Return the step of a checkpoint; -1 if it does not say it."""
    try:
        return read_manifest(store, tag).global_steps
    except (CheckpointError, OSError):
        return -1


def _is_alone(snapshot: FoundSnapshot) -> bool:
    """Tell whether a snapshot has all that the program would load from its folder; say so if it has not."""
    is_alone = bool(snapshot.kept.get("is_alone")) and not snapshot.kept.get("program")
    if not is_alone:
        _log.warning(
            "the memory of the hosts has a newer state than the folder, and load_checkpoint() does not take "
            "it, for the program saves a client_state with its checkpoints; engine.resume() takes it, with a "
            "client_state of its own"
        )
    return is_alone


def is_whole(plan: LoadPlan) -> bool:
    """Tell whether a load takes all that a training has."""
    return all((plan.strict, plan.with_module, plan.with_optimizer, plan.with_scheduler, plan.with_progress))
