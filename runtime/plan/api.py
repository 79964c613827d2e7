"""`dslaunch.plan()`: whether a model fits, asked from Python."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from ...shared.sizes import read_size
from ..errors import ConfigError
from .answer import answer_of
from .memory import ALL_HOST, DEVICE
from .program import Rehearsal
from .training import train

_DEVICES = ("cuda", "cpu")


class PlannedRank(NamedTuple):
    """Needs of one rank of a job; `answer` has all of it, as `dslaunch plan --json` prints it.

    Units: bytes
    """

    peak_bytes: int  # peak on the device, as torch counts it
    peak_phase: str
    kinds: Mapping[str, int]  # bytes at the peak, by kind
    host_bytes: int  # peak in host memory, pinned memory included
    answer: Mapping[str, Any]


def plan(
    make_model: Callable[[], torch.nn.Module],
    make_batch: Callable[[], Any],
    config: str | Mapping[str, Any],
    *,
    hosts: int | str = 1,
    device: str = "cuda",
    device_memory: int | str = "80GB",
) -> PlannedRank:
    """Return what rank 0 of a job needs for two steps of a model, without values, a GPU or other ranks.

    `make_model()` returns the model, and `make_batch()` what its forward takes: a dict of keyword arguments,
    a tuple, or one tensor; they run in a process of their own. The loss is the forward's result, its `loss`,
    or its first element. `config` is a ds_config. `hosts`: a number of ranks on one host, or "4x8" for 4
    hosts with 8 ranks each. `device_memory` is what the program sees as the device's, in bytes or as "24GB".

    Errors: ConfigError for arguments that cannot be read, and for a model that cannot be planned, with the
            line of the program
    """
    num_hosts, num_local = _hosts(hosts)
    num_bytes = _bytes(device_memory)
    if device not in _DEVICES:
        raise ConfigError(f"plan(device={device!r}): give 'cuda' or 'cpu'")
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("fork")

    def program() -> None:
        train(make_model(), make_batch, config)

    process = context.Process(
        target=_rehearse, args=(theirs, program, device, num_bytes, num_hosts * num_local, num_local)
    )
    process.start()
    theirs.close()
    try:
        answer = ours.recv()
    except EOFError:
        answer = None
    process.join()
    if answer is None:
        raise ConfigError(f"the planning process ended with code {process.exitcode}; its output is above")
    if answer["problem"] is not None:
        line, why = answer["problem"]["line"], answer["problem"]["why"]
        raise ConfigError(f"{line}: {why}" if line else why)
    return _planned(answer)


def _planned(answer: dict[str, Any]) -> PlannedRank:
    def most(place: str) -> tuple[int, dict[str, Any], str]:
        found = [
            (phase["peaks"].get(place, {"bytes": 0, "kinds": {}}), phase["name"])
            for phase in answer["phases"]
        ]
        peak, name = max(found, key=lambda one: one[0]["bytes"])
        return peak["bytes"], peak["kinds"], name

    is_on_gpu = answer["device"] == "cuda"
    peak, kinds, name = most(DEVICE if is_on_gpu else ALL_HOST)
    return PlannedRank(peak, name, kinds, most(ALL_HOST)[0], answer)


def _rehearse(
    sender: Connection,
    program: Callable[[], None],
    device: str,
    device_bytes: int,
    world_size: int,
    num_local: int,
) -> None:
    import os

    os.environ.update(
        RANK="0", WORLD_SIZE=str(world_size), LOCAL_RANK="0", LOCAL_WORLD_SIZE=str(num_local),
        MASTER_ADDR="127.0.0.1", MASTER_PORT="29500",
    )  # fmt: skip
    on = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
    rehearsal = Rehearsal(device=on, device_bytes=device_bytes, rank=0, world_size=world_size)
    rehearsal.run(program)
    sender.send(answer_of(rehearsal))
    sender.close()
    os._exit(0)


def _hosts(hosts: int | str) -> tuple[int, int]:
    number, by, slots = str(hosts).partition("x")
    if not by:
        number, slots = "1", number
    if not (number.isdecimal() and slots.isdecimal() and int(number) and int(slots)):
        raise ConfigError(f"plan(hosts={hosts!r}): give a number of ranks, or hosts x ranks such as '4x8'")
    return int(number), int(slots)


def _bytes(size: int | str) -> int:
    num_bytes = read_size(str(size), needs_unit=False)
    if num_bytes is None:
        raise ConfigError(f"plan(device_memory={size!r}): give bytes, or a size such as '24GB'")
    return num_bytes
