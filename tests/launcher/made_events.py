"""Events of jobs that never ran, as a launcher would have written them: docs/design/events.md."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Event = dict[str, Any]
BEGAN_AT = 1_790_000_000.0
PHASES = ("agent", "connected", "synced", "prepared", "reached", "started")
GIB = 1 << 30
MAX_UNFOLDED = 64  # ranks


@dataclass(frozen=True, kw_only=True)
class Made:
    """One run. Times are seconds from the start of the job; `fails_at`: when a rank fails, and the job starts
    again; `hangs_at`: from then on no step is done.
    """

    num_hosts: int = 4
    slots: int = 8
    duration_s: float = 120.0
    began_at: float = BEGAN_AT
    fails_at: tuple[float, ...] = ()
    hangs_at: float = math.inf
    straggler: int | None = None
    cause: str = "compute"
    is_said: bool = False  # by an event
    has_gpus: bool = True
    has_numbers: bool = True  # else lines of output only
    saves_at: float = math.inf
    total_steps: int = 0
    exit_code: int | None = None  # None: it goes on
    step_s: float = 0.4
    seed: int = 0

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(f"gpu{number:02}" for number in range(1, self.num_hosts + 1))

    @property
    def workers(self) -> list[list[Any]]:
        return [
            [host, node, node * self.slots + local, local]
            for node, host in enumerate(self.hosts)
            for local in range(self.slots)
        ]


def events_of(made: Made) -> Iterator[Event]:
    """All events of the run, in order."""
    chance = random.Random(made.seed)
    yield {
        "at": made.began_at,
        "event": "job",
        "name": "pretrain",
        "command": ["dslaunch", "-H", "hosts", "--max_restarts", "3", "train.py", "--config", "7b.yaml"],
        "cwd": "/home/ada/work",
        "user": "ada",
        "host": "head",
        "version": "0.1.0",
        "launcher": "ssh",
    }
    yield _note(made.began_at, 20, f"{made.num_hosts} hosts, {len(made.workers)} ranks")
    ends = [*(one for one in made.fails_at if one < made.duration_s), made.duration_s]
    begins = 0.0
    step = 0
    for number, ends_at in enumerate(ends):
        is_last = number == len(ends) - 1
        for event in _attempt(made, number, begins, ends_at, step, chance):
            step = max([step, *(one["step"] for one in event.get("ranks", {}).values() if _has_step(one))])
            yield event
        if not is_last:
            yield from _failure(made, number, ends_at)
            step = step // 100 * 100  # the last checkpoint
        begins = ends_at + 2.0
    if made.exit_code is not None:
        at = made.began_at + made.duration_s
        for _, _, rank, _ in made.workers:
            yield {"at": at, "event": "exited", "attempt": len(ends) - 1, **_exit(made, rank, made.exit_code)}
        yield _verdict(made, len(ends) - 1, at, made.exit_code, None)
        yield {"at": at, "event": "end", "exit_code": made.exit_code, "duration_s": made.duration_s}


def _has_step(row: dict[str, Any]) -> bool:
    return isinstance(row.get("step"), int)


def _note(at: float, level: int, text: str) -> Event:
    return {"at": round(at, 3), "event": "note", "level": level, "text": text}


def _attempt(
    made: Made, number: int, begins: float, ends: float, step: int, chance: random.Random
) -> Iterator[Event]:
    at = made.began_at + begins
    yield {"at": at, "event": "attempt", "attempt": number, "workers": made.workers, "log_folder": ""}
    for phase in PHASES:
        began_at, at = at, at + 0.3 + 0.4 * chance.random()
        yield {"at": at, "event": "phase", "attempt": number, "phase": phase, "began_at": began_at}
    for host, _, rank, _ in made.workers:
        yield {
            "at": at,
            "event": "started",
            "attempt": number,
            "rank": rank,
            "host": host,
            "pid": 4000 + rank,
        }
    yield {"at": at, "event": "running", "attempt": number}
    yield _note(at, 20, f"all {len(made.workers)} workers run")
    if made.has_numbers:
        yield {"at": at, "event": "config", "rank": 0, "config": {"zero_optimization": {"stage": 3}}}
    has_said = False
    second = math.ceil(at - made.began_at) + 2
    while second < ends:
        now = made.began_at + second
        num_steps = 0 if second >= made.hangs_at else max(1, round(1 / made.step_s))
        if made.saves_at <= second < made.saves_at + 5:
            num_steps = 0
        step += num_steps
        yield _metrics(made, number, now, second, step, num_steps, chance)
        if made.is_said and not has_said and made.straggler is not None and second > begins + 30:
            has_said = True
            yield _straggler(made, now)
        if made.hangs_at <= second < made.hangs_at + 1:
            yield {"at": now, "event": "hang", "rank": 3, "report": "all_reduce of 4.2 MB waits for rank 5"}
            yield _note(now, 30, "warning: a collective takes longer than 60 s: rank 3 waits for rank 5")
        second += 1


def _straggler(made: Made, now: float) -> Event:
    host = made.hosts[(made.straggler or 0) // made.slots]
    ms = 1000 * made.step_s
    why = {
        "data": f"its data take {0.24 * ms:.0f} ms a step, those of others {0.02 * ms:.0f} ms",
        "compute": f"it computes for {0.9 * ms:.0f} ms a step, others {0.7 * ms:.0f} ms",
    }[made.cause]
    text = (
        f"rank {made.straggler} on {host} holds up the others by {0.22 * ms:.0f} ms in each step of "
        f"{ms:.0f} ms, 22 %: {why}"
    )
    event = {"at": now, "event": "straggler", "rank": made.straggler, "host": host}
    return {**event, "cause": made.cause, "share": 0.22, "text": text}


def _metrics(
    made: Made, attempt: int, now: float, second: float, step: int, num_steps: int, chance: random.Random
) -> Event:
    event: Event = {"at": round(now, 3), "event": "metrics", "attempt": attempt, "ranks": {}, "lines": {}}
    if made.has_numbers:
        rows = {rank: _row(made, rank, step, num_steps, second, chance) for _, _, rank, _ in made.workers}
        if len(rows) > MAX_UNFOLDED:
            by_host: dict[str, dict[int, Event]] = {}
            for host, _, rank, _ in made.workers:
                by_host.setdefault(f"{host} *", {})[rank] = rows[rank]
            event["ranks"] = {host: _folded(one) for host, one in by_host.items()}
        else:
            event["ranks"] = {str(rank): row for rank, row in rows.items()}
    event["hosts"] = {host: _host(made, chance) for host in made.hosts}
    event["lines"] = {str(rank): chance.randrange(1, 4) for _, _, rank, _ in made.workers[:: made.slots]}
    return event


def _row(
    made: Made, rank: int, step: int, num_steps: int, second: float, chance: random.Random
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "mem_used": int((52 + 6 * chance.random()) * GIB),
        "mem_peak": 66 * GIB,
        "mem_total": 80 * GIB,
    }
    if made.saves_at <= second < made.saves_at + 5:
        row["state"] = "saving"
    if not num_steps:
        return row
    is_straggler = rank == made.straggler
    took = num_steps * made.step_s
    forward, backward, optimizer, data = 0.2, 0.42, 0.08, 0.02
    if made.straggler is not None and is_straggler and made.cause == "compute":
        forward, backward = 0.26, 0.56
    if made.straggler is not None and is_straggler and made.cause == "data":
        data = 0.24
    comm = max(0.01, 0.97 - forward - backward - optimizer - data) + 0.01 * chance.random()
    noise = 1 + 0.02 * chance.random()
    row.update(
        step=step,
        steps=num_steps,
        samples=step * 512,
        tokens=step * 512 * 2048,
        loss=round(2.1 + 6 * math.exp(-step / 180) + 0.04 * chance.random(), 4),
        lr=3e-4 * min(1.0, step / 100),
        grad_norm=round(0.8 + 0.2 * chance.random(), 4),
        step_s=round(took, 4),
        forward_s=round(took * forward * noise, 4),
        backward_s=round(took * backward, 4),
        optimizer_s=round(took * optimizer, 4),
        comm_s=round(took * comm, 4),
        data_s=round(took * data, 4),
    )
    if made.total_steps:
        row["total_steps"] = made.total_steps
    return row


def _folded(rows: dict[int, Event]) -> dict[str, list[float]]:
    rows = {
        rank: {**row, "own_s": row["step_s"] - row["comm_s"]} if "step_s" in row else row
        for rank, row in rows.items()
    }
    names = {name for row in rows.values() for name, one in row.items() if not isinstance(one, str)}
    found = {}
    for name in sorted(names):
        told = sorted((row[name], rank) for rank, row in rows.items() if name in row)
        mean = sum(value for value, _ in told) / len(told)
        found[name] = [told[0][0], mean, told[-1][0], told[0][1], told[-1][1]]
    return found


def _host(made: Made, chance: random.Random) -> dict[str, Any]:
    row: dict[str, Any] = {
        "cpu": round(0.3 + 0.1 * chance.random(), 3),
        "cores": 96,
        "load1": 30.5,
        "mem_used": 310 * GIB,
        "mem_total": 1007 * GIB,
        "net_in": int(2e9 + 1e8 * chance.random()),
        "net_out": int(2e9 + 1e8 * chance.random()),
        "disk_read": int(3e8 * chance.random()),
        "disk_write": 0,
    }
    if made.has_gpus:
        gpu = {"mem_used": 58 * GIB, "mem_total": 80 * GIB, "temp_c": 64, "ecc": 0}
        row["gpus"] = [
            {"util": round(0.9 + 0.1 * chance.random(), 2), "power_w": 600 + chance.randrange(80), **gpu}
            for _ in range(made.slots)
        ]
    return row


def _exit(made: Made, rank: int, code: int, signal: int = 0) -> dict[str, Any]:
    return {"rank": rank, "host": made.hosts[rank // made.slots], "code": code, "signal": signal}


def _failure(made: Made, number: int, second: float) -> Iterator[Event]:
    at = made.began_at + second
    rank = min(9, len(made.workers) - 1)
    host = made.hosts[rank // made.slots]
    culprit = {
        "kind": "rank",
        "rank": rank,
        "local_rank": rank % made.slots,
        "host": host,
        "pid": 4000 + rank,
        "code": 1,
        "signal": 0,
        "place": "",
        "core_dumped": False,
        "is_out_of_memory": False,
        "evidence": [],
        "message": "",
        "traceback": [
            "Traceback (most recent call last):",
            "RuntimeError: CUDA error: unspecified launch failure",
        ],
        "last_lines": ["RuntimeError: CUDA error: unspecified launch failure"],
        "last_lines_of": "stderr",
        "at_s": 1234.5,
    }
    yield {"at": at, "event": "exited", "attempt": number, **_exit(made, rank, 1)}
    yield _note(at, 40, f"rank {rank} on {host} (pid {4000 + rank}) ended with exit code 1")
    for one in range(len(made.workers)):
        if one != rank:
            yield {"at": at + 1, "event": "exited", "attempt": number, **_exit(made, one, 143, 15)}
    yield _verdict(made, number, at + 1, 1, culprit, f"restart {number + 1} of 3: from the last checkpoint")
    yield _note(at + 1, 30, f"restart {number + 1} of 3: from the last checkpoint")


def _verdict(
    made: Made, number: int, at: float, code: int, culprit: Event | None, decision: str = ""
) -> Event:
    return {
        "at": at,
        "event": "verdict",
        "attempt": number,
        "number": number,
        "hosts": list(made.hosts),
        "duration_s": 60.0,
        "exit_code": code,
        "culprit": culprit,
        "others": [],
        "interrupted_by": None,
        "change": None,
        "phases_s": {},
        "decision": decision,
    }


def write_events(path: Path, made: Made) -> Path:
    """The run's events as a file."""
    path.write_text("".join(json.dumps(one, separators=(",", ":")) + "\n" for one in events_of(made)))
    return path
