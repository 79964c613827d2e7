"""Checkpoints in a bucket, over S3's own protocol: two ranks, and a server of moto on this machine.

Skipped without `pip install s3fs moto[server]`, which bring 300 MB for a minute's test.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("s3fs", reason="needs s3fs and moto[server]: pip install s3fs 'moto[server]'")
pytest.importorskip("moto.server", reason="needs s3fs and moto[server]: pip install s3fs 'moto[server]'")

from dslaunch.runtime.checkpoint.files.reader import CheckpointReader
from dslaunch.runtime.checkpoint.storage.url_store import open_store
from tests.runtime.checkpoint.states import make, run, whole_state
from tests.runtime.models import assert_same_bits
from tests.runtime.ranks import Ranks

URL = "s3://bucket/run"

SERVER = """
import sys, boto3
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
url = "http://%s:%d" % server.get_host_and_port()
boto3.client("s3", endpoint_url=url, region_name="us-east-1").create_bucket(Bucket="bucket")
print(url, flush=True)
sys.stdin.read()
"""

KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """A server with an empty bucket."""
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **KEYS},
    )
    assert server.stdout is not None
    yield server.stdout.readline().strip()
    server.communicate()


def _round_trip(rank: int, endpoint: str) -> None:
    os.environ.update(KEYS, AWS_ENDPOINT_URL=endpoint)
    engine = make(2, True, checkpoint={"keep_last": 2})
    states: list[Any] = []
    for step, tag in enumerate(("a", "b", "b", "c")):  # b is written over
        run(engine, first=step, steps=1)
        engine.save_checkpoint(URL, tag, client_state={"step": step})
        states.append(whole_state(engine))
    store = open_store(URL)
    assert (store.tags(), store.latest()) == (["b", "c"], "c")
    for tag in ("b", "c"):
        CheckpointReader(store, tag).verify()
    other = make(3, True, seed=5, checkpoint={"async_save": True})
    assert other.load_checkpoint(URL, "b") == ("s3://bucket/run/b", {"step": 2})
    assert_same_bits(whole_state(other), states[2])
    other.load_checkpoint(URL)
    assert_same_bits(whole_state(other), states[3])
    other.save_checkpoint(URL, "beside")
    other.destroy()
    torch.distributed.barrier()
    assert open_store(URL).latest() == "beside"


@pytest.mark.slow
def test_two_ranks_save_load_overwrite_and_prune_in_a_bucket(ranks: Ranks, endpoint: str) -> None:
    ranks(_round_trip, endpoint, world_size=2)
