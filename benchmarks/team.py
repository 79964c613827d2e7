"""The ranks of one tool in processes of their own, which wait for their turn."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.launch_peers import DEEPSPEED_FOLDER

TIMEOUT_S = 900
# DeepSpeed's extensions, compiled at first use: apart from those of other checkouts and users, whose paths
# differ, so that each would compile them again, and whose locks would be waited for.
EXTENSIONS_FOLDER = Path(sys.prefix) / "torch_extensions"


class Team:
    """Processes of a worker, given these words, which read a line for each turn and answer with one."""

    def __init__(
        self, tool: str, worker: Sequence[str], num_ranks: int, said: Path, *, limit_s: float = TIMEOUT_S
    ) -> None:
        """Start them; what they say else goes into files that are called like `said`. All their answers
        together may take `limit_s`, as long as they are waited for.
        """
        self.tool = tool
        self._said = said
        self._limit_s = self._left_s = limit_s
        self._ranks = []
        all_variables = environments(num_ranks)
        self._port = all_variables[0]["MASTER_PORT"]
        for rank, environment in enumerate(all_variables):
            with said.with_suffix(f".{rank}").open("w") as errors:
                self._ranks.append(
                    subprocess.Popen(
                        [sys.executable, *worker],
                        env=environment,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=errors,
                        text=True,
                    )
                )

    def ask(self, line: str) -> list[str]:
        """Give all ranks a line; return their answers.

        Errors: RuntimeError if a rank ended, or the time limit has passed
        """
        for rank in self._ranks:
            if rank.stdin is not None and rank.poll() is None:
                rank.stdin.write(f"{line}\n")
                rank.stdin.flush()
        began = time.monotonic()
        answers = ["" for _ in self._ranks]
        waiting = {rank.stdout: place for place, rank in enumerate(self._ranks) if rank.stdout is not None}
        while waiting:
            left_s = self._left_s - (time.monotonic() - began)
            ready = select.select(list(waiting), [], [], max(0.0, left_s))[0]
            if not ready:
                raise RuntimeError(self._late(sorted(waiting.values())))
            for stream in ready:  # a rank writes a line at once
                place = waiting.pop(stream)
                answers[place] = stream.readline()
                if not answers[place]:
                    raise RuntimeError(self._ended(place))
        self._left_s -= time.monotonic() - began
        return answers

    def _late(self, places: list[int]) -> str:
        which = ", ".join(map(str, places))
        return (
            f"{self.tool}: no answer from rank {which} in its {self._limit_s:g} s; the last words of rank "
            f"{places[0]}: {self._last_words(places[0])}"
        )

    def _ended(self, place: int) -> str:
        code = self._ranks[place].wait(TIMEOUT_S)
        return f"{self.tool}: rank {place} ended with {code}: {self._last_words(place)}"

    def _last_words(self, place: int) -> str:
        text = self._said.with_suffix(f".{place}").read_text(errors="replace").strip()
        return text[-2000:] or "none"

    def end(self) -> None:
        """Kill them: their answers are here, and some tools' threads hang at the end."""
        for rank in self._ranks:
            rank.kill()
        for rank in self._ranks:
            rank.communicate()
        self._ranks = []
        remove_deepspeed_buffers(self._port)


def remove_deepspeed_buffers(port: int | str) -> None:
    """Remove what DeepSpeed's all_reduce in shared memory leaves: 64 MiB of each rank that met at this port.

    Source: DeepSpeed 0.19.8 csrc/cpu/comm/shm.cpp
    """
    for buffer in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_{os.getuid()}_*_{port}_*"):
        buffer.unlink(missing_ok=True)


def environments(num_ranks: int) -> list[dict[str, str]]:
    """Return each rank's variables, and the place of DeepSpeed and its extensions."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    common = {
        **os.environ,
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": os.pathsep.join([str(DEEPSPEED_FOLDER), os.environ.get("PYTHONPATH", "")]),
        "TORCH_EXTENSIONS_DIR": str(EXTENSIONS_FOLDER),
    }
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]
