"""Loading weights in transformers' format into an engine: each rank reads what it keeps, and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ..comm.rank_group import Job
from ..errors import CheckpointError
from .files.tensor_runs import MODEL
from .load import Load, LoadPlan, Names, names_of_all
from .pretrained.reader import Match, PretrainedReader
from .training_state import Training

_LISTED = 10
_log = logging.getLogger("dslaunch")


def load_weights(training: Training, path: Path, match_of: Callable[[Names], Match], *, strict: bool) -> None:
    """Take the weights of the folder at `path`, all or nothing as `load_checkpoint` does it.

    Masters of an optimizer get them, too; its states stay as they are. `match_of` returns the way from names
    in files to these of the whole model. Without `strict`, what only one of both has is named in a warning.
    Order:  a collective
    Errors: CheckpointError, on every rank, if one of them cannot read it, ranks see other files, or it does
            not fit
    """
    names = names_of_all(training)

    def make() -> PretrainedReader:
        reader = PretrainedReader(path, match_of(names), names.buffers)
        try:
            reader.check_twins(training.job.index, training.job.size)
        finally:
            reader.close()
        return reader

    reader = _open_together(training.job, make, path)
    plan = LoadPlan(
        strict=strict,
        strict_argument="strict",
        with_optimizer=False,
        with_scheduler=False,
        with_progress=False,
    )
    load = Load(training, lambda: reader, str(path), plan, names)
    try:
        problem = load.run()
    finally:
        reader.close()
    if problem is not None:
        text = problem[0] if str(path) in problem[0] else f"{path}: {problem[0]}"
        raise CheckpointError(text) from load.cause
    if not strict and training.job.is_first:
        _tell_of_differences(reader, names)


class _Answer(NamedTuple):
    asked: str
    fingerprint: str
    problem: str


def _open_together(job: Job, make: Callable[[], PretrainedReader], path: Path) -> PretrainedReader:
    """Return this rank's reader, if all have one for the same files.

    Order:  a collective
    Errors: CheckpointError, on every rank
    """
    reader: PretrainedReader | None = None
    answer = _Answer(str(path), "", "")
    cause: Exception | None = None
    try:
        reader = make()
        answer = answer._replace(fingerprint=reader.fingerprint)
    except Exception as error:  # the ranks must hear of it, whatever it is
        text = str(error) if isinstance(error, CheckpointError) else _described(error, path)
        cause, answer = error, answer._replace(problem=text)
    answers = job.all_gather_objects(answer, what="weights to load")
    for rank, one in enumerate(answers):
        if one.problem:
            text = one.problem if rank == 0 else f"on rank {rank}: {one.problem}"
            raise CheckpointError(text) from cause
        if one.fingerprint != answers[0].fingerprint:
            raise CheckpointError(
                f"rank {rank} finds other weights in {one.asked} than rank 0 in {answers[0].asked}; give all "
                "ranks the same files"
            )
    if reader is None:
        raise AssertionError("a rank without a reader has a problem")
    return reader


def _described(error: Exception, path: Path) -> str:
    return f"{path} cannot be taken over: {type(error).__name__}: {error}"


def _tell_of_differences(reader: PretrainedReader, names: Names) -> None:
    there = {name[len(MODEL) :] for name in reader.tensors()}
    here = names.parameters | names.buffers
    left_out = set(reader.training()["left_out"])
    for what, only in (
        ("only in the model, where they keep their values", here - there - left_out),
        ("only in the files", there - here),
    ):
        if only:
            shown = ", ".join(sorted(only)[:_LISTED])
            more = f" and {len(only) - _LISTED} more" if len(only) > _LISTED else ""
            _log.warning("%s: %s: %s%s", reader.where, what, shown, more)
