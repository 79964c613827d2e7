"""Host memory that was freed, and is kept for its next use. By default glibc gives much of it back to the
system, page by page.

Training on CPUs frees what it needs again at once: gradients after a step, gathered parameters, buffers of
collectives. The system must then map and zero every page anew, which took up to a quarter of a step
(docs/design/flat-units.md).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

# Parameters of mallopt(3). Setting either one ends glibc's own adjustment of both, so both are set.
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
_LARGEST_TRIM_THRESHOLD = 2**31 - 1  # bytes, an int
_LARGEST_MMAP_THRESHOLD = 4 * 1024 * 1024 * ctypes.sizeof(ctypes.c_long)  # bytes; glibc refuses more

_USERS_CHOICES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")


def keep_freed_memory(environment: Mapping[str, str] = os.environ) -> bool:
    """Have this process keep freed memory for its next use, except allocations of 32 MiB and more; return
    whether it will.

    It will not if the environment sets any of this (mallopt(3), GLIBC_TUNABLES), or if the C library is
    not glibc.
    """
    is_users = any(name in environment for name in _USERS_CHOICES)
    if is_users or "glibc.malloc" in environment.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD), (_TRIM_THRESHOLD, _LARGEST_TRIM_THRESHOLD))
    return all(mallopt(setting, value) == 1 for setting, value in settings)


def give_back_freed_memory() -> None:
    """Give memory that this process has freed so far to the system, as far as glibc can. Memory that is freed
    later is kept again.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
