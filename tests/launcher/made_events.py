"""Events of jobs that never ran, as a launcher would have written them: docs/design/events.md."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dslaunch.launcher.job.verdict import RankFailure, Verdict
from dslaunch.launcher.node.observe.metrics import add_own_time, fold

Event = dict[str, Any]
BEGAN_AT = 1_785_600_000.0  # seconds since the epoch
GIB = 1 << 30
PHASES = ("agent", "connected", "synced", "prepared", "reached", "started", "process group")
PHASE_S, RUNNING_S, FIRST_STEP_S = 0.5, 3.0, 4.0  # from the start of an attempt
MAX_UNFOLDED = 64  # ranks
SAVES_S = 5.0
PLAIN = ("step", "steps", "loss", "step_s", "forward_s", "backward_s", "comm_s", "mem_used", "mem_peak")
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.0003, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "zero_optimization": {"stage": 3, "prefetch_bucket_size": 50000000, "overlap_comm": True},
    "bf16": {"enabled": True},
}
OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
TRACEBACK = (
    "Traceback (most recent call last):",
    '  File "train.py", line 88, in <module>',
    "    loss = engine(batch)",
    OUT_OF_MEMORY,
)


@dataclass(frozen=True, kw_only=True)
class Made:
    """One run. Times are seconds from the start of the job.

    `fails_at`: when the last rank fails, and the job starts again with a spare in place of its host.
    `hangs_at`: from then on no step is done. `straggler`: a rank that others wait for, which is said in the
    middle of an attempt; then stacks are asked for, too. `exit_code` None: the job goes on. `interval_s`:
    from one event with numbers to the next; 0: it grows with the age of the job, as --log_dir has it. A plain
    run tells little, and nothing of its hosts; one without numbers only lines of output.
    """

    name: str = "pretrain"
    num_hosts: int = 4
    slots: int = 8
    duration_s: float = 120.0
    began_at: float = BEGAN_AT
    fails_at: tuple[float, ...] = ()
    hangs_at: float = math.inf
    saves_at: float = math.inf
    straggler: int | None = None
    cause: str = "compute"
    has_gpus: bool = True
    has_numbers: bool = True
    is_plain: bool = False
    total_steps: int = 0
    exit_code: int | None = None
    step_s: float = 0.4
    interval_s: float = 1.0
    lr: float = 3e-4
    seed: int = 0

    def hosts(self, attempt: int = 0) -> list[str]:
        names = [f"gpu{number:02}" for number in range(1, self.num_hosts + 1)]
        return names if attempt == 0 else [*names[:-1], f"spare-{attempt}"]

    def workers(self, attempt: int = 0) -> list[tuple[str, int, int, int]]:
        return [
            (host, node, node * self.slots + local, local)
            for node, host in enumerate(self.hosts(attempt))
            for local in range(self.slots)
        ]


def events_of(made: Made) -> Iterator[Event]:
    """All events of the run, in order."""
    command = ["dslaunch", "-H", "hosts", "--max_restarts", "3", "train.py", "--config", "7b.yaml"]
    job = {"name": made.name, "command": command, "cwd": "/home/ada/work", "user": "ada", "host": "head"}
    yield {"at": made.began_at, "event": "job", **job, "version": "0.1.0", "launcher": "ssh"}
    yield _note(made.began_at, 20, f"{made.num_hosts} hosts, {len(made.workers())} ranks")
    ends = [*(one for one in made.fails_at if one < made.duration_s), made.duration_s]
    begins, step, chance = 0.0, 0, random.Random(made.seed)
    for number, ends_at in enumerate(ends):
        for event in _attempt(made, number, begins, ends_at, step, chance):
            step = event.pop("reached", step)
            yield event
        if number < len(ends) - 1:
            yield from _failure(made, number, begins, ends_at)
            step -= step % 10  # of the last checkpoint
        begins = ends_at + 2.0
    if made.exit_code is not None:
        at = made.began_at + made.duration_s
        for host, _, rank, _ in made.workers(len(ends) - 1):
            yield _exit(at, len(ends) - 1, host, rank, made.exit_code)
        yield _verdict(made, len(ends) - 1, at, 60.0, exit_code=made.exit_code)
        yield {"at": at, "event": "end", "exit_code": made.exit_code, "duration_s": made.duration_s}


def _note(at: float, level: int, text: str) -> Event:
    return {"at": round(at, 3), "event": "note", "level": level, "text": text}


def _attempt(
    made: Made, number: int, begins: float, ends: float, step: int, chance: random.Random
) -> Iterator[Event]:
    began_at, own = made.began_at + begins, {"attempt": number}
    workers = made.workers(number)
    yield {
        "at": began_at,
        "event": "attempt",
        **own,
        "workers": [list(one) for one in workers],
        "log_folder": "",
    }
    for place, phase in enumerate(PHASES):
        if phase == "process group":
            for host, _, rank, _ in workers:
                started = {"rank": rank, "host": host, "pid": 4000 + rank}
                yield {"at": began_at + RUNNING_S, "event": "started", **own, **started}
            yield {"at": began_at + RUNNING_S, "event": "running", **own}
            yield _note(began_at + RUNNING_S, 20, f"all {len(workers)} workers run")
        yield {"at": began_at + PHASE_S * (place + 1), "event": "phase", **own, "phase": phase}
    if made.has_numbers:
        yield {"at": began_at + FIRST_STEP_S, "event": "config", "rank": 0, "config": CONFIG}
    second, has_told, has_hung = begins + FIRST_STEP_S, False, False
    while True:
        interval_s = made.interval_s or max(1.0, second / 1000)
        num_steps = max(1, round(interval_s / made.step_s))
        second += num_steps * made.step_s
        if second >= ends:
            return
        now, is_saving = made.began_at + second, 0 <= second - made.saves_at < SAVES_S
        is_hanging = second >= made.hangs_at
        num_steps = 0 if is_hanging or is_saving else num_steps
        step += num_steps
        yield {**_metrics(made, number, now, step, num_steps, chance, is_saving=is_saving), "reached": step}
        if is_hanging and not has_hung:
            has_hung = True
            yield {"at": now, "event": "hang", "rank": 3, "report": "all_reduce of 4.2 MB waits for rank 5"}
            yield _note(now, 30, "warning: a collective takes longer than 60 s: rank 3 waits for rank 5")
        if made.straggler is not None and not has_told and second > (begins + ends) / 2:
            has_told = True
            yield straggler_of(made, now, number)
            title = "no rank has written anything for 60 s; what they do:"
            yield {"at": now, "event": "stacks", "title": title, "lines": ["ranks 0-31: all_reduce"]}


def straggler_of(made: Made, now: float, attempt: int = 0) -> Event:
    """What is said of the rank that others wait for."""
    rank, ms = made.straggler or 0, 1000 * made.step_s
    host = made.workers(attempt)[rank][0]
    why = {
        "data": f"its data take {0.24 * ms:.0f} ms a step, those of others {0.02 * ms:.0f} ms",
        "compute": f"it computes for {0.9 * ms:.0f} ms a step, others {0.7 * ms:.0f} ms",
    }[made.cause]
    who = f"rank {rank} on {host} holds up the others by {0.22 * ms:.0f} ms in each step of {ms:.0f} ms, 22 %"
    event = {"at": now, "event": "straggler", "rank": rank, "host": host}
    return {**event, "cause": made.cause, "share": 0.22, "text": f"{who}: {why}"}


def _metrics(
    made: Made,
    attempt: int,
    now: float,
    step: int,
    num_steps: int,
    chance: random.Random,
    *,
    is_saving: bool,
) -> Event:
    workers = made.workers(attempt)
    rows = {rank: _row(made, rank, step, num_steps, chance) for _, _, rank, _ in workers}
    if is_saving:
        rows = {rank: {**row, "state": "saving"} for rank, row in rows.items()}
    ranks: dict[str, Any] = {str(rank): row for rank, row in rows.items()}
    if len(rows) > MAX_UNFOLDED:
        add_own_time(rows)
        ranks = {
            f"{host} *": fold({one[2]: rows[one[2]] for one in workers if one[0] == host})
            for host in made.hosts(attempt)
        }
    return {
        "at": round(now, 3),
        "event": "metrics",
        "attempt": attempt,
        "ranks": ranks if made.has_numbers else {},
        "hosts": {} if made.is_plain else {host: _host(made, chance) for host in made.hosts(attempt)},
        "lines": {str(rank): 2 for _, _, rank, local in workers if local == 0},
    }


def _row(made: Made, rank: int, step: int, num_steps: int, chance: random.Random) -> dict[str, Any]:
    row: dict[str, Any] = {
        **{"mem_used": int((52 + 6 * chance.random()) * GIB), "mem_peak": 66 * GIB, "mem_total": 80 * GIB},
        **{"mem_parameters": 8 * GIB, "mem_gradients": 8 * GIB, "mem_optimizer": 24 * GIB},
    }
    if num_steps:
        is_slow = rank == made.straggler
        forward, backward = (0.26, 0.56) if is_slow and made.cause == "compute" else (0.2, 0.42)
        data = 0.24 if is_slow and made.cause == "data" else 0.02
        took_s, loss = (
            num_steps * made.step_s,
            round(2.1 + 6 * math.exp(-step / 180) + 0.04 * chance.random(), 4),
        )
        shares = {"forward_s": forward, "backward_s": backward, "optimizer_s": 0.08, "data_s": data}
        row |= {
            **{"step": step, "steps": num_steps, "samples": step * 512, "tokens": step * 512 * 2048},
            **{"loss": "nan" if step % 996 == 0 else loss, "lr": made.lr * min(1.0, step / 100)},
            **{"grad_norm": round(0.8 + 0.2 * chance.random(), 4), "step_s": took_s},
            **{name: took_s * share for name, share in shares.items()},
            **{
                "comm_s": took_s * (0.98 - sum(shares.values())),
                "accuracy": 0.9 * (1 - math.exp(-step / 50)),
            },
        }
    if made.total_steps:
        row["total_steps"] = made.total_steps
    return {name: value for name, value in row.items() if not made.is_plain or name in PLAIN}


def _host(made: Made, chance: random.Random) -> dict[str, Any]:
    row: dict[str, Any] = {
        **{"cpu": round(0.3 + 0.1 * chance.random(), 3), "cores": 96, "load1": 30.5},
        **{"mem_used": 310 * GIB, "mem_total": 1007 * GIB},
        **{"net_in": int(2e9 + 1e8 * chance.random()), "net_out": int(2e9 + 1e8 * chance.random())},
        **{"disk_read": int(3e8 * chance.random()), "disk_write": 0},
    }
    if made.has_gpus:
        gpu = {"mem_used": 58 * GIB, "mem_total": 80 * GIB, "temp_c": 64, "ecc": 0}
        row["gpus"] = [
            {"util": round(0.9 + 0.1 * chance.random(), 2), "power_w": 600 + chance.randrange(80), **gpu}
            for _ in range(made.slots)
        ]
    return row


def _exit(at: float, attempt: int, host: str, rank: int, code: int, signal: int = 0) -> Event:
    own = {"attempt": attempt, "rank": rank, "host": host, "code": code, "signal": signal}
    return {"at": at, "event": "exited", **own}


def _failure(made: Made, number: int, begins: float, second: float) -> Iterator[Event]:
    at, workers = made.began_at + second, made.workers(number)
    host, _, rank, local_rank = workers[-1]
    culprit = RankFailure(
        **{"rank": rank, "local_rank": local_rank, "host": host, "pid": 4000 + rank, "code": 1},
        signal=0,
        at_s=100.0,
        evidence=("the device had 1.2 GiB left of 79 GiB",),
        traceback=TRACEBACK,
        last_lines=("step 999 loss 3.21", "saving"),
    )
    other = culprit._replace(rank=0, local_rank=0, host=workers[0][0], pid=4000, code=134, signal=6)
    yield _exit(at, number, host, rank, 1)
    yield _note(at, 40, f"{culprit.describe()}; it failed first")
    for its_host, _, one, _ in workers[:-1]:
        yield _exit(at + 1, number, its_host, one, 143, 15)
    decision = f"starting again ({number + 1} of 3) without {host}, with spare-{number + 1} in its place"
    yield _verdict(made, number, at + 1, second + 1 - begins, culprit, (other,), decision=decision)
    yield _note(at + 1, 30, decision)


def _verdict(
    made: Made,
    number: int,
    at: float,
    duration_s: float,
    culprit: RankFailure | None = None,
    others: tuple[RankFailure, ...] = (),
    *,
    decision: str = "",
    exit_code: int = 1,
) -> Event:
    phases = (("connected", 1.3), ("started", 2.9))
    verdict = Verdict(culprit=culprit, others=others, interrupted_by=None, phases_s=phases).to_dict()
    own = {"attempt": number, "number": number, "hosts": made.hosts(number), "duration_s": duration_s}
    more = {"exit_code": exit_code, "decision": decision}
    return {"at": at, "event": "verdict", **own, **json.loads(json.dumps(verdict)), **more}


def as_lines(events: Iterable[Event]) -> bytes:
    """As they stand in a file."""
    return b"".join(json.dumps(one, separators=(",", ":")).encode() + b"\n" for one in events)


def write_events(path: Path, made: Made) -> Path:
    """The run's events as a file, in a folder that is made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(as_lines(events_of(made)))
    return path
