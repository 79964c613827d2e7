from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from datetime import timedelta
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dslaunch.runtime.comm import network_check
from dslaunch.runtime.comm.network_check import rounds_of_pairs
from dslaunch.shared import marks
from tests.runtime.ranks import Ranks

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


def _measured(rank: int, world_size: int, fault: str) -> dict[str, Any]:
    """What a rank finds, with messages that are measured for no longer than they take."""
    default = dist.distributed_c10d._get_default_store()
    dist.barrier()
    dist.destroy_process_group()
    store = dist.PrefixStore("probe", default)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(network_check, "FIRST_NUMEL", 64)
            patch.setattr(network_check, "LAST_NUMEL", 1024)
            if fault == "of a pair" and rank == 1:
                patch.setattr(network_check._Probe, "_measure_pair", _fail)
            if fault == "together":
                patch.setattr(network_check._Probe, "_measure_together", _fail)
            return network_check._Probe(store, rank, world_size, timedelta(seconds=20)).run()
    finally:
        # Each rank alone: what stands around a test ends a group.
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def _fail(_: object) -> dict[str, Any]:
    raise RuntimeError("the link is down\nand more of it")


def test_every_pair_and_all_together_are_measured(ranks: Ranks) -> None:
    found, *_ = ranks(_measured, 3, "", world_size=3)
    assert (found["backend"], found["silent"]) == ("gloo", [])
    assert sorted(tuple(pair["ranks"]) for pair in found["pairs"]) == [(0, 1), (0, 2), (1, 2)]
    for one in (one for pair in found["pairs"] for one in pair["found"]):
        assert one["latency_s"] > 0
        assert one["bytes_per_s"] > 0
    assert found["together"]["ranks"] == [0, 1, 2]
    for of_rank in found["together"]["found"]:
        assert of_rank.keys() == {"all_reduce", "all_gather", "reduce_scatter"}
        for name, one in of_rank.items():
            assert one["bytes"] == 1024 // 3 * 3 * 4  # it grew to the last size, in parts of one length
            ways = 2 if name == "all_reduce" else 1
            assert one["bytes_per_s"] * one["seconds"] == pytest.approx(ways * one["bytes"] * 2 / 3)
    first, *others = found["together"]["found"]
    assert all(other == first for other in others)  # the slowest rank's seconds


def test_a_pair_that_fails_is_told_beside_the_others_and_ends_the_measuring(ranks: Ranks) -> None:
    found, *_ = ranks(_measured, 3, "of a pair", world_size=3)
    by_pair = {tuple(pair["ranks"]): pair["found"] for pair in found["pairs"]}
    assert "error" not in by_pair[0, 2][0]
    for pair, at in (((0, 1), 1), ((1, 2), 0)):
        assert by_pair[pair][at] == {"error": "the link is down"}
    assert found["together"] == {"ranks": [], "found": []}
    assert found["silent"] == []


def test_ranks_that_fail_together_only_are_told_as_together(ranks: Ranks) -> None:
    found, *_ = ranks(_measured, 2, "together", world_size=2)
    assert found["together"]["ranks"] == [0, 1]
    told = [one["error"] for one in found["together"]["found"]]
    # the first to fail leaves, perhaps before the other one has connected to it
    assert len(told) == 2
    assert "the link is down" in told
    assert "error" not in found["pairs"][0]["found"][0]


def test_the_speed_is_the_best_of_several_messages_that_take_long_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sender's side, with a clock of the test's: it grows until one takes a tenth of a second."""
    took = iter([0.01, 0.02, 0.2, 0.5, 0.4])
    sent: list[int] = []

    def timed(_: object, run: Any) -> float:
        sent.append(run.args[0].numel())
        return next(took)

    monkeypatch.setattr(network_check._Probe, "_timed", timed)
    monkeypatch.setattr(network_check._Probe, "_pass_on", lambda *_, **__: None)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    probe = network_check._Probe(dist.HashStore(), 0, 1, timedelta(seconds=1))
    assert probe._send_speed(0) == 4 * 2**18 / 0.2
    assert sent == [2**14, 2**16, 2**18, 2**18, 2**18]
    assert probe._device == torch.device("cpu")


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
    found = json.loads(ended.stdout.partition(marks.NETWORK)[2])
    assert found["silent"] == [1]
    assert "error" in found["pairs"][0]["found"][0]
