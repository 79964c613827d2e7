"""The default process group of torch.distributed, and the device that goes with it."""

from __future__ import annotations

import atexit
import logging
import os
import socket
import sys
import time
import weakref
from contextlib import suppress
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

# import before there is a group: its default arguments would hold it for ever
import torch.distributed.nn.functional
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from ..environment import WorkerEnvironment
from ..errors import ConfigError, UserError
from ..started import DEFAULT_PORT, join
from .wire import before_unwired

_log = logging.getLogger("dslaunch")

# torch 2.6.0 holds the interpreter's lock while it ends gloo's threads. A thread that still has to free the
# tensors of a finished collective needs that lock, so both wait for ever: 5 of 30 jobs of two ranks, whose
# last act was a step, never ended. torch 2.13.0 is free of this; the versions between were not tried.
_THREADS_NEED_LOCK = torch.__version__ < "2.13"
_LET_GO_S = 0.02  # without Python's lock: a thread waits at most 5 ms for it
# Rank 0 is asked so often whether it listens yet; by many ranks more seldom, so that it has 10,000 such
# questions in a second at most.
_ASK_EVERY_S, _ASK_OF_EACH_RANK_S, _ASK_FOR_S = 0.01, 1e-4, 5.0


def start_process_group(
    env: WorkerEnvironment,
    *,
    backend: str | None = None,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    rank: int = -1,
    world_size: int = -1,
    device_index: int | None = None,
    port: int = DEFAULT_PORT,
) -> None:
    """Make the default process group unless there is one: NCCL with GPUs, else gloo. `device_index`: as
    `index` of choose_device().

    Without RANK and WORLD_SIZE, or arguments instead of them, a process that MPI or Slurm has started joins
    its job, on `port` unless there is a MASTER_PORT; any other is the group alone and opens no port.
    `timeout` goes before DEEPSPEED_TIMEOUT. Collectives of all our groups have it.
    Order:  every rank must call this
    Errors: ConfigError for a LOCAL_RANK without a GPU, a timeout that is none, or a job of MPI or Slurm that
            cannot be joined
    """
    if timeout is not None and not (isinstance(timeout, timedelta) and timeout > timedelta(0)):
        raise ConfigError(
            f"init_distributed(timeout={timeout!r}): must be a datetime.timedelta above 0, such as "
            "timedelta(minutes=30)"
        )
    if dist.is_initialized():
        return
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    device = choose_device(env, backend=backend, index=device_index)
    if torch.__version__ < "2.8":  # NCCL there would otherwise keep every freed buffer from its next user
        os.environ.setdefault("TORCH_NCCL_AVOID_RECORD_STREAMS", "1")
    store = None
    if rank < 0 and world_size < 0:
        rank, world_size = env.rank, env.world_size
        if env.started is not None and init_method is None:
            join(env.started, port=port)
        if not env.is_launched and init_method is None:
            store = dist.HashStore()  # type: ignore[attr-defined]  # torch forgot to list it
        elif init_method is None:
            wait_for_rank_0(rank, world_size)
            store, rank, world_size = _next_store(rank, world_size, timeout or env.timeout)
    dist.init_process_group(
        backend,
        init_method=init_method,
        timeout=timeout or env.timeout,
        rank=rank,
        world_size=world_size,
        store=store,
        device_id=device if device.type == "cuda" else None,
    )
    made = dist.group.WORLD
    if made is None:
        raise AssertionError("init_process_group() has returned and made no group")
    atexit.register(_end_process_group, weakref.ref(made))


def wait_for_rank_0(rank: int, world_size: int) -> None:
    """Wait for 5 s at most until rank 0 listens: a store of torch's that is refused asks again only after a
    quarter or half of a second. What else may be wrong is for that to find.
    """
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    until = time.monotonic() + _ASK_FOR_S
    while rank > 0 and host and port.isdecimal() and time.monotonic() < until:
        try:
            socket.create_connection((host, int(port)), timeout=_ASK_FOR_S).close()
            return
        except ConnectionRefusedError:
            time.sleep(max(_ASK_EVERY_S, world_size * _ASK_OF_EACH_RANK_S))
        except OSError:
            return


_num_stores = count()  # ranks make their groups in the same order


def _next_store(rank: int, world_size: int, timeout: timedelta) -> tuple[Any, int, int]:
    """Return a store for the next default group; None for the first one, which torch makes.

    Who still holds a group, or the store, of the one before keeps its server alive, and torch uses that again
    with the same keys: a rank would find where another one listened before.
    """
    number = next(_num_stores)
    if not number:
        return None, rank, world_size
    store, rank, world_size = next(rendezvous("env://", rank, world_size, timeout=timeout))
    store.set_timeout(timeout)
    return PrefixStore(f"dslaunch/{number}", store), rank, world_size


def group_timeout() -> timedelta | None:
    """Return how long a collective of the default group may take, whichever program made that;
    None if the backend does not tell.

    torch gives groups made by new_group() its own default instead, unless told.
    """
    group = dist.group.WORLD
    if group is None:
        raise AssertionError("there is no default process group")
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    timeout: timedelta | None = getattr(options, "_timeout", None)
    return timeout


def choose_device(
    env: WorkerEnvironment, *, backend: str | None = None, index: int | None = None
) -> torch.device:
    """Return this worker's device, and make it current if it is a GPU: that of `index`, or the one that
    LOCAL_RANK counts to.

    A worker that is shown a single GPU takes it, whatever its LOCAL_RANK.
    Errors: ConfigError if there is no such GPU
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if not (_sends_from_gpus() if backend is None else "nccl" in backend):
        if backend is None and env.rank == 0:
            _log.warning(
                "training on the CPU, though there is a GPU: the process group's back end is '%s', which "
                "sends only what is in host memory; leave out the back end where the group is made, or give "
                "'nccl'",
                dist.get_backend(),
            )
        return torch.device("cpu")
    num_devices = torch.cuda.device_count()
    if index is not None and not 0 <= index < num_devices:
        raise ConfigError(
            f"args.device_rank={index}: this host shows {num_devices} GPUs; give one from 0 to "
            f"{num_devices - 1}"
        )
    if index is None:
        index = env.local_rank if num_devices > 1 else 0
    if index >= num_devices:
        raise ConfigError(
            f"LOCAL_RANK={env.local_rank}: this host shows {num_devices} GPUs; start at most {num_devices} "
            "workers on it"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def group_device() -> torch.device:
    """Return where a tensor must be that goes through the default process group: the current GPU if it sends
    from GPUs.
    """
    if torch.cuda.is_available() and _sends_from_gpus():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _sends_from_gpus() -> bool:
    """Whether the default group does. One that was made without the name of a back end is called
    'undefined' and has one for each kind of device; gloo takes tensors of GPUs, too, and is not meant.
    """
    return dist.is_initialized() and "nccl" in dist.get_backend_config()


def destroy_group(group: dist.ProcessGroup | None = None) -> None:
    """End this group, or all, once the threads of gloo's have let go of what they sent."""
    if _THREADS_NEED_LOCK:
        time.sleep(_LET_GO_S)
    dist.destroy_process_group(group)


def _end_process_group(made: weakref.ref[dist.ProcessGroup]) -> None:
    """End the group that was made here while the interpreter is still whole.

    A thread of gloo's that lets go of a finished collective's tensors during the shutdown ends the process
    with SIGABRT: seen in 5 of 30 processes whose last act was a step. NCCL's group warns that it was not
    ended, and in some versions of torch its threads abort the process as late. Ending the group waits for
    what is in flight, so an error in the middle of things, which the other ranks know nothing of, must not do
    it; a UserError has nothing in flight.
    """
    error = getattr(sys, "last_value", None)  # the uncaught exception, if that is why we end
    is_ours = dist.is_initialized() and dist.group.WORLD is made()
    if is_ours and error is None:
        with suppress(RuntimeError):  # the others may have failed
            before_unwired()
    if is_ours and (error is None or isinstance(error, UserError)):
        destroy_group()
