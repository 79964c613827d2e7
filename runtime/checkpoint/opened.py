"""Calls of loading to a checkpoint of any format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ..errors import CheckpointError
from .deepspeed.folder import is_deepspeed
from .deepspeed.reader import DeepSpeedReader
from .files.reader import CheckpointReader
from .files.tensor_runs import TensorRuns
from .storage.folder_store import FolderStore
from .storage.store import MANIFEST, Store

_UNIVERSAL = "latest_universal"


class OpenCheckpoint(Protocol):
    """A checkpoint that tensors can be read from. No method is a collective.

    Errors: CheckpointError, of all methods, that names the file if it cannot be read or is damaged
    """

    tag: str
    place: str  # folder or URL
    where: str  # the same for messages

    def training(self) -> dict[str, Any]:
        """Return all but the tensors of the model and the optimizer. See "One checkpoint" in format.py."""

    def tensors(self) -> Mapping[str, TensorStorageMetadata]:
        """Return the name, shape (`size`) and dtype (`properties.dtype`) of every tensor;
        for names see tensor_runs.py.
        """

    def check(self, all_runs: Iterable[TensorRuns], names: Iterable[str] = ()) -> None:
        """Check that what `read` of these, and `tensor` of these names, will read is there and as it was
        written; nothing is kept of it.
        """

    def read(self, all_runs: Iterable[TensorRuns]) -> None:
        """Fill the runs of these; of a tensor of another dtype, with rounded values."""

    def tensor(self, name: str) -> Tensor:
        """Return one whole tensor, in host memory."""

    def state_dict(self) -> dict[str, Any]:
        """Return the module's state_dict, whole and in host memory."""


def latest_tag(store: Store) -> str | None:
    """Return what `latest` names; without that file, what DeepSpeed's converter to
    universal checkpoints left.
    """
    tag = store.latest()
    return store.named_by(_UNIVERSAL) if tag is None else tag


def is_checkpoint(store: Store) -> bool:
    """Whether the folder is itself a checkpoint, and not one that holds them."""
    return store.size(MANIFEST) is not None or (isinstance(store, FolderStore) and is_deepspeed(store.root))


def holds_checkpoints(store: Store) -> bool:
    """Whether the folder has checkpoints in it."""
    return latest_tag(store) is not None or bool(store.tags())


def open_checkpoint(store: Store, tag: str, *, groups: Sequence[Sequence[str]] = ()) -> OpenCheckpoint:
    """Return the checkpoint `tag`, dslaunch's or DeepSpeed's.

    `groups`: the names of the parameters in each group of this run's optimizer, in order. They are
    needed because DeepSpeed's checkpoints of stage 0 give parameters numbers and no names.
    Errors: CheckpointError if it is not there, or damaged
    """
    folder = store.folder_of(tag)
    if isinstance(store, FolderStore) and store.size(f"{folder}/{MANIFEST}") is None:
        path = store.root / folder
        if is_deepspeed(path):
            return _open_deepspeed(path, groups)
    return CheckpointReader(store, tag)


def _open_deepspeed(path: Path, groups: Sequence[Sequence[str]]) -> DeepSpeedReader:
    try:
        return DeepSpeedReader(path, groups=groups)
    # a file of another version than 0.19.8
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is not as DeepSpeed 0.19 writes checkpoints: {type(error).__name__}: {error}; load it "
            "with the DeepSpeed that wrote it, and save it with that of today"
        ) from error
