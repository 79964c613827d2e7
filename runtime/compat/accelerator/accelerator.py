"""Common calls of all accelerators."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...errors import ConfigError

_NO_OPS = (
    "kernels are compiled with dslaunch or by NVRTC at their first use, none by a builder; see dslaunch.ops"
)
_WHY_ABSENT = {
    "build_extension": _NO_OPS,
    "create_op_builder": _NO_OPS,
    "get_op_builder": _NO_OPS,
    "op_builder_dir": _NO_OPS,
    "pin_memory_alignment": "pinned memory comes from torch; call pin_empty()",
    "register_host_memory": "pinned memory comes from torch; call pin_memory()",
    "unregister_host_memory": "pinned memory comes from torch, which frees it with the tensor",
    "prefer_triton_grouped_mm": "there are no Triton kernels here",
}


class Accelerator(ABC):
    """One kind of device. Where an index is left out, the current device is meant;
    without GPUs there is one device.

    It has more methods than a class should, for it is one list that programs know by heart.
    Source: DeepSpeed 0.19.8 accelerator/abstract_accelerator.py, `DeepSpeedAccelerator`: its names,
            arguments and defaults
    """

    _name: str
    _communication_backend_name: str
    _is_synchronous: bool  # True if a call returns when its work is done
    _pins_memory: bool

    def __init__(self) -> None:
        self._compile_backend = "inductor"

    def __getattr__(self, name: str) -> Any:
        why = _WHY_ABSENT.get(name)
        if why is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise AttributeError(f"get_accelerator().{name} is not available in dslaunch: {why}")

    # ---- the device ----

    def is_synchronized_device(self) -> bool:
        """Whether a call returns when its work is done, so that nothing need wait for anything."""
        return self._is_synchronous

    def use_host_timers(self) -> bool:
        """Whether the host's clock measures the device's work."""
        return self._is_synchronous

    def resolves_data_dependency(self) -> bool:
        """True if values in use are always complete."""
        return self._is_synchronous

    def handles_memory_backpressure(self) -> bool:
        """Whether memory is free for the next call as soon as its tensor is."""
        return self._is_synchronous

    def device_name(self, device_index: int | None = None) -> str:
        """Return what torch.device() takes: the kind, or with an index that device."""
        return self._name if device_index is None else f"{self._name}:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        """Return the torch.device."""
        return torch.device(self.device_name(device_index))

    @abstractmethod
    def set_device(self, device_index: int) -> None:
        """Make this one the current device."""

    @abstractmethod
    def current_device(self) -> int:
        """Return the index of the current device."""

    @abstractmethod
    def current_device_name(self) -> str:
        """Return the name of the current device, which tensors can be sent to."""

    @abstractmethod
    def device_count(self) -> int:
        """Return how many devices this host shows to this process."""

    @abstractmethod
    def synchronize(self, device_index: int | None = None) -> None:
        """Wait until the device has done all that it was given."""

    @abstractmethod
    def is_available(self) -> bool:
        """True if there is such a device."""

    def communication_backend_name(self) -> str:
        """Return the backend of torch.distributed that serves the device."""
        return self._communication_backend_name

    def on_accelerator(self, tensor: Tensor) -> bool:
        """True if the tensor is in memory of such a device."""
        return tensor.device.type == self._name

    def export_envs(self) -> list[str]:
        """Return prefixes of the environment variables that all hosts need."""
        return []

    def visible_devices_envs(self) -> list[str]:
        """Return the environment variables that choose the devices a process is shown."""
        return ["CUDA_VISIBLE_DEVICES"]

    def set_visible_devices_envs(
        self, current_env: MutableMapping[str, str], local_accelerator_ids: Iterable[int]
    ) -> None:
        """Put these devices into an environment that a process will be started with."""
        for name in self.visible_devices_envs():
            current_env[name] = ",".join(map(str, local_accelerator_ids))

    # ---- random numbers ----

    def random(self) -> ModuleType:
        """Return torch.random."""
        return torch.random

    @abstractmethod
    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        """Set the state of the device's generator."""

    @abstractmethod
    def get_rng_state(self, device_index: int | None = None) -> Tensor:
        """Return the state of the device's generator, [n] uint8 in host memory."""

    @abstractmethod
    def manual_seed(self, seed: int) -> Any:
        """Seed the current device's generator."""

    @abstractmethod
    def manual_seed_all(self, seed: int) -> Any:
        """Seed the generators of all devices."""

    @abstractmethod
    def initial_seed(self) -> int:
        """Return the seed of the current device's generator."""

    @abstractmethod
    def default_generator(self, device_index: int) -> torch.Generator:
        """Return the device's generator."""

    # ---- streams, events and graphs ----

    @property
    @abstractmethod
    def Stream(self) -> type[Any]:
        """The class of streams."""

    @property
    @abstractmethod
    def Event(self) -> type[Any]:
        """The class of events, which measure time with `enable_timing=True`."""

    @abstractmethod
    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context in which work is given to this stream."""

    @abstractmethod
    def current_stream(self, device_index: int | None = None) -> Any:
        """Return the stream on which work is queued."""

    @abstractmethod
    def default_stream(self, device_index: int | None = None) -> Any:
        """Return the stream on which work is queued by default."""

    @abstractmethod
    def is_current_stream_capturing(self) -> bool:
        """Whether work goes into a graph."""

    @abstractmethod
    def create_graph(self) -> Any:
        """Return a graph to capture work in.

        Errors: ConfigError if the device has none
        """

    @abstractmethod
    def capture_to_graph(
        self, graph: Any, pool: Any = None, stream: Any = None
    ) -> AbstractContextManager[Any]:
        """Return a context whose work goes into the graph.

        Errors: ConfigError if the device has none
        """

    @abstractmethod
    def replay_graph(self, graph: Any) -> None:
        """Do the graph's work.

        Errors: ConfigError if the device has none
        """

    # ---- memory, in bytes ----

    @abstractmethod
    def empty_cache(self) -> None:
        """Give memory back that was freed and is kept for later use."""

    @abstractmethod
    def memory_allocated(self, device_index: int | None = None) -> int:
        """Return the bytes in use by this process."""

    @abstractmethod
    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """Return the most bytes that were in use at once since the peak was reset."""

    @abstractmethod
    def memory_reserved(self, device_index: int | None = None) -> int:
        """Return the bytes that this process holds, in use or not."""

    @abstractmethod
    def max_memory_reserved(self, device_index: int | None = None) -> int:
        """Return the most bytes that were held at once since the peak was reset."""

    @abstractmethod
    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Have all peaks count from now."""

    @abstractmethod
    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        """Return figures by name; all devices have allocated_bytes.all.current and .peak."""

    @abstractmethod
    def total_memory(self, device_index: int | None = None) -> int:
        """Return the bytes of memory that the device has."""

    @abstractmethod
    def available_memory(self, device_index: int | None = None) -> int:
        """Return the bytes that are free for the next allocation of any process."""

    def reset_max_memory_allocated(self, device_index: int | None = None) -> None:
        """Reset all peaks; torch has one reset for them."""
        self.reset_peak_memory_stats(device_index)

    def reset_max_memory_cached(self, device_index: int | None = None) -> None:
        """Reset all peaks; torch has one reset for them."""
        self.reset_peak_memory_stats(device_index)

    def memory_cached(self, device_index: int | None = None) -> int:
        """`memory_reserved` by its old name."""
        return self.memory_reserved(device_index)

    def max_memory_cached(self, device_index: int | None = None) -> int:
        """`max_memory_reserved` by its old name."""
        return self.max_memory_reserved(device_index)

    # ---- pinned host memory: torch's, though it rounds up to a power of two. A program copies from it by
    # itself, and only torch's allocator knows of such a copy, and keeps the memory until it is done.

    def pin_memory(self, tensor: Tensor, make_copy: bool = True, match_shape: bool = True) -> Tensor:
        """Return the tensor in pinned host memory, where that makes copies to the device faster;
        else the tensor itself.

        Without `make_copy` it is new memory of that shape, or flat without `match_shape`,
        whose values mean nothing.
        """
        if not self._pins_memory:
            return tensor
        if make_copy:
            return tensor.pin_memory()
        return self.pin_empty(tuple(tensor.shape) if match_shape else (tensor.numel(),), dtype=tensor.dtype)

    def pin_empty(
        self, *size: int | Sequence[int], dtype: torch.dtype, device: str | torch.device = "cpu"
    ) -> Tensor:
        """Return host memory, pinned where that makes copies faster, whose values mean nothing.

        Errors: ConfigError if `device` is other than the host
        """
        if torch.device(device).type != "cpu":
            raise ConfigError(f"pin_empty(device={str(device)!r}): pinned memory is the host's; leave it out")
        shape = [n for given in size for n in ((given,) if isinstance(given, int) else given)]
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=self._pins_memory)

    def pin_empty_like(
        self, tensor: Tensor, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return host memory of that shape, as `pin_empty` does."""
        return self.pin_empty(tuple(tensor.shape), dtype=dtype or tensor.dtype, device=device)

    def is_pinned(self, tensor: Tensor) -> bool:
        """True if the tensor is in pinned host memory."""
        return tensor.is_pinned()

    def unpin_memory(self, tensor: Tensor) -> None:  # noqa: B027  (no device has anything to do)
        """Do nothing: torch takes pinned memory back when its tensor dies."""

    # ---- dtypes and tensors ----

    @abstractmethod
    def is_bf16_supported(self) -> bool:
        """True if the device computes in bfloat16."""

    @abstractmethod
    def is_fp16_supported(self) -> bool:
        """True if the device computes in float16."""

    def is_fp64_supported(self) -> bool:
        """True if the device computes in float64."""
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes that models can be trained in."""
        dtypes = [torch.float32]
        if self.is_fp16_supported():
            dtypes.append(torch.float16)
        if self.is_bf16_supported():
            dtypes.append(torch.bfloat16)
        return dtypes

    # Each property makes a tensor of its dtype on the current device from values, as torch.tensor() does.

    @property
    def BFloat16Tensor(self) -> Callable[..., Tensor]:
        return self._maker(torch.bfloat16)

    @property
    def ByteTensor(self) -> Callable[..., Tensor]:
        return self._maker(torch.uint8)

    @property
    def DoubleTensor(self) -> Callable[..., Tensor]:
        return self._maker(torch.float64)

    @property
    def FloatTensor(self) -> Callable[..., Tensor]:
        return self._maker(torch.float32)

    @property
    def HalfTensor(self) -> Callable[..., Tensor]:
        return self._maker(torch.float16)

    @property
    def IntTensor(self) -> Callable[..., Tensor]:
        return self._maker(torch.int32)

    @property
    def LongTensor(self) -> Callable[..., Tensor]:
        return self._maker(torch.int64)

    def _maker(self, dtype: torch.dtype) -> Callable[..., Tensor]:
        return partial(torch.tensor, dtype=dtype, device=self._name)

    # ---- tools ----

    @abstractmethod
    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> Any:
        """Begin a range that the vendor's profiler shows.

        `domain` and `category` need NVIDIA's nvtx package: give none.
        """

    @abstractmethod
    def range_pop(self, domain: str | None = None) -> Any:
        """End the range that was begun last."""

    @abstractmethod
    def lazy_call(self, callback: Callable[[], object]) -> Any:
        """Call `callback` as soon as the device is in use; at once if it is."""

    @abstractmethod
    def is_triton_supported(self) -> bool:
        """True if Triton compiles for the device."""

    def get_compile_backend(self) -> str:
        """Return the backend that was set, else inductor."""
        return self._compile_backend

    def set_compile_backend(self, backend: str) -> None:
        """Keep the name of a torch.compile backend, to be asked for; `engine.compile(backend=...)`
        chooses the engine's.

        Errors: ConfigError for one that torch does not know
        """
        known = torch._dynamo.list_backends(exclude_tags=())
        if backend not in known:
            raise ConfigError(f"set_compile_backend({backend!r}): must be one of {', '.join(known)}")
        self._compile_backend = backend


def refuse_domain(domain: str | None, category: str | None = None) -> None:
    """Refuse an argument that would change nothing.

    Errors: ConfigError
    """
    for name, value in (("domain", domain), ("category", category)):
        if value is not None:
            raise ConfigError(f"range_push({name}={value!r}): torch's ranges have none; leave it out")
