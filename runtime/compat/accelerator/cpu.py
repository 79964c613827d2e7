"""The host's processor."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import psutil
import torch
from torch import Tensor
from torch.profiler import itt

from ...environment import read_environment
from ...errors import ConfigError
from ...offload.host_memory import give_back_freed_memory
from .accelerator import Accelerator, refuse_domain
from .host_event import HostEvent
from .resident import ResidentMemory

_itt: Any = itt  # untyped


class CpuAccelerator(Accelerator):
    """One device, which all workers of a host share.

    Its memory figures are physical memory: in use by the whole process, its peak as the kernel counts it, and
    in total and available on the host; a limit set for a container is not among them.
    """

    _name = "cpu"
    _communication_backend_name = "gloo"
    _is_synchronous = True
    _pins_memory = False

    def __init__(self) -> None:
        super().__init__()
        self._resident = ResidentMemory()

    def device_name(self, device_index: int | None = None) -> str:
        """Return cpu for any index: there is one device."""
        return self._name

    def set_device(self, device_index: int) -> None:
        """Do nothing: there is one device."""

    def current_device(self) -> int:
        """Return LOCAL_RANK, by which a program counts its devices."""
        return read_environment().local_rank

    def current_device_name(self) -> str:
        return self._name

    def device_count(self) -> int:
        """Return how many workers the launcher has started on this host, 1 without one:
        each is a device to programs.
        """
        return read_environment().local_world_size

    def synchronize(self, device_index: int | None = None) -> None:
        """Do nothing: each call is done when it returns."""

    def is_available(self) -> bool:
        return True

    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        torch.set_rng_state(new_state)

    def get_rng_state(self, device_index: int | None = None) -> Tensor:
        return torch.get_rng_state()

    def manual_seed(self, seed: int) -> torch.Generator:
        return torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> torch.Generator:
        return torch.manual_seed(seed)

    def initial_seed(self) -> int:
        return torch.initial_seed()

    def default_generator(self, device_index: int) -> torch.Generator:
        return torch.default_generator

    @property
    def Stream(self) -> type[Any]:
        """torch's stand-in: work on it is done at once, as on any other."""
        return torch.cpu.Stream

    @property
    def Event(self) -> type[Any]:
        return HostEvent

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cpu.stream(stream)

    def current_stream(self, device_index: int | None = None) -> Any:
        return torch.cpu.current_stream()

    def default_stream(self, device_index: int | None = None) -> Any:
        return torch.cpu.current_stream()

    def is_current_stream_capturing(self) -> bool:
        return False

    def create_graph(self) -> NoReturn:
        _refuse_graph("create_graph")

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> NoReturn:
        _refuse_graph("capture_to_graph")

    def replay_graph(self, graph: Any) -> NoReturn:
        _refuse_graph("replay_graph")

    def empty_cache(self) -> None:
        give_back_freed_memory()

    def memory_allocated(self, device_index: int | None = None) -> int:
        return self._resident.current()

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return self._resident.peak()

    def memory_reserved(self, device_index: int | None = None) -> int:
        return self._resident.current()

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        return self._resident.peak()

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        self._resident.reset_peak()

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        return {
            "allocated_bytes.all.current": self._resident.current(),
            "allocated_bytes.all.peak": self._resident.peak(),
        }

    def total_memory(self, device_index: int | None = None) -> int:
        total: int = psutil.virtual_memory().total
        return total

    def available_memory(self, device_index: int | None = None) -> int:
        available: int = psutil.virtual_memory().available
        return available

    def is_bf16_supported(self) -> bool:
        return True

    def is_fp16_supported(self) -> bool:
        """True if torch computes in float16, which says nothing about speed."""
        return True

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> Any:
        """Begin a range that Intel's VTune shows, if torch was built with it."""
        refuse_domain(domain, category)
        return _itt.range_push(msg) if _itt.is_available() else None

    def range_pop(self, domain: str | None = None) -> Any:
        refuse_domain(domain)
        return _itt.range_pop() if _itt.is_available() else None

    def lazy_call(self, callback: Callable[[], object]) -> object:
        return callback()

    def is_triton_supported(self) -> bool:
        return False


def _refuse_graph(name: str) -> NoReturn:
    raise ConfigError(
        f"get_accelerator().{name}(): the CPU has no graphs; ask device_name() before, or run it as it is"
    )
