"""client_state: what a program puts into a checkpoint for itself.

Ranks that give the same are the rule, and then a checkpoint holds it once. Where they differ it
holds each rank's, so that a load by as many ranks gives every rank its own. A rank that gives none gets that
of the first rank which gave one.
"""

from __future__ import annotations

import io
import logging
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..comm.rank_group import Job
from ..config.keys.value import show
from ..errors import CheckpointError
from ..strided import bytes_of
from .files.format import check_is_plain
from .files.manifest import digest

_log = logging.getLogger("dslaunch")


def agree(client_state: Mapping[str, Any] | None, job: Job) -> bytes | None:
    """Return what this rank has to hand to `merge`; None if another rank hands in the same, or there is none.

    Order:  a collective
    Errors: CheckpointError, on every rank, if what one of them gave cannot be kept
    """
    rank = job.index
    plain: dict[str, Any] = {}
    mark = ""  # mark of a rank that gives none
    problem: str | None = None
    cause: Exception | None = None
    try:
        plain = _checked(client_state)
        mark = fingerprint(plain) if plain else ""
    except CheckpointError as error:
        problem, cause = str(error) if rank == 0 else f"on rank {rank}: {error}", error
    except Exception as error:  # such as of a dict that holds itself
        cause = error
        problem = (
            f"client_state of rank {rank} cannot be read through: {type(error).__name__}: {error}; give "
            "numbers, strings, tensors, and lists and dicts of them"
        )
    given = job.all_gather_objects((problem, mark), what="client_state")
    problem = next((theirs for theirs, _ in given if theirs is not None), None)
    if problem is not None:
        raise CheckpointError(problem) from cause
    marks = [theirs for _, theirs in given]
    first = next((index for index, theirs in enumerate(marks) if theirs), None)
    if first is None or not mark or (mark == marks[first] and rank != first):
        return None
    buffer = io.BytesIO()
    torch.save(plain, buffer)
    return buffer.getvalue()


def merge(handed_in: Sequence[bytes | None]) -> dict[str, Any]:
    """Return the entries of training.pt, from what `agree` returned on each rank. See format.py."""
    states = [None if data is None else _read(data) for data in handed_in]
    first = next((state for state in states if state is not None), {})
    merged: dict[str, Any] = {"client_state": first}
    if sum(state is not None for state in states) > 1:
        merged["client_states"] = [first if state is None else state for state in states]
    return merged


def of_rank(saved: Mapping[str, Any], *, rank: int, num_ranks: int) -> dict[str, Any]:
    """Return what one of `num_ranks` ranks gets of the checkpoint whose training.pt is `saved`.

    Where another number of ranks wrote it, and gave different ones, a warning names what differed.
    """
    first: dict[str, Any] = saved["client_state"]
    states: Sequence[dict[str, Any]] = saved.get("client_states") or [first]
    if len(states) == num_ranks:
        return states[rank]
    if rank == 0 and (differing := _differing(states)):
        _log.warning(
            "the checkpoint was written by %d ranks that gave client_state with different values of %s, and "
            "is read by %d: every rank gets rank 0's; load with %d ranks to give each its own, or take them "
            "from client_states in training.pt",
            len(states),
            ", ".join(map(repr, differing)),
            num_ranks,
            len(states),
        )
    return first


def fingerprint(value: object) -> str:
    """Return a string that is equal for equal values, on whatever device and in whatever order of keys."""
    buffer = io.BytesIO()
    pickler = _Canonical(buffer, protocol=5)
    pickler.fast = True  # whether two strings are one object makes no difference
    pickler.dump(value)
    return digest(buffer.getbuffer())


class _Canonical(pickle.Pickler):
    """Pickler that writes equal bytes for equal values; no program reads them."""

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return "tensor", str(value.dtype), tuple(value.shape), _digest_of(value)
        if isinstance(value, set | frozenset):
            return "set", sorted(value, key=repr)
        if isinstance(value, dict):
            return type(value).__name__, sorted(value.items(), key=lambda item: repr(item[0]))
        return None


def _digest_of(tensor: Tensor) -> str:
    return digest(bytes_of(tensor))


def _checked(client_state: Mapping[str, Any] | None) -> dict[str, Any]:
    client_state = {} if client_state is None else client_state
    if not isinstance(client_state, Mapping):
        raise CheckpointError(
            f"save_checkpoint(client_state={show(client_state)}): must be a dict of names and values, "
            'as load_checkpoint() returns it; give e.g. {"epoch": 3}'
        )
    client_state = dict(client_state)
    check_is_plain(client_state, "client_state")
    return client_state


def _read(data: bytes) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    return state


def _differing(states: Sequence[Mapping[str, Any]]) -> list[str]:
    names = sorted({name for state in states for name in state}, key=str)
    return [
        name
        for name in names
        if len({fingerprint(state[name]) if name in state else "" for state in states}) > 1
    ]
