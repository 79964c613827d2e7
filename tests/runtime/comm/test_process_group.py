"""Which GPU a worker takes, and the end of the process group."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

import dslaunch
from dslaunch import ConfigError
from dslaunch.runtime.comm import process_group
from dslaunch.runtime.comm.process_group import choose_device, destroy_group, start_process_group
from dslaunch.runtime.environment import read_environment
from tests.fake_cuda.build import can_be_built
from tests.runtime.ranks import Ranks

AVOID = "TORCH_NCCL_AVOID_RECORD_STREAMS"


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Four GPUs that are not there; what becomes the current one."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    return chosen


@pytest.mark.parametrize(("index", "expected"), [(None, 2), (0, 0), (3, 3)])
def test_a_gpu_that_is_named_goes_before_local_rank(
    chosen: list[int], index: int | None, expected: int
) -> None:
    worker = read_environment({"RANK": "6", "WORLD_SIZE": "8", "LOCAL_RANK": "2"})
    assert choose_device(worker, backend="nccl", index=index) == torch.device("cuda", expected)
    assert chosen == [expected]


@pytest.mark.parametrize("index", [-1, 4])
def test_a_gpu_that_is_not_there_is_refused_with_those_that_are(chosen: list[int], index: int) -> None:
    expected = f"args.device_rank={index}: this host shows 4 GPUs; give one from 0 to 3"
    with pytest.raises(ConfigError, match=re.escape(expected)):
        choose_device(read_environment({}), backend="nccl", index=index)
    assert chosen == []


def test_without_a_gpu_all_is_the_cpu() -> None:
    assert choose_device(read_environment({}), backend="gloo", index=3) == torch.device("cpu")


@pytest.mark.parametrize("is_old", [False, True])
def test_threads_of_an_old_gloo_get_the_interpreters_lock_before_they_are_waited_for(
    monkeypatch: pytest.MonkeyPatch, is_old: bool
) -> None:
    """With torch 2.6.0 some jobs never end without it."""
    done: list[str] = []
    monkeypatch.setattr(process_group, "_THREADS_NEED_LOCK", is_old)
    monkeypatch.setattr(process_group.time, "sleep", lambda _: done.append("the lock is free"))
    monkeypatch.setattr(dist, "destroy_process_group", lambda _: done.append("threads are waited for"))
    destroy_group()
    assert done == ["the lock is free"] * is_old + ["threads are waited for"]


@pytest.mark.parametrize(
    ("version", "given", "expected"),
    [("2.6.0", None, "1"), ("2.7.1", "0", "0"), ("2.8.0", None, None), ("2.13.0", None, None)],
)
def test_nccl_of_an_old_torch_lets_freed_buffers_be_used_again(
    monkeypatch: pytest.MonkeyPatch, version: str, given: str | None, expected: str | None
) -> None:
    """Newer ones do by themselves, and what the program has set stays."""
    seen: list[str | None] = []

    def init(*_: object, **__: object) -> None:
        seen.append(os.environ.get(AVOID))
        raise RuntimeError("no group is made")

    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    monkeypatch.setattr(dist, "init_process_group", init)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setenv(AVOID, given or "")  # which puts back what was there
    if given is None:
        monkeypatch.delenv(AVOID)
    with pytest.raises(RuntimeError, match="no group is made"):
        start_process_group(read_environment({}), backend="gloo")
    assert seen == [expected]


PROGRAM = """
import os
from tests.fake_cuda import torch_cuda
native = torch_cuda.load()
from tests.fake_cuda import nccl
nccl.install(native)
import torch.distributed as dist
from dslaunch.runtime.comm.process_group import start_process_group
from dslaunch.runtime.environment import read_environment

def shut_down(group):
    print("shut down", os.environ["CASE"], flush=True)

nccl.ProcessGroupNCCL.shutdown = shut_down
for case in ("ours", "after an error", "the program's", "the program's, after ours"):
    os.environ["CASE"] = case
    child = os.fork()
    if child != 0:
        os.waitpid(child, 0)
        continue
    if case == "the program's":
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    start_process_group(read_environment({}))
    if case == "after an error":
        raise RuntimeError("in the middle of a step")
    if case == "the program's, after ours":
        nccl.ProcessGroupNCCL.shutdown = lambda group: None
        dist.destroy_process_group()
        nccl.ProcessGroupNCCL.shutdown = shut_down
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    break
"""


@pytest.mark.slow
@pytest.mark.skipif(can_be_built() is not None, reason=str(can_be_built()))
def test_at_a_clean_exit_nccl_s_group_is_ended_if_we_made_it() -> None:
    """Each case is a process that comes to the end of its program."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "shut down ours\n", done.stderr


def _again(rank: int, port: int) -> int:
    """Make groups one after the other, each while the engine of the one before is there; leave the last."""
    place = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": 2,
        "MASTER_PORT": port,
        "MASTER_ADDR": "127.0.0.1",
    }
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}
    engine: Any = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_group, "_num_stores", count())  # as in a process that has made none
        for name, value in place.items():
            patch.setenv(name, str(value))
        dist.barrier()  # a rank that leaves closes connections on which the other may still make the group
        for _ in range(3):
            dist.destroy_process_group()
            engine, *_ = dslaunch.initialize(model=torch.nn.Linear(1, 1), config=config)
            engine.backward(engine(torch.ones(1, 1)).sum())
            engine.step()
            engine.destroy()
    return int(engine.global_steps)


def test_a_job_makes_its_process_group_anew_after_an_engine(ranks: Ranks) -> None:
    """What an engine holds of the old one keeps its store, with where the ranks listened before."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert ranks(_again, port, world_size=2, deadline_s=60.0) == [1, 1]


def test_rank_0_is_waited_for_until_it_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as first:
        first.bind(("127.0.0.1", 0))  # and is refused: it does not listen yet
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(first.getsockname()[1]))
        waiting = threading.Thread(target=process_group.wait_for_rank_0, args=(1, 2))
        waiting.start()
        waiting.join(0.1)
        assert waiting.is_alive()
        first.listen()
        waiting.join(5.0)
        assert not waiting.is_alive()
        first.accept()[0].close()
