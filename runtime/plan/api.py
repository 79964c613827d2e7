"""`dslaunch.plan()`: whether a model fits, asked from Python."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from ..compat.engine.initialize import initialize
from ..errors import ConfigError
from .answer import answer_of
from .memory import DEVICE, HOST, PINNED
from .program import NUM_STEPS, Rehearsal

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}  # fmt: skip


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
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("fork")

    def program() -> None:
        _train(make_model(), make_batch, config)

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
        raise ConfigError(f"{answer['problem']['line']}: {answer['problem']['why']}")
    return _planned(answer)


def _planned(answer: dict[str, Any]) -> PlannedRank:
    def most(*places: str) -> tuple[int, dict[str, Any], str]:
        found = [
            (sum(phase["peaks"].get(place, {}).get("bytes", 0) for place in places), phase)
            for phase in answer["phases"]
        ]
        nbytes, phase = max(found, key=lambda one: one[0])
        return nbytes, phase["peaks"].get(places[0], {}).get("kinds", {}), phase["name"]

    is_on_gpu = answer["device"] == "cuda"
    peak, kinds, name = most(DEVICE if is_on_gpu else HOST)
    return PlannedRank(peak, name, kinds, most(HOST, PINNED)[0], answer)


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


def _train(model: torch.nn.Module, make_batch: Callable[[], Any], config: Any) -> None:
    engine, *_ = initialize(model=model, model_parameters=model.parameters(), config=config)
    for _ in range(NUM_STEPS * engine.gradient_accumulation_steps()):
        batch = _on(engine.device, make_batch())
        if isinstance(batch, Mapping):
            result = engine(**batch)
        else:
            result = engine(*batch) if isinstance(batch, (tuple, list)) else engine(batch)
        loss = getattr(result, "loss", None)
        if loss is None:
            loss = result[0] if isinstance(result, (tuple, list)) else result
        engine.backward(loss)
        engine.step()


def _on(device: torch.device, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: _on(device, one) for key, one in value.items()}
    return type(value)(_on(device, one) for one in value) if isinstance(value, (tuple, list)) else value


def _hosts(hosts: int | str) -> tuple[int, int]:
    number, by, slots = str(hosts).partition("x")
    if not by:
        number, slots = "1", number
    if not (number.isdecimal() and slots.isdecimal() and int(number) and int(slots)):
        raise ConfigError(f"plan(hosts={hosts!r}): give a number of ranks, or hosts x ranks such as '4x8'")
    return int(number), int(slots)


def _bytes(size: int | str) -> int:
    text = str(size).strip()
    digits = text.rstrip("BKMGTIbkmgti ")
    unit = _UNITS.get(text[len(digits) :].strip().upper())
    try:
        return int(float(digits) * unit) if unit else int("")
    except ValueError:
        raise ConfigError(f"plan(device_memory={size!r}): give bytes, or a size such as '24GB'") from None
