"""Ranks of DeepSpeed, forked from one process that has imported it: a start takes seconds, not half a minute.

    python -m tests.field.deepspeed_ranks

It reads a line of JSON for each launch (program, words, ranks, folder, limit_s) and answers with the exit
code, or null after the limit. As DeepSpeed's own launcher does, it ends all ranks when one fails. What they
print goes to output.txt in the folder.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.team import remove_deepspeed_buffers

LOADED = ("deepspeed", "torch._dynamo", "transformers")
LOOK_S = 0.05


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the packages print at their import
    for name in LOADED:
        importlib.import_module(name)
    for line in sys.stdin:
        answers.write(f"{json.dumps(launch(**json.loads(line)))}\n")
        answers.flush()


def launch(*, program: str, words: Sequence[str], ranks: int, folder: str, limit_s: float) -> int | None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": ranks, "LOCAL_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    left = set()
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            _run(program, words, Path(folder), {**common, "RANK": rank, "LOCAL_RANK": rank})
        left.add(child)
    deadline = time.monotonic() + limit_s
    code: int | None = 0
    while left and code == 0:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            left.discard(child)
            ended = os.waitstatus_to_exitcode(status)
            code = ended if ended >= 0 else 128 - ended
        elif time.monotonic() > deadline:
            code = None
        else:
            time.sleep(LOOK_S)
    for child in left:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    remove_deepspeed_buffers(port)
    return code


def _run(program: str, words: Sequence[str], folder: Path, env: dict[str, Any]) -> NoReturn:
    """Be this rank; never return."""
    code = 1
    try:
        os.chdir(folder)
        output = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.update({name: str(value) for name, value in env.items()})
        sys.argv = [program, *words]
        runpy.run_path(program, run_name="__main__")
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
