"""What torch's Python looks for in its compiled half when that was built with CUDA, over the fake device.

It is put there before torch.cuda is imported, which then runs unmodified.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import threading
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

from .build import NAME, library


def _load_native() -> ModuleType:
    """Before torch asks for its CUDA hooks, which it does once."""
    place = library()
    ctypes.CDLL(str(place), mode=ctypes.RTLD_GLOBAL)
    spec = importlib.util.spec_from_file_location(NAME, place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.captures = Captures()  # type: ignore[attr-defined]
    return module


class Captures:
    """The threads of a program that would break a CUDA graph which another one captures: they ask for events
    or lock memory, and have not told the driver that they ignore captures. Autograd's threads, which Python
    does not start, are part of one.
    """

    def __init__(self) -> None:
        self.broken_by: set[str] = set()  # names of threads
        self._told = threading.local()

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        """As the driver's."""
        self._told.ignores_others = mode._obj.value == 1
        return 0

    def note(self) -> None:
        """This thread does what may break one."""
        thread = threading.current_thread()
        if type(thread) is threading.Thread and not getattr(self._told, "ignores_others", False):
            self.broken_by.add(thread.name)


class _BeforeTorchCuda(importlib.abc.MetaPathFinder):
    """Its turn comes when torch, half imported, imports torch.cuda."""

    def __init__(self, native: ModuleType) -> None:
        self._native = native

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name == "torch.cuda":
            sys.meta_path.remove(self)
            _extend(sys.modules["torch._C"], self._native)
        return None


class _Driver:
    """The first question for devices starts it, and children that are forked afterwards cannot use them."""

    def __init__(self, native: Any) -> None:
        self._native = native
        self._is_started = self.is_of_parent = False

    def start(self) -> None:
        """Once."""
        if not self._is_started:
            self._is_started = True
            os.register_at_fork(after_in_child=self._after_fork)
            self._native.set_num_devices(num_visible(self._native.num_devices()))

    def count_devices(self) -> int:
        """Return how many this process sees."""
        self.start()
        return int(self._native.num_devices())

    def _after_fork(self) -> None:
        self.is_of_parent = True
        self._native.forget_init()  # what is asked of a device begins anew, where torch refuses it


def _statistics(counted: dict[str, int]) -> dict[str, Any]:
    """Return what torch's allocator tells of a device, from what the fake one counts; the rest is zero."""

    def amounts(now: int, peak: int) -> dict[str, dict[str, int]]:
        of_all = {"current": now, "peak": peak, "allocated": counted["allocated"], "freed": 0}
        return {"all": of_all, "large_pool": of_all, "small_pool": dict.fromkeys(of_all, 0)}

    in_use = amounts(counted["in_use"], counted["peak"])
    nothing = {pool: dict.fromkeys(("current", "peak", "allocated", "freed"), 0) for pool in in_use}
    not_counted = ("inactive_split_bytes", "allocation", "active", "segment", "inactive_split")
    return {
        "allocated_bytes": in_use,
        "active_bytes": in_use,
        "requested_bytes": in_use,
        "reserved_bytes": amounts(counted["reserved"], counted["peak_reserved"]),
        **dict.fromkeys(not_counted, nothing),
        "oversize_allocations": nothing["all"],
        "oversize_segments": nothing["all"],
        "num_ooms": counted["num_failures"],
        "num_alloc_retries": 0,
    }


def _stream_base(compiled: Any, native: Any) -> type:
    class CudaStreamBase(compiled.Stream):  # type: ignore[misc]
        def __new__(cls, *_: Any, priority: int = 0, **which: int) -> Any:
            if "stream_id" in which:
                which.setdefault("device_type", 1)
                return compiled.Stream.__new__(
                    cls,
                    stream_id=which["stream_id"],
                    device_index=which["device_index"],
                    device_type=which["device_type"],
                )
            return compiled.Stream.__new__(cls, f"cuda:{native.get_device()}", priority=priority)

        @property
        def cuda_stream(self) -> int:
            return int(self.stream_id)

    return CudaStreamBase


def _event_base(compiled: Any, native: Any) -> type:
    class CudaEventBase(compiled.Event):  # type: ignore[misc]
        def __new__(
            cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, **_: Any
        ) -> Any:
            return compiled.Event.__new__(
                cls, "cuda", enable_timing=enable_timing, blocking=blocking, interprocess=interprocess
            )

        @property
        def cuda_event(self) -> int:
            return int(self.event_id)

        def query(self) -> bool:
            native.captures.note()
            return bool(super().query())

        def synchronize(self) -> None:
            native.captures.note()
            super().synchronize()

        def elapsed_time(self, other: Any) -> float:
            """Nothing takes time there. As on a true one both must be over, and known to be."""
            if not (self.query() and other.query()):
                raise RuntimeError("CUDA error: device not ready")
            return 0.0

    return CudaEventBase


class _Devices:
    """Which device and stream are the current ones."""

    def __init__(self, native: Any, driver: _Driver) -> None:
        self._native, self._driver = native, driver

    def names(self) -> dict[str, Any]:
        """By the name that torch._C has for it."""
        native = self._native
        return {
            "_cuda_init": self.init,
            "_cuda_isInBadFork": lambda: self._driver.is_of_parent,
            "_cuda_getDeviceCount": self._driver.count_devices,
            "_cuda_getArchFlags": lambda: "sm_90",
            "_cuda_getDevice": native.get_device,
            "_cuda_setDevice": self.set_device,
            "_cuda_exchangeDevice": self.exchange_device,
            "_cuda_maybeExchangeDevice": self.maybe_exchange_device,
            "_cuda_canDeviceAccessPeer": lambda *_: True,
            "_cuda_hasPrimaryContext": lambda device: device in native.touched(),
            "_cuda_getCurrentStream": self.current_stream,
            "_cuda_getCurrentRawStream": native.get_stream,
            "_cuda_getDefaultStream": lambda device: (0, device, 1),
            "_cuda_setStream": self.set_stream,
            "_cuda_synchronize": lambda: native.synchronize_device(native.get_device()),
            "_cuda_isCurrentStreamCapturing": lambda: False,
            "_cuda_sleep": lambda cycles: None,
        }

    def init(self) -> None:
        self._driver.start()
        self._native.init()
        sys.modules["torch.cuda"].default_generators = tuple(  # type: ignore[attr-defined]
            self._native.generator(index) for index in range(self._native.num_devices())
        )

    def set_device(self, device: int) -> None:
        if device != self._native.get_device():
            self._native.set_device(device)
            self._native.touch(device, "a choice of the current device")

    def exchange_device(self, device: int) -> int:
        before: int = self._native.get_device()
        if device >= 0:
            self.set_device(device)
        return before

    def maybe_exchange_device(self, device: int) -> int:
        """Without a context, if there is none."""
        before: int = self._native.get_device()
        if device >= 0:
            self._native.set_device(device)
        return before

    def current_stream(self, device: int) -> tuple[int, int, int]:
        stream = self._native.get_stream(device)
        return (0 if stream == device else stream), device, 1

    def set_stream(self, stream_id: int, device_index: int, device_type: int = 1) -> None:
        self._native.set_device(device_index)
        self._native.set_stream(device_index, stream_id)


class _Memory:
    """The memory of the devices, and locked pages of the host's."""

    def __init__(self, native: Any) -> None:
        self._native = native

    def names(self) -> dict[str, Any]:
        """By the name that torch._C has for it."""
        native = self._native
        return {
            "_cudart": SimpleNamespace(
                cudaMemGetInfo=self.free_and_total,
                cudaError=SimpleNamespace(success=0),
                cudaGetErrorString=str,
                cudaHostRegister=self.lock_pages,
                cudaHostUnregister=self.unlock_pages,
            ),
            "_cuda_ipc_collect": lambda: None,
            "_cuda_emptyCache": lambda *_: native.empty_cache(),
            "_cuda_memoryStats": lambda device: _statistics(native.memory(device)),
            "_cuda_resetPeakMemoryStats": native.reset_peaks,
            "_cuda_resetAccumulatedMemoryStats": lambda device: None,
        }

    def free_and_total(self, device: int) -> tuple[int, int]:
        self._native.touch(device, "a question for the free memory")
        total = self._native.capacity(device)
        return total - self._native.memory(device)["reserved"], total

    def lock_pages(self, address: int, num_bytes: int, flags: int) -> int:
        self._native.captures.note()
        self._native.lock_pages(address, num_bytes)
        return 0

    def unlock_pages(self, address: int) -> int:
        self._native.unlock_pages(address)
        return 0


class _Ranges:
    """Marks for a profiler, which does not see this device."""

    def __init__(self) -> None:
        self._depth = 0
        self.rangeStartA = lambda message: 0
        self.rangeEnd = self.markA = lambda given: None

    def rangePushA(self, message: str) -> int:
        self._depth += 1
        return self._depth - 1

    def rangePop(self) -> int:
        self._depth -= 1
        return self._depth


class _NoGraphs:
    def __new__(cls, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("the fake CUDA device captures no graphs")


def _extend(compiled: Any, native: Any) -> None:
    """Give torch._C what a build with CUDA has, as far as training needs it."""
    names = {
        **_Devices(native, _Driver(native)).names(),
        **_Memory(native).names(),
        "_CUDAGraph": _NoGraphs,
        "_graph_pool_handle": _NoGraphs,
        "_CudaStreamBase": _stream_base(compiled, native),
        "_CudaEventBase": _event_base(compiled, native),
        "_nvtx": _Ranges(),
        "_cuda_set_sync_debug_mode": native.set_sync_debug_mode,
        "_cuda_get_sync_debug_mode": native.sync_debug_mode,
    }
    for name, value in names.items():
        setattr(compiled, name, value)
    compiled._has_cuda = True


def _finish(native: Any) -> None:
    """Once torch is there: what its Python does not ask of the names above."""
    import torch

    def properties(device: Any = None) -> SimpleNamespace:
        total = native.capacity(torch.cuda._utils._get_device_index(device, optional=True))
        return SimpleNamespace(
            name="Fake CUDA device", major=9, minor=0, total_memory=total, multi_processor_count=1,
            is_integrated=False, is_multi_gpu_board=False, gcnArchName="", uuid="fake",
        )  # fmt: skip

    def resize(storage: torch.UntypedStorage, num_bytes: int) -> torch.UntypedStorage:
        if storage.device.type != "cuda":
            return plain_resize(storage, num_bytes)
        native.resize_storage(storage, num_bytes)
        return storage

    plain_resize: Any = torch.UntypedStorage.resize_
    torch.UntypedStorage.resize_ = resize  # type: ignore[assignment, method-assign]
    torch.cuda.get_device_properties = properties  # type: ignore[assignment]
    torch.cuda.get_device_capability = lambda device=None: (9, 0)  # type: ignore[assignment]
    torch.cuda.is_bf16_supported = lambda *_, **__: True  # type: ignore[assignment]
    torch.version.cuda = "0.0"


def num_visible(num_devices: int) -> int:
    """Return how many of a machine's devices CUDA shows this process."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return num_devices
    names = given.split(",")
    if names[0].startswith("MIG-"):
        return min(1, num_devices)  # a process sees the first instance, whatever it is given
    known = [name for name in names if name.strip().isdecimal() and int(name) < num_devices]
    return next((place for place, name in enumerate(names) if name not in known), len(names))


def load() -> Any:
    """Import torch with a fake CUDA device, in a process that has not imported it yet; return the device.

    Errors:  RuntimeError if torch is there already
    """
    if "torch" in sys.modules:
        raise RuntimeError("torch has been imported already, and has asked for its devices")
    native = _load_native()
    sys.meta_path.insert(0, _BeforeTorchCuda(native))
    _finish(native)
    _LOADED.append(native)
    return native


def device() -> Any:
    """Return the device of a process that has loaded it."""
    return _LOADED[0]


_LOADED: list[Any] = []
