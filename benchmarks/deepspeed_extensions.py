"""Extensions that DeepSpeed compiles at its first start on CPUs, compiled before its ranks are timed."""

from __future__ import annotations

import os
import subprocess
import sys

from benchmarks.launch_peers import why_no_deepspeed
from benchmarks.team import EXTENSIONS_FOLDER, environments

COMPILE_S = 240  # half a minute where the cores have nothing else to do
_PROGRAM = """
import deepspeed
from deepspeed.accelerator import get_accelerator
builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
if builder is not None and deepspeed.ops.__compatible_ops__.get(builder.NAME, False):
    builder.load()
"""


def why_not_compiled() -> str:
    """Compile it, unless it is there; return why DeepSpeed cannot run, empty if it can.

    The folder is the benchmarks' own. A lock in it is of a compilation that was killed: torch would wait for
    its end for ever.
    """
    missing = why_no_deepspeed()
    if missing:
        return missing
    for lock in EXTENSIONS_FOLDER.rglob("lock"):
        lock.unlink(missing_ok=True)
    if not any(EXTENSIONS_FOLDER.rglob("*.so")):
        print("compiling what DeepSpeed needs, half a minute", file=sys.stderr, flush=True)
    command = [sys.executable, "-c", _PROGRAM]
    process = subprocess.Popen(
        command,
        env=environments(1)[0],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        said = process.communicate(timeout=COMPILE_S)[1]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)  # the compilers, too
        process.communicate()
        return f"what it compiles at its start was not compiled within {COMPILE_S} s"
    if process.returncode:
        return f"what it compiles at its start does not compile: {said.strip()[-1500:]}"
    return ""
