"""The storages of tensors that have no values: on which device each is said to be, and for how long."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage

_PAGE = 4096


@dataclass(slots=True, eq=False)
class StorageRecord:
    """One storage. `known` holds its values where they are known, in host memory. `taken_bytes` is what it
    takes where another allocator than torch's gives it memory.
    """

    device: torch.device
    nbytes: int
    address: int  # made up, so that tensors which share memory can be told
    known: UntypedStorage | None = None
    is_pinned: bool = False
    taken_bytes: int | None = None


class Storages:
    """All storages without values that are alive, by the address of torch's own object.

    `born` is called with a record when its memory is taken, `died` when it is given back; a storage that is
    resized dies and is born again.
    """

    def __init__(
        self, *, born: Callable[[StorageRecord], None], died: Callable[[StorageRecord], None]
    ) -> None:
        self._records: dict[int, StorageRecord] = {}
        self._born, self._died = born, died
        self._next_address = _PAGE

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[StorageRecord]:
        return iter(tuple(self._records.values()))

    def of(self, tensor: Tensor) -> StorageRecord | None:
        """Return the record of the tensor's storage; None if it has values, or is a true meta tensor."""
        return self._records.get(torch._C.TensorBase.untyped_storage(tensor)._cdata)

    def of_storage(self, storage: UntypedStorage) -> StorageRecord | None:
        """Return the record of a storage, as `of`."""
        return self._records.get(storage._cdata)

    def add(
        self,
        tensor: Tensor,
        device: torch.device,
        *,
        known: UntypedStorage | None = None,
        is_pinned: bool = False,
        has_memory: bool = True,
        taken_bytes: int | None = None,
    ) -> StorageRecord:
        """Note the storage of a tensor that has just been made."""
        storage = torch._C.TensorBase.untyped_storage(tensor)
        nbytes = storage.nbytes() if has_memory else 0
        record = StorageRecord(device, nbytes, self.new_address(nbytes), known, is_pinned, taken_bytes)
        key = storage._cdata
        self._records[key] = record
        weakref.finalize(storage, self._end, key).atexit = False
        self._born(record)
        return record

    def new_address(self, nbytes: int) -> int:
        """Return where so many bytes of memory are that nothing else has."""
        address = self._next_address
        self._next_address += -(-max(nbytes, 1) // _PAGE) * _PAGE
        return address

    def resize(self, storage: UntypedStorage, nbytes: int) -> None:
        """Let the storage have another size, as its resize_() does; what was known of its values is not."""
        record = self._records[storage._cdata]
        self._died(record)
        record.nbytes, record.known = nbytes, None
        record.address = self.new_address(nbytes)
        self._born(record)

    def _end(self, key: int) -> None:
        record = self._records.pop(key, None)
        if record is not None:
            self._died(record)
