"""The storage of values that are elsewhere: where it is and how large tell which parameters are tied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor


class FreedStorage:
    """Result of `storage()` and `untyped_storage()` of freed values: a place and a size; all other calls are
    refused by name.
    """

    def __init__(
        self, values: Tensor, *, nbytes: int, is_typed: bool, refuse: Callable[[str], NoReturn]
    ) -> None:
        """`values` are described, of a parameter of `nbytes`; `is_typed`: sizes are in elements."""
        with torch._C.DisableTorchFunctionSubclass():
            self._place = values.untyped_storage().data_ptr()
        self._cdata = self._place  # unlike other tensors', as theirs are unlike each other's
        self.device, self.dtype, self.is_cuda = values.device, values.dtype, values.is_cuda
        self._nbytes, self._itemsize = nbytes, values.itemsize if is_typed else 1
        self._refuse = refuse

    def data_ptr(self) -> int:
        """Return a number that only tensors in this storage have."""
        return self._place

    def nbytes(self) -> int:
        """Return the size of the values when they are here."""
        return self._nbytes

    def size(self) -> int:
        """Return it in elements, or bytes if this is an untyped storage."""
        return self._nbytes // self._itemsize

    def element_size(self) -> int:
        """Return the size of an element, 1 in an untyped storage."""
        return self._itemsize

    def __len__(self) -> int:
        return self.size()

    def __getitem__(self, place: Any) -> NoReturn:
        self._refuse("elements of its storage")

    def __setitem__(self, place: Any, value: Any) -> NoReturn:
        self._refuse("elements of its storage")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self._refuse("pickling")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse(f"{name} of its storage")
