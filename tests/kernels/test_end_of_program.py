"""What the compiled module says when a program ends: nothing."""

from __future__ import annotations

import subprocess
import sys

# As an engine that is in a cycle, or a global, of a program with its states on a disk.
KEPT = """
import ctypes
from dslaunch.kernels import _C
pool = _C.DiskPool(num_threads=1, block_bytes=4096)
ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))
"""


def test_an_object_that_outlives_the_program_is_no_fault_to_tell() -> None:
    ended = subprocess.run([sys.executable, "-c", KEPT], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
