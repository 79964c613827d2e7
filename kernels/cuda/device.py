"""One CUDA device: its kernels, loaded once, and how they are launched.

The only file that talks to the driver.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from typing import Any, Protocol

from .compiler import INSTALL, CubinCache, Nvrtc, Program, cache_folder
from .errors import CudaUnavailable
from .table import LARGE, NUM_THREADS, SMALL, TableSize

# Blocks of one processor that are enough to keep its memory busy; more would only wait for their turn.
_BLOCKS_PER_PROCESSOR = 8
# Kernel parameters of 32 KiB: drivers from CUDA 12.1 on, chips from compute capability 7.0 on.
_LARGE_DRIVER = 12010
_LARGE_CAPABILITY = (7, 0)


class Device(Protocol):
    """Calls of a step to a device."""

    @property
    def table_sizes(self) -> tuple[TableSize, ...]:
        """The tables that a launch can carry, smallest first."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks that keep the device busy."""

    def prepare(self, program: Program, kernel: str) -> None:
        """Have a kernel ready, so that launching it cannot fail for want of it."""

    def launch(
        self, program: Program, kernel: str, arguments: Sequence[bytes], *, num_blocks: int, stream: int
    ) -> None:
        """Start a prepared kernel on a stream and return at once; each argument is the
        bytes of one parameter.
        """


class CudaDevice:
    """A device of this machine.

    Errors:  CudaUnavailable if cuda-core or the driver is missing
    """

    def __init__(self, ordinal: int, cache: CubinCache) -> None:
        try:
            from cuda import core  # imported at need: 0.4 s, and only a machine with a GPU has it
            from cuda.bindings import driver

            properties = core.Device(ordinal).properties
            version = _checked(driver.cuDriverGetVersion())
        except (ImportError, RuntimeError, OSError) as error:
            raise CudaUnavailable(
                f"CUDA device {ordinal} cannot be used through cuda-core ({error}): {INSTALL}"
            ) from error
        capability = (properties.compute_capability_major, properties.compute_capability_minor)
        self._core = core
        self._driver = driver
        self._ordinal = ordinal
        self._cache = cache
        self._arch = f"sm_{capability[0]}{capability[1]}"
        self._kernels: dict[
            tuple[Program, str], tuple[int, object]
        ] = {}  # the handle, and what keeps it loaded
        self._failures: dict[Program, str] = {}  # programs that would fail again, after as long a try
        self.num_blocks = properties.multiprocessor_count * _BLOCKS_PER_PROCESSOR
        has_large = version >= _LARGE_DRIVER and capability >= _LARGE_CAPABILITY
        self.table_sizes: tuple[TableSize, ...] = (SMALL, LARGE) if has_large else (SMALL,)

    def prepare(self, program: Program, kernel: str) -> None:
        """Compile or read the kernel, and load it.

        Errors:  CudaUnavailable if it must be compiled and cannot
                 ValueError if another device is current
        """
        self._make_current()
        if program in self._failures:
            raise CudaUnavailable(self._failures[program])
        if (program, kernel) not in self._kernels:
            try:
                cubin = self._cache.load(program, self._arch)
            except CudaUnavailable as error:
                self._failures[program] = str(error)
                raise
            code = self._core.ObjectCode.from_cubin(cubin, name=program.source)
            loaded = code.get_kernel(kernel)
            self._kernels[program, kernel] = (int(loaded.handle), loaded)

    def launch(
        self, program: Program, kernel: str, arguments: Sequence[bytes], *, num_blocks: int, stream: int
    ) -> None:
        """Start a prepared kernel on a stream and return at once.

        Errors:  RuntimeError if the driver refuses; an error of an earlier kernel may show here,
                 as with every launch
        """
        handle, _ = self._kernels[program, kernel]
        parameters = [ctypes.create_string_buffer(one, len(one)) for one in arguments]
        addresses = (ctypes.c_void_p * len(parameters))(*(ctypes.addressof(one) for one in parameters))
        # The driver has copied the parameters when it returns.
        _checked(
            self._driver.cuLaunchKernel(
                handle, num_blocks, 1, 1, NUM_THREADS, 1, 1, 0, stream, ctypes.addressof(addresses), 0
            )
        )

    def _make_current(self) -> None:
        """Make this device current for a thread that has not used CUDA yet."""
        if not int(_checked(self._driver.cuCtxGetCurrent())):
            self._core.Device(self._ordinal).set_current()
            return
        current = int(_checked(self._driver.cuCtxGetDevice()))
        if current != self._ordinal:
            raise ValueError(
                f"the arrays are on CUDA device {self._ordinal}, but device {current} is current; make "
                f"theirs current for the call, e.g. `with torch.cuda.device({self._ordinal}):`"
            )


@functools.cache  # loaded code is a fact about the process, as an imported module is
def cuda_device(ordinal: int) -> CudaDevice:
    """Return the device with this ordinal.

    Errors:  CudaUnavailable if cuda-core or the driver is missing
    """
    return CudaDevice(ordinal, CubinCache(cache_folder(os.environ), Nvrtc()))


def _checked(answer: Any) -> Any:
    """Return the value of a driver call, which answers with its status first."""
    status, *values = answer
    if int(status) != 0:
        raise RuntimeError(f"the CUDA driver answered {status.name} ({int(status)})")
    return values[0] if values else None
