"""Flat arrays in a device's memory, borrowed through DLPack and checked as the CPU kernels check theirs.

Source: the C structs of DLPack 1.1 (dlpack.h), read in place: `DLManagedTensor`, and
        `DLManagedTensorVersioned`, which says whether the memory may be written
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

CPU, CUDA, CUDA_HOST = 1, 2, 3  # DLDeviceType
_NO_SYNC = -1  # the caller orders its streams; a kernel must not wait for another one by accident
_KINDS = ("int", "uint", "float", "type", "bfloat", "complex")  # by DLDataTypeCode
_BOOL = 6
ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype_code", ctypes.c_uint8),
        ("dtype_bits", ctypes.c_uint8),
        ("dtype_lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Version(ctypes.Structure):
    _fields_ = (("major", ctypes.c_uint32), ("minor", ctypes.c_uint32))


class _VersionedTensor(ctypes.Structure):
    _fields_ = (
        ("version", _Version),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_READ_ONLY = 1  # bit in `flags`
_MAJOR = 1  # major version that is known here

_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.argtypes = [ctypes.py_object, ctypes.c_char_p]
_is_valid.restype = ctypes.c_int
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_pointer.restype = ctypes.c_void_p


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceArray:
    """An argument that passed every check that does not need the other arguments."""

    name: str
    address: int
    numel: int
    dtype: str  # a key of ITEM_BYTES
    device: int  # the ordinal of its CUDA device
    owner: object  # keeps the memory alive

    @property
    def end(self) -> int:
        """The address behind the last element."""
        return self.address + self.numel * ITEM_BYTES[self.dtype]

    def at(self, offset: int) -> int:
        """Return the address of an element."""
        return self.address + offset * ITEM_BYTES[self.dtype]


def read_array(
    name: str, source: Any, *, dtypes: Sequence[str], is_written: bool, device_types: Sequence[int] = (CUDA,)
) -> DeviceArray:
    """Return where the memory of `source` is.

    Errors:  TypeError for an object that is no array, or another dtype
             ValueError if it is not flat, contiguous, on a device, or read-only though `is_written`
    """
    if getattr(source, "requires_grad", False):
        raise ValueError(f"{name}: the tensor requires grad; pass {name}.detach(), which has the same memory")
    capsule, tensor, is_read_only = _borrow(name, source, device_types)
    if is_written and is_read_only:
        raise ValueError(f"{name}: the array is read-only, but it is written; pass a writable one")
    dtype = _dtype_name(tensor)
    if dtype not in dtypes:
        raise TypeError(f"{name}: dtype {dtype}; must be {_either(dtypes)}")
    if tensor.ndim != 1:
        raise ValueError(f"{name}: {tensor.ndim} dimensions; must have 1: pass a flat view")
    numel = tensor.shape[0]
    if numel > 1 and tensor.strides and tensor.strides[0] != 1:
        raise ValueError(f"{name}: stride {tensor.strides[0]}; must be 1: pass a contiguous array")
    address = (tensor.data or 0) + tensor.byte_offset
    if address % ITEM_BYTES[dtype] != 0:
        raise ValueError(f"{name}: the address is not a multiple of the element size")
    return DeviceArray(
        name=name, address=address, numel=numel, dtype=dtype, device=tensor.device_id, owner=capsule
    )


def check_one_device(arrays: Sequence[DeviceArray]) -> None:
    """Refuse arrays that are not all on one device."""
    for array in arrays:
        if array.device != arrays[0].device:
            raise ValueError(
                f"{array.name}: the array is on CUDA device {array.device}, but {arrays[0].name} is on "
                f"device {arrays[0].device}; all arrays of one call must be on one device"
            )


def check_no_shared_memory(arrays: Sequence[DeviceArray]) -> None:
    """Refuse arrays that overlap. They come in the order they were given."""
    places = sorted((array.address, place) for place, array in enumerate(arrays) if array.numel > 0)
    for (_, low), (address, high) in itertools.pairwise(places):
        if address < arrays[low].end:
            first, second = arrays[min(low, high)], arrays[max(low, high)]
            raise ValueError(
                f"{second.name}: shares memory with {first.name}; every array needs memory of its own"
            )


def _borrow(name: str, source: Any, device_types: Sequence[int]) -> tuple[object, _Tensor, bool]:
    """Return the capsule to keep, its tensor, and whether it is read-only."""
    no_access = (
        f"{name}: a {type_name(source)} gives no access to its memory through DLPack; pass a CUDA "
        "torch.Tensor (detached, if it requires grad) or a cupy array"
    )
    try:
        device_type, _ = source.__dlpack_device__()
    except (AttributeError, ValueError) as error:  # torch has no number for a "meta" device
        raise TypeError(no_access) from error
    if device_type not in device_types:
        where = "in host memory" if device_type in (CPU, CUDA_HOST) else "on a device of another kind"
        raise ValueError(
            f"{name}: the array is {where} (DLPack device type {int(device_type)}); it "
            "must be on a CUDA device"
        )
    stream = None if device_type == CPU else _NO_SYNC
    try:
        try:
            capsule = source.__dlpack__(stream=stream, max_version=(_MAJOR, 0))
        except TypeError:  # older than DLPack 1.0
            capsule = source.__dlpack__(stream=stream)
    except (BufferError, NotImplementedError, TypeError) as error:
        raise TypeError(no_access) from error
    if _is_valid(capsule, b"dltensor_versioned"):
        versioned = _VersionedTensor.from_address(_pointer(capsule, b"dltensor_versioned"))
        if versioned.version.major != _MAJOR:
            raise TypeError(
                f"{name}: the array comes as DLPack {versioned.version.major}, a version that is not known "
                f"here; must be {_MAJOR}"
            )
        return capsule, versioned.tensor, bool(versioned.flags & _READ_ONLY)
    return capsule, _Tensor.from_address(_pointer(capsule, b"dltensor")), False


def _dtype_name(tensor: _Tensor) -> str:
    if tensor.dtype_code == _BOOL:
        return "bool"
    kind = _KINDS[tensor.dtype_code] if tensor.dtype_code < len(_KINDS) else "type"
    lanes = "" if tensor.dtype_lanes == 1 else f"x{tensor.dtype_lanes}"
    return f"{kind}{tensor.dtype_bits}{lanes}"


def _either(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def type_name(source: object) -> str:
    """Return a type's name as a person would write it: `torch.Tensor`, `list`."""
    kind = type(source)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
