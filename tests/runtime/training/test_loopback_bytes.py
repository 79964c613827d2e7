"""What the ranks of one host send each other, by the loopback interface's own counter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime.training.test_two_hosts import EXCHANGE, PROTOCOL_OVERHEAD

TIMEOUT_S = 100
NUM_RANKS = 3
PSI = 4 * 500 * 500  # elements
# a network of its own, so that no other program's bytes count
IN_ITS_OWN_NETWORK = ("unshare", "--net", "sh", "-ec", 'ip link set lo up; "$@"', "sh")
START = """
for rank in 0 1 2; do RANK=$rank LOCAL_RANK=$rank "$@" & ranks="$ranks $!"; done
for rank in $ranks; do wait $rank; done
"""


@pytest.fixture(scope="module")
def exchanged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with what three ranks counted at every stage."""
    if os.geteuid() != 0 or subprocess.run([*IN_ITS_OWN_NETWORK, "true"], check=False).returncode:
        pytest.skip("no right to make a network")
    folder = tmp_path_factory.mktemp("exchange")
    (folder / "exchange.py").write_text(EXCHANGE)
    ranks = ("sh", "-ec", START, "sh", sys.executable, "exchange.py", "0", "1", "2", "3")
    ended = subprocess.run(
        [*IN_ITS_OWN_NETWORK, *ranks],
        cwd=folder,
        timeout=TIMEOUT_S,
        check=False,
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "WIRE": "lo",
            "WORLD_SIZE": str(NUM_RANKS),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
            "OMP_NUM_THREADS": "1",
        },
    )
    assert ended.returncode == 0, ended.stderr
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "times"),
    [(0, {1: 2.0, 2: 2.0}), (1, {1: 2.0, 2: 2.0}), (2, {1: 2.0, 2: 3.0}), (3, {1: 2.5, 2: 5.0})],
)
def test_loopback_carries_the_bytes_of_the_formula(
    exchanged: Path, stage: int, times: dict[int, float]
) -> None:
    for num_micro_batches, number in times.items():
        files = [exchanged / f"bytes-{stage}-{num_micro_batches}-{rank}" for rank in range(NUM_RANKS)]
        found = [json.loads(file.read_text()) for file in files]
        expected = number * PSI * (NUM_RANKS - 1) / NUM_RANKS * 4
        for one in found:
            assert one["meter"] == pytest.approx(expected, rel=0.002), "padding and the norm's few bytes"
        sent = sum(one["meter"] for one in found)
        for one in found:  # each reads the one counter of all
            assert sent <= one["wire"] <= sent * (1 + PROTOCOL_OVERHEAD)
