"""The names of torch.cuda over a GPU that is not there: it is available, and nothing on it takes time."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from .streams import DEFAULT, InStream, PlannedEvent, PlannedStream, current_stream, synchronize

_CAPABILITY = (9, 0)


class _OnDevice:
    def __init__(self, device: Any = None) -> None:
        self.idx = 0

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


class Graph:
    """A CUDA graph, which cannot be captured without a GPU."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("CUDA graphs are not planned; leave them out of the planned program")


class PlannedGpu:
    """The GPU of a rank: its size, and the memory that is in use on it."""

    def __init__(
        self,
        *,
        total_bytes: int,
        allocated: Callable[[], int],
        peak: Callable[[], int],
        reset_peak: Callable[[], None],
    ) -> None:
        """`allocated` and `peak` return bytes; `reset_peak` begins the peak anew."""
        self._total_bytes = total_bytes
        self._allocated, self._peak, self._reset_peak = allocated, peak, reset_peak

    def put(self) -> None:
        """Have torch.cuda show it, in this process."""
        answers = {**_OF_DEVICES, **self._of_memory()}
        for name, value in answers.items():
            setattr(torch.cuda, name, value)
        of_any = {**answers, **_OF_ACCELERATORS, "get_memory_info": answers["mem_get_info"]}
        for name in dir(torch.accelerator):
            if name in of_any:
                setattr(torch.accelerator, name, of_any[name])
        for name in _NO_OPERATIONS:
            setattr(torch.cuda, name, _no_operation())
        modules: Any = torch
        modules.cuda.nccl.version = lambda: (2, 27, 0)
        modules.backends.cuda.is_built = lambda: True
        modules._C._cuda_getCurrentRawStream = lambda index: 0  # libraries with kernels of their own ask
        modules.version.cuda = torch.version.cuda or "planned"

    def _of_memory(self) -> dict[str, Any]:
        total = self._total_bytes
        properties = SimpleNamespace(
            name="planned", major=_CAPABILITY[0], minor=_CAPABILITY[1], total_memory=total,
            multi_processor_count=100, is_integrated=False, is_multi_gpu_board=False, gcnArchName="",
            uuid="none",
        )  # fmt: skip
        return {
            "get_device_properties": lambda device=None: properties,
            "mem_get_info": lambda device=None: (total - self._allocated(), total),
            "memory_allocated": lambda device=None: self._allocated(),
            "memory_reserved": lambda device=None: self._allocated(),
            "max_memory_allocated": lambda device=None: self._peak(),
            "max_memory_reserved": lambda device=None: self._peak(),
            "reset_peak_memory_stats": lambda device=None: self._reset_peak(),
            "reset_max_memory_allocated": lambda device=None: self._reset_peak(),
            "memory_stats": lambda device=None: {},
            "memory_stats_as_nested_dict": lambda device=None: {},
            "cudart": lambda: SimpleNamespace(
                cudaHostRegister=lambda *_: 0,
                cudaHostUnregister=lambda *_: 0,
                cudaMemGetInfo=lambda device=0: (total, total),
                cudaError=SimpleNamespace(success=0),
            ),
        }


def _no_operation() -> Callable[..., None]:
    """Return a function of its own each time: torch's compiler tells functions by what they are."""

    def nothing(*_: Any, **__: Any) -> None:
        return None

    return nothing


def _random_state(*_: Any) -> torch.Tensor:
    return torch.zeros(16, dtype=torch.uint8, device="cpu")


_NO_OPERATIONS = (
    "init", "set_device", "empty_cache", "ipc_collect", "manual_seed", "manual_seed_all", "seed",
    "seed_all", "set_rng_state", "set_rng_state_all", "_lazy_init", "set_per_process_memory_fraction",
    "_lazy_call", "set_stream",
)  # fmt: skip
_OF_DEVICES: dict[str, Any] = {
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "device": _OnDevice,
    "device_of": _OnDevice,
    "Stream": PlannedStream,
    "ExternalStream": PlannedStream,
    "Event": PlannedEvent,
    "stream": InStream,
    "StreamContext": InStream,
    "current_stream": current_stream,
    "synchronize": synchronize,
    "default_stream": lambda device=None: DEFAULT,
    "CUDAGraph": Graph,
    "graph": Graph,
    "get_device_name": lambda device=None: "planned",
    "get_device_capability": lambda device=None: _CAPABILITY,
    "get_rng_state": _random_state,
    "get_rng_state_all": lambda: [_random_state()],
    "initial_seed": lambda: 0,
    "is_bf16_supported": lambda *_, **__: True,
    "is_current_stream_capturing": lambda: False,
    "get_arch_list": lambda: ["sm_90"],
    "can_device_access_peer": lambda *_: True,
    "default_generators": (torch.default_generator,),
}
_OF_ACCELERATORS: dict[str, Any] = {
    "current_accelerator": lambda check_available=False: torch.device("cuda"),
    "current_device_index": lambda: 0,
    "current_device_idx": lambda: 0,
    "set_device_index": _no_operation(),
    "set_device_idx": _no_operation(),
    "device_index": _OnDevice,
    "empty_cache": _no_operation(),
    "empty_host_cache": _no_operation(),
    "set_stream": _no_operation(),
    "reset_accumulated_memory_stats": _no_operation(),
}
