"""The names of torch.cuda over a GPU that is not there: it is available, and nothing on it takes time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

_CAPABILITY = (9, 0)


class Stream:
    """A stream in which everything is done at once."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = torch.device("cuda", 0)
        self.stream_id = self.cuda_stream = id(self)
        self.priority = priority

    def wait_event(self, event: Any) -> None:
        """Do nothing."""

    def wait_stream(self, stream: Any) -> None:
        """Do nothing."""

    def record_event(self, event: Any = None) -> Any:
        """Return an event that has happened."""
        return Event() if event is None else event

    def query(self) -> bool:
        """Return that all is done."""
        return True

    def synchronize(self) -> None:
        """Do nothing."""

    def __enter__(self) -> Stream:
        _CURRENT.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _CURRENT.pop()


class Event:
    """An event that has happened."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.event_id = self.cuda_event = id(self)

    def record(self, stream: Any = None) -> None:
        """Do nothing."""

    def wait(self, stream: Any = None) -> None:
        """Do nothing."""

    def query(self) -> bool:
        """Return that it has happened."""
        return True

    def synchronize(self) -> None:
        """Do nothing."""

    def elapsed_time(self, other: Any) -> float:
        """Return that nothing took time."""
        return 0.0


_DEFAULT = Stream()
_CURRENT = [_DEFAULT]


class _InStream:
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        _CURRENT.append(_CURRENT[-1] if self._stream is None else self._stream)

    def __exit__(self, *_: object) -> None:
        _CURRENT.pop()


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


def make_available(*, total_bytes: int, allocated: Any, peak: Any, reset_peak: Any) -> None:
    """Put a GPU of that size into torch.cuda, in this process.

    `allocated` and `peak` return bytes; `reset_peak` begins the peak anew.
    """
    cuda: Any = torch.cuda
    properties = SimpleNamespace(
        name="planned", major=_CAPABILITY[0], minor=_CAPABILITY[1], total_memory=total_bytes,
        multi_processor_count=100, is_integrated=False, is_multi_gpu_board=False, gcnArchName="", uuid="none",
    )  # fmt: skip

    def nothing(*_: Any, **__: Any) -> None:
        return None

    def state(*_: Any) -> torch.Tensor:
        return torch.zeros(16, dtype=torch.uint8, device="cpu")

    names: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "device": _OnDevice,
        "device_of": _OnDevice,
        "Stream": Stream,
        "ExternalStream": Stream,
        "Event": Event,
        "stream": _InStream,
        "StreamContext": _InStream,
        "set_stream": nothing,
        "current_stream": lambda device=None: _CURRENT[-1],
        "default_stream": lambda device=None: _DEFAULT,
        "CUDAGraph": Graph,
        "graph": Graph,
        "get_device_name": lambda device=None: "planned",
        "get_device_capability": lambda device=None: _CAPABILITY,
        "get_device_properties": lambda device=None: properties,
        "mem_get_info": lambda device=None: (total_bytes - allocated(), total_bytes),
        "memory_allocated": lambda device=None: allocated(),
        "memory_reserved": lambda device=None: allocated(),
        "max_memory_allocated": lambda device=None: peak(),
        "max_memory_reserved": lambda device=None: peak(),
        "reset_peak_memory_stats": lambda device=None: reset_peak(),
        "reset_max_memory_allocated": lambda device=None: reset_peak(),
        "memory_stats": lambda device=None: {},
        "memory_stats_as_nested_dict": lambda device=None: {},
        "get_rng_state": state,
        "get_rng_state_all": lambda: [state()],
        "initial_seed": lambda: 0,
        "is_bf16_supported": lambda *_, **__: True,
        "is_current_stream_capturing": lambda: False,
        "get_arch_list": lambda: ["sm_90"],
        "can_device_access_peer": lambda *_: True,
        "default_generators": (torch.default_generator,),
        "cudart": lambda: SimpleNamespace(
            cudaHostRegister=lambda *_: 0,
            cudaHostUnregister=lambda *_: 0,
            cudaMemGetInfo=lambda device=0: (total_bytes, total_bytes),
            cudaError=SimpleNamespace(success=0),
        ),
        **dict.fromkeys(
            (
                "init", "set_device", "synchronize", "empty_cache", "ipc_collect", "manual_seed",
                "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all", "_lazy_init",
                "set_per_process_memory_fraction", "_lazy_call",
            ),
            nothing,
        ),
    }  # fmt: skip
    for name, value in names.items():
        setattr(cuda, name, value)
    generator = torch.Generator

    class Generator(generator):  # type: ignore[misc, valid-type]
        def __new__(cls, device: Any = "cpu") -> Any:
            return generator(device="cpu")

    torch.Generator = Generator  # type: ignore[misc]
    torch.cuda.nccl.version = lambda: (2, 27, 0)
    torch.backends.cuda.is_built = lambda: True
    torch.version.cuda = torch.version.cuda or "planned"
