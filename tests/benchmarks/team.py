"""The ranks of one tool in processes of their own, which wait for their turn."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from tests.benchmarks.launch_peers import DEEPSPEED_FOLDER

TIMEOUT_S = 900


class Team:
    """Processes of `worker`, given the shape and the tool, which read a line for each turn
    and answer with one.
    """

    def __init__(self, worker: Path, tool: str, shape: str, num_ranks: int, said: Path) -> None:
        """Start them; what they say else goes into files that are called like `said`."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.tool = tool
        self._said = said
        self._ranks = [
            subprocess.Popen(
                [sys.executable, str(worker), shape, tool],
                env={**os.environ, **rank_environment(rank, num_ranks, port)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said.with_suffix(f".{rank}").open("w"),
                text=True,
            )
            for rank in range(num_ranks)
        ]

    def ask(self, line: str) -> list[str]:
        """Give all of them a line; return their answers.

        Errors: RuntimeError if a rank ended
        """
        for rank in self._ranks:
            if rank.stdin is not None and rank.poll() is None:
                rank.stdin.write(f"{line}\n")
                rank.stdin.flush()
        return self.answers()

    def answers(self) -> list[str]:
        """Return the next line of each.

        Errors: as `ask`
        """
        answers = [rank.stdout.readline() for rank in self._ranks if rank.stdout is not None]
        if not all(answers):
            place = answers.index("")
            code = self._ranks[place].wait(TIMEOUT_S)
            last = self._said.with_suffix(f".{place}").read_text(errors="replace").strip()[-2000:]
            raise RuntimeError(f"{self.tool}: rank {place} ended with {code}: {last}")
        return answers

    def end(self) -> None:
        """Kill them: their answers are here, and some tools' threads hang at the end."""
        for rank in self._ranks:
            rank.kill()
            rank.communicate()


def rank_environment(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """What a rank is told, and where DeepSpeed is."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": os.pathsep.join([str(DEEPSPEED_FOLDER), os.environ.get("PYTHONPATH", "")]),
    }
