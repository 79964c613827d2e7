"""Memory in use, printed when a program asks."""

from __future__ import annotations

import gc

import psutil
import torch.distributed as dist

from .accelerator.current import get_accelerator

_GIB = 2**30


def see_memory_usage(message: str, force: bool = False) -> None:
    """With `force`, print on rank 0 the memory in use and its peak since the last call;
    collects garbage before.

    Of a GPU these are the figures of torch's allocator: in use, and held for later use. Of the CPU it is what
    the process has in physical memory.
    """
    if not force or not _is_first():
        return
    gc.collect()
    device = get_accelerator()
    host = psutil.virtual_memory()
    figures = {
        "in use": device.memory_allocated(),
        "peak": device.max_memory_allocated(),
        "held": device.memory_reserved(),
        "peak held": device.max_memory_reserved(),
        "host": host.total - host.available,
    }
    words = [f"{name} {nbytes / _GIB:.2f} GiB" for name, nbytes in figures.items()]
    print(f"{message}\n{device.current_device_name()}: {', '.join(words)} ({host.percent}%)", flush=True)
    device.reset_peak_memory_stats()


def get_ma_status() -> int:
    """Return the bytes in use on rank 0, and 0 elsewhere."""
    return get_accelerator().memory_allocated() if _is_first() else 0


def empty_cache() -> None:
    """Give memory that was freed back, and have peaks count from now."""
    get_accelerator().empty_cache()
    get_accelerator().reset_peak_memory_stats()


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
