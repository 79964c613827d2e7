from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from itertools import combinations

import pytest

from dslaunch.runtime.comm.network_check import MARK, rounds_of_pairs

TIMEOUT_S = 60.0
# A rank that says that it is there, and then nothing: it ends when its stdin does.
SILENT = """
import os, sys
from datetime import timedelta
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 2, timeout=timedelta(seconds=60))
store.set("gpu/1", "0")
sys.stdin.read()
"""


@pytest.mark.parametrize("number", [2, 3, 4, 5, 8, 9])
def test_every_pair_has_its_round_and_no_rank_is_in_two_pairs_of_one(number: int) -> None:
    rounds = rounds_of_pairs(number)
    assert len(rounds) == number - 1 + number % 2
    assert sorted(pair for one in rounds for pair in one) == list(combinations(range(number), 2))
    for one in rounds:
        ranks = [rank for pair in one for rank in pair]
        assert len(set(ranks)) == len(ranks)


@pytest.mark.exhaustive
def test_a_rank_that_falls_silent_is_told_and_not_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "RANK": "0"}
    silent = subprocess.Popen([sys.executable, "-c", SILENT], env=env, stdin=subprocess.PIPE)
    try:
        words = [sys.executable, "-m", "dslaunch.runtime.comm.network_check", "2"]
        ended = subprocess.run(
            words, env=env, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=False
        )
    finally:
        silent.communicate()
    assert ended.returncode == 1
    found = json.loads(ended.stdout.partition(MARK)[2])
    assert found["silent"] == [1]
    assert "error" in found["pairs"][0]["found"][0]
