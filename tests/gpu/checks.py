"""Checks in processes of their own, each forked from one that has imported what they need.

A check that raises, hangs or crashes is told, and the others run. Each may take its share of the time that is
left, so that what one does not need is there for those after it, and none takes another's.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

import torch
import torch._dynamo  # the first optimizer of a process would, and take seconds
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.distributed.fsdp

import dslaunch.runtime.compat.engine.initialize  # noqa: F401  (as above)

from .line import END, tell

UNLIMITED_S = 3600.0  # by hand
LAST_S = 2.0  # for what is told at the end
OTHERS_S = 3.0  # for the other ranks, after one that fails
STACKS_S = 0.3
TICK_S = 0.05

# NCCL refuses two ranks of one host on one GPU: each says that it is a host of its own, and they talk over
# the loopback network. That shows values and hangs, and nothing about time.
ONE_GPU = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NET": "Socket",
    "NCCL_MAX_NCHANNELS": "1",
}
HANGS = {"NCCL_DEBUG": "WARN", "DEEPSPEED_TIMEOUT": "1", "DSLAUNCH_WATCHDOG_S": "5"}


class Check(NamedTuple):
    """What each of `num_ranks` processes calls. It tells what it finds."""

    name: str
    work: Callable[[], object]
    num_ranks: int = 1
    share: float = 1.0  # of the time that is left, beside the shares of the checks after it
    is_peers: bool = False  # of a tool that is not ours, whose failure is not ours either


def is_fake() -> bool:
    """Whether this process has the fake device of the tests."""
    return "tests.fake_cuda.torch_cuda" in sys.modules


def run_checks(checks: Sequence[Check]) -> int:
    """Return how many failed, those of peers aside."""
    end = float(os.environ.get(END) or time.monotonic() + UNLIMITED_S) - LAST_S
    num_wrong = 0
    for number, check in enumerate(checks):
        left_s = max(end - time.monotonic(), 0.0)
        is_right = _is_right(check, left_s * check.share / sum(one.share for one in checks[number:]))
        num_wrong += not (is_right or check.is_peers)
    return num_wrong


def _is_right(check: Check, limit_s: float) -> bool:
    start = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    running = {_fork(check, rank, port): rank for rank in range(check.num_ranks)}
    until, failed = start + limit_s, False
    while running and time.monotonic() < until:
        for pid, rank in list(running.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            del running[pid]
            if status and not failed:
                failed, until = True, min(until, time.monotonic() + OTHERS_S)
            if os.WIFSIGNALED(status):
                _tell_failure(check, f"rank {rank} was ended by signal {os.WTERMSIG(status)}")
        time.sleep(TICK_S)
    if running and not failed:
        ranks = ", ".join(map(str, running.values()))
        _tell_failure(check, f"no end of rank {ranks} after {limit_s:.1f} s")
    _end(list(running))
    return not (failed or running)


def _end(pids: Sequence[int]) -> None:
    """Have them print where they stand, and end them."""
    for how in (signal.SIGUSR1, signal.SIGKILL):
        for pid in pids:
            os.kill(pid, how)
        if pids and how == signal.SIGUSR1:
            time.sleep(STACKS_S)
    for pid in pids:
        os.waitpid(pid, 0)


def _fork(check: Check, rank: int, port: int) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    return os.fork() or _be_rank(check, rank, port)


def _be_rank(check: Check, rank: int, port: int) -> NoReturn:
    status = 1
    try:
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(check.num_ranks))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        if check.num_ranks > 1:
            os.environ.update(HANGS)
        if torch.cuda.device_count() < check.num_ranks:
            shown = os.environ.get("CUDA_VISIBLE_DEVICES") or "0"
            os.environ.update(ONE_GPU, NCCL_HOSTID=f"host{rank}", CUDA_VISIBLE_DEVICES=shown.split(",")[0])
        check.work()
        if dist.is_initialized():
            dist.destroy_process_group()
        status = 0
    except BaseException as error:
        traceback.print_exc()
        _tell_failure(check, f"rank {rank}: {type(error).__name__}: {error}"[:500])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _tell_failure(check: Check, error: str) -> None:
    tell(check.name, **{"peer": True} if check.is_peers else {}, error=error)
