"""NVIDIA's GPUs, and AMD's as torch shows them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from .accelerator import Accelerator, refuse_domain

_FIRST_WITH_FP16 = 7  # compute capability; 6 has it at a fraction of the speed
_FIRST_WITH_TRITON = 8


class CudaAccelerator(Accelerator):
    """A GPU. Its memory figures are those of torch's allocator; only available_memory()
    counts the memory of other processes.
    """

    _name = "cuda"
    _communication_backend_name = "nccl"
    _is_synchronous = False
    _pins_memory = True

    def communication_backend_version(self) -> tuple[int, ...]:
        """Return NCCL's version."""
        version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        return version

    def set_device(self, device_index: int) -> None:
        torch.cuda.set_device(device_index)

    def current_device(self) -> int:
        return torch.cuda.current_device()

    def current_device_name(self) -> str:
        return f"cuda:{torch.cuda.current_device()}"

    def device_count(self) -> int:
        return torch.cuda.device_count()

    def synchronize(self, device_index: int | None = None) -> None:
        torch.cuda.synchronize(device_index)

    def is_available(self) -> bool:
        return torch.cuda.is_available()

    def export_envs(self) -> list[str]:
        return ["NCCL"]

    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        torch.cuda.set_rng_state(new_state, self.device_name(device_index))

    def get_rng_state(self, device_index: int | None = None) -> Tensor:
        return torch.cuda.get_rng_state(self.device_name(device_index))

    def manual_seed(self, seed: int) -> None:
        torch.cuda.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.cuda.manual_seed_all(seed)

    def initial_seed(self) -> int:
        return torch.cuda.initial_seed()

    def default_generator(self, device_index: int) -> torch.Generator:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # before that there are none
        return torch.cuda.default_generators[device_index]

    @property
    def Stream(self) -> type[Any]:
        return torch.cuda.Stream

    @property
    def Event(self) -> type[Any]:
        return torch.cuda.Event

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def current_stream(self, device_index: int | None = None) -> Any:
        return torch.cuda.current_stream(device_index)

    def default_stream(self, device_index: int | None = None) -> Any:
        return torch.cuda.default_stream(device_index)

    def is_current_stream_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def create_graph(self) -> Any:
        return torch.cuda.CUDAGraph()

    def capture_to_graph(
        self, graph: Any, pool: Any = None, stream: Any = None
    ) -> AbstractContextManager[Any]:
        return torch.cuda.graph(graph, pool, stream)

    def replay_graph(self, graph: Any) -> None:
        graph.replay()

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        return torch.cuda.memory_allocated(device_index)

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return torch.cuda.max_memory_allocated(device_index)

    def memory_reserved(self, device_index: int | None = None) -> int:
        return torch.cuda.memory_reserved(device_index)

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        return torch.cuda.max_memory_reserved(device_index)

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        torch.cuda.reset_peak_memory_stats(device_index)

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        return torch.cuda.memory_stats(device_index)

    def total_memory(self, device_index: int | None = None) -> int:
        total: int = torch.cuda.mem_get_info(device_index)[1]
        return total

    def available_memory(self, device_index: int | None = None) -> int:
        free: int = torch.cuda.mem_get_info(device_index)[0]
        return free

    def is_bf16_supported(self) -> bool:
        supported: bool = torch.cuda.is_bf16_supported()
        return supported

    def is_fp16_supported(self) -> bool:
        major: int = torch.cuda.get_device_capability()[0]
        return major >= _FIRST_WITH_FP16

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> Any:
        refuse_domain(domain, category)
        return torch.cuda.nvtx.range_push(msg)  # type: ignore[no-untyped-call]

    def range_pop(self, domain: str | None = None) -> Any:
        refuse_domain(domain)
        return torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]

    def lazy_call(self, callback: Callable[[], object]) -> None:
        torch.cuda._lazy_call(callback)  # type: ignore[no-untyped-call]

    def is_triton_supported(self) -> bool:
        major: int = torch.cuda.get_device_capability()[0]
        return major >= _FIRST_WITH_TRITON
