"""A checkpoint as whole weights by name, to be written in another format:
one tensor in host memory at a time.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor

from ...errors import NoCheckpointError
from ..files.tensor_runs import MASTER, MODEL, model_name, state_name
from ..opened import OpenCheckpoint, is_checkpoint, latest_tag, open_checkpoint
from ..storage.store import LATEST, Store
from ..storage.url_store import open_store
from .output_plan import Spec


class Source(ABC):
    """One checkpoint, of whatever format, by the names of the module's state_dict."""

    where: str  # folder or URL, for messages
    tag: str

    @abstractmethod
    def names(self) -> Mapping[str, Spec]:
        """Return all parameters and buffers that the checkpoint holds, in its own order, tied ones once."""

    @abstractmethod
    def tensor(self, name: str) -> Tensor:
        """Return one of them, whole, contiguous and in host memory: the float32 master where there is one.

        Errors: CheckpointError that names the file if it cannot be read or is damaged
        """

    @abstractmethod
    def aliases(self) -> Mapping[str, str]:
        """Return the other names of tied parameters, each with the one that `names` has."""

    @abstractmethod
    def frozen(self) -> frozenset[str]:
        """Return the names of the parameters that were not trained, whether the checkpoint
        holds them or not.
        """

    def kept_dtypes(self) -> frozenset[str]:
        """Return the names of the tensors that no conversion may change."""
        return frozenset()


class ReaderSource(Source):
    """A checkpoint that engines can load, dslaunch's or DeepSpeed's."""

    def __init__(self, reader: OpenCheckpoint) -> None:
        self.where, self.tag = reader.where, reader.tag
        self._reader = reader
        self._saved = reader.training()
        tensors = reader.tensors()
        self._stored = {}  # name -> name in the checkpoint
        for name in (full[len(MODEL) :] for full in tensors if full.startswith(MODEL)):
            master = state_name(name, MASTER)
            self._stored[name] = master if master in tensors else model_name(name)
        for name in self._saved.get("no_weights", ()):
            self._stored.pop(name, None)
        self._specs = {
            name: Spec(tuple(tensors[stored].size), tensors[stored].properties.dtype)
            for name, stored in self._stored.items()
        }

    def names(self) -> Mapping[str, Spec]:
        return self._specs

    def tensor(self, name: str) -> Tensor:
        return self._reader.tensor(self._stored[name])

    def aliases(self) -> Mapping[str, str]:
        aliases: dict[str, str] = self._saved["aliases"]
        return {other: name for other, name in aliases.items() if name in self._stored}

    def frozen(self) -> frozenset[str]:
        return frozenset(self._saved["frozen"])

    def kept_dtypes(self) -> frozenset[str]:
        return frozenset(self._saved.get("kept_dtypes", ()))


def locate(where: str | os.PathLike[str], tag: str | None) -> tuple[Store, str]:
    """Return the store and the tag of a checkpoint: `where` holds it, or is its own folder; without a tag,
    what `latest` names.

    Errors: CheckpointError that says what was looked for
    """
    store = open_store(where)
    if tag is not None:
        return store, tag
    latest = latest_tag(store)
    if latest is not None:
        return store, latest
    if is_checkpoint(store):
        parent, _, name = store.place.rstrip("/").rpartition("/")
        return open_store(parent or ("/" if store.place.startswith("/") else ".")), name
    raise NoCheckpointError(
        f"{store.where}/{LATEST} does not exist; give the folder that save_checkpoint() wrote to, or a tag: "
        f"the folder holds {', '.join(store.tags()) or 'no checkpoint'}"
    )


def open_source(where: str | os.PathLike[str], tag: str | None = None) -> Source:
    """Return the checkpoint `tag` of a folder or URL; see `locate`.

    Errors: CheckpointError if it is not there, or damaged as far as sizes tell
    """
    store, located = locate(where, tag)
    return ReaderSource(open_checkpoint(store, located))
