"""A device that is this machine's processor: the very source of a CUDA kernel,
compiled by g++ and run on host memory.

It shows that checks, plan, table and kernel fit together and compute the right numbers, element by element.
What it cannot show is how NVRTC compiles the same source, and that the driver takes the launch.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from pathlib import Path

from dslaunch.kernels.cuda.compiler import SOURCES, Program
from dslaunch.kernels.cuda.table import LARGE, SMALL, TableSize

KERNELS = {
    "norm": ("norm_begin", "norm_add", "norm_end"),
    "lamb": ("lamb_directions", "lamb_step_sizes"),
    "lamb_apply": ("lamb_apply",),
}


class HostDevice:
    """See the module. `launches` are the kernels that were launched, and their blocks."""

    num_blocks = 3  # few, so that a block takes several chunks
    table_sizes: tuple[TableSize, ...] = (SMALL, LARGE)

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._libraries: dict[Program, ctypes.CDLL] = {}
        self.launches: list[tuple[str, int]] = []

    def prepare(self, program: Program, kernel: str) -> None:
        """Compile the program."""
        if program in self._libraries:
            return
        place = self._folder / f"{program.source}-{len(self._libraries)}"
        kernels = KERNELS.get(program.source, ("optimizer_step",))
        source = f'#include "host.h"\n#include "{program.source}.cu"\n'
        source += "".join(f"HOST_KERNEL({kernel})\n" for kernel in kernels)
        place.with_suffix(".cpp").write_text(source)
        subprocess.run(
            [
                "g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-w",
                *(f"-D{name}={value}" for name, value in program.macros),
                f"-I{Path(__file__).parent}", f"-I{SOURCES}",
                str(place.with_suffix(".cpp")), "-o", str(place.with_suffix(".so")),
            ],
            check=True,
        )  # fmt: skip
        self._libraries[program] = ctypes.CDLL(str(place.with_suffix(".so")))

    def launch(
        self, program: Program, kernel: str, arguments: Sequence[bytes], *, num_blocks: int, stream: int
    ) -> None:
        """Run all blocks before it returns."""
        self.launches.append((kernel, num_blocks))
        parameters = [ctypes.create_string_buffer(one, len(one)) for one in arguments]
        addresses = (ctypes.c_void_p * len(parameters))(*(ctypes.addressof(one) for one in parameters))
        self._libraries[program][f"launch_{kernel}"](addresses, ctypes.c_uint(num_blocks))
