"""Events of runs that never were, as dslaunch writes them: docs/design/events.md."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BEGAN_AT = 1_785_600_000.0  # seconds since the epoch
GIB = 1 << 30
Event = dict[str, Any]

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.0003, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "zero_optimization": {"stage": 3, "prefetch_bucket_size": 50000000, "overlap_comm": True},
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
}
PLAIN = ("step", "steps", "loss", "step_s", "forward_s", "backward_s", "comm_s", "mem_used", "mem_peak")
TRACEBACK = [
    "Traceback (most recent call last):",
    '  File "train.py", line 88, in <module>',
    "    loss = engine(batch)",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
]


class MadeRun:
    """A run of `num_hosts` hosts with `per_host` ranks each, that trains for `num_steps` steps of `step_s`.

    With two attempts the first one ends in the middle, by a rank that fails, and the second one runs on other
    hosts. `slow_rank` makes others wait for it. More than 64 ranks are folded, as a job does. `interval_s` is
    the time between two events with numbers; 0 lets it grow with the age, as --log_dir does. A plain one
    tells little, and nothing of its hosts.
    """

    def __init__(
        self,
        *,
        name: str = "train",
        num_hosts: int = 4,
        per_host: int = 8,
        num_steps: int = 2000,
        step_s: float = 0.5,
        interval_s: float = 2.0,
        num_attempts: int = 2,
        slow_rank: int | None = 5,
        has_gpus: bool = True,
        is_plain: bool = False,
        lr: float = 3e-4,
        seed: int = 1,
    ) -> None:
        self.name, self.num_hosts, self.per_host = name, num_hosts, per_host
        self.num_steps, self.step_s, self.interval_s = num_steps, step_s, interval_s
        self.num_attempts, self.has_gpus, self.lr = num_attempts, has_gpus, lr
        self.is_plain = is_plain
        self.slow_rank = slow_rank if slow_rank is not None and slow_rank < num_hosts * per_host else None
        self._random = random.Random(seed)

    def hosts(self, attempt: int) -> list[str]:
        """The host of the rank that failed is replaced by a spare."""
        names = [f"worker-{number + 1}" for number in range(self.num_hosts)]
        return names if attempt == 0 else [*names[:-1], "spare-1"]

    def events(self) -> Iterator[Event]:
        at = BEGAN_AT
        yield {
            "at": at,
            "event": "job",
            "name": self.name,
            "command": [
                "dslaunch",
                "-H",
                "hosts",
                "--max_restarts",
                "3",
                "--log_dir",
                "logs",
                f"{self.name}.py",
            ],
            "cwd": "/home/ada/model",
            "user": "ada",
            "host": "login-1",
            "version": "0.9.0",
            "launcher": "ssh",
        }
        done = 0
        for attempt in range(self.num_attempts):
            is_last = attempt == self.num_attempts - 1
            until = self.num_steps if is_last else self.num_steps // 2
            for event in self._attempt(attempt, at + 0.2, done, until, fails=not is_last):
                at = event["at"]
                yield event
            done = until - until % 10  # from the last checkpoint on
            at += 2.0
        yield {"at": at, "event": "end", "exit_code": 0, "duration_s": at - BEGAN_AT}

    def _attempt(self, attempt: int, at: float, first: int, last: int, *, fails: bool) -> Iterator[Event]:
        hosts = self.hosts(attempt)
        workers = [
            [host, node, node * self.per_host + local, local]
            for node, host in enumerate(hosts)
            for local in range(self.per_host)
        ]
        own: Event = {"attempt": attempt}
        began = at
        yield {
            "at": at,
            "event": "attempt",
            **own,
            "workers": workers,
            "log_folder": "/home/ada/model/logs/20260801-160000",
        }
        for phase, seconds in (
            *(("agent", 0.9), ("connected", 1.3), ("synced", 1.5), ("prepared", 2.2), ("reached", 2.6)),
            *(("started", 2.9), ("process group", 7.5), ("first collective", 9.1)),
        ):
            yield {"at": began + seconds, "event": "phase", **own, "phase": phase, "began_at": began}
        for host, _, rank, _ in workers[:64]:
            yield {
                "at": began + 2.9,
                "event": "started",
                **own,
                "rank": rank,
                "host": host,
                "pid": 4000 + int(rank),
            }
        yield {"at": began + 2.9, "event": "running", **own}
        yield {"at": began + 6.0, "event": "config", "rank": 0, "config": CONFIG}
        yield {
            "at": began + 3.0,
            "event": "note",
            "level": 20,
            "text": f"{len(workers)} workers run on {len(hosts)} hosts",
        }
        at, step = began + 10.0, first
        told = False
        while step < last:
            interval_s = self.interval_s or max(1.0, (at - BEGAN_AT) / 1000)
            num = max(1, round(interval_s / self.step_s))
            step = min(last, step + num)
            at += num * self.step_s
            yield self._metrics(attempt, at, step, num, workers)
            if not told and step > (first + last) // 2:
                told = True
                yield from self._in_the_middle(at, workers)
        if fails:
            yield from self._failure(attempt, at, began, workers)
        else:
            for host, _, rank, _ in workers[:64]:
                yield {"at": at, "event": "exited", **own, "rank": rank, "host": host, "code": 0, "signal": 0}
            ended = {"exit_code": 0, "culprit": None, "others": [], "interrupted_by": None, "change": None}
            yield {
                "at": at,
                "event": "verdict",
                **own,
                "number": attempt,
                "hosts": hosts,
                "duration_s": at - began,
                **ended,
                "phases_s": {"connected": 1.3, "started": 2.9},
                "decision": "",
            }

    def _in_the_middle(self, at: float, workers: list[list[Any]]) -> Iterator[Event]:
        if self.slow_rank is None:
            return
        host = next(one[0] for one in workers if one[2] == self.slow_rank)
        text = f"rank {self.slow_rank} on {host} computes 31 % of a step longer than others, which wait"
        straggler = {"rank": self.slow_rank, "host": host, "cause": "compute", "share": 0.31}
        yield {"at": at, "event": "straggler", **straggler, "text": text}
        yield {"at": at, "event": "note", "level": 30, "text": text}
        yield {
            "at": at + 0.1,
            "event": "stacks",
            "title": "no rank has written anything for 60 s; what they do:",
            "lines": ["rank 0, worker-1: all_reduce, collectives.py:120", "ranks 1-31: the same"],
        }
        report = '{"collective": "all_gather", "waited_s": 61.0, "missing": [5]}'
        yield {"at": at + 0.2, "event": "hang", "rank": 3, "report": report}

    def _failure(self, attempt: int, at: float, began: float, workers: list[list[Any]]) -> Iterator[Event]:
        host, _, rank, local_rank = workers[-1]
        yield {
            "at": at,
            "event": "exited",
            "attempt": attempt,
            "rank": rank,
            "host": host,
            "code": 1,
            "signal": 0,
        }
        culprit = {
            "kind": "rank",
            "rank": rank,
            "local_rank": local_rank,
            "host": host,
            "pid": 4000 + rank,
            "code": 1,
            "signal": 0,
            "at_s": 100.0,
            "place": "",
            "core_dumped": False,
            "is_out_of_memory": False,
            "evidence": ["the device had 1.2 GiB left of 79 GiB"],
            "message": "",
            "traceback": TRACEBACK,
            "last_lines": ["step 999 loss 3.21", "saving"],
            "last_lines_of": "stdout",
        }
        other = {
            **culprit,
            "rank": 0,
            "host": workers[0][0],
            "signal": 6,
            "signal_name": "SIGABRT (6)",
            "code": 134,
        }
        yield {
            "at": at + 0.1,
            "event": "note",
            "level": 40,
            "text": f"rank {rank} on {host} exited with code 1",
        }
        yield {
            "at": at + 1.0,
            "event": "verdict",
            "attempt": attempt,
            "number": attempt,
            "hosts": self.hosts(attempt),
            "duration_s": at + 1.0 - began,
            "exit_code": 1,
            "culprit": culprit,
            "others": [other],
            "interrupted_by": None,
            "change": None,
            "phases_s": {"connected": 1.3, "started": 2.9},
            "decision": f"starting again (1 of 3) without {host}, with spare-1 in its place",
        }

    def _metrics(self, attempt: int, at: float, step: int, num: int, workers: list[list[Any]]) -> Event:
        noise = self._random.gauss
        rows = {rank: self._row(step, num, rank) for _, _, rank, _ in workers}
        ranks: dict[str, Any] = {str(rank): row for rank, row in rows.items()}
        if len(workers) > 64:
            ranks = {}
            for host in dict.fromkeys(one[0] for one in workers):
                its_own = {one[2]: rows[one[2]] for one in workers if one[0] == host}
                ranks[f"{host} *"] = fold(its_own)
        hosts = {}
        for host in dict.fromkeys(one[0] for one in workers):
            facts: dict[str, Any] = {
                **{"cpu": min(1.0, abs(0.35 + noise(0, 0.05))), "cores": 96, "load1": 30 + noise(0, 2)},
                **{"mem_used": int(210 * GIB + noise(0, GIB)), "mem_total": 1024 * GIB},
                **{"net_in": int(3e9 + noise(0, 2e8)), "net_out": int(3e9 + noise(0, 2e8))},
                **{"disk_read": int(abs(noise(2e8, 5e7))), "disk_write": int(abs(noise(1e7, 5e6)))},
            }
            if self.has_gpus:
                facts["gpus"] = [
                    {
                        **{
                            "util": min(1.0, abs(0.93 + noise(0, 0.03))),
                            "mem_used": 61 * GIB,
                            "mem_total": 80 * GIB,
                        },
                        **{"power_w": 610 + noise(0, 20), "temp_c": 64 + noise(0, 2), "ecc": 0},
                    }
                    for _ in range(self.per_host)
                ]
            hosts[host] = facts
        lines = {str(rank): num for _, _, rank, _ in workers[:1]}
        return {
            "at": round(at, 3),
            "event": "metrics",
            "attempt": attempt,
            "ranks": ranks,
            "hosts": {} if self.is_plain else hosts,
            "lines": lines,
        }

    def _row(self, step: int, num: int, rank: int) -> dict[str, Any]:
        noise = self._random.gauss
        progress = step / self.num_steps
        is_slow = rank == self.slow_rank and progress > 0.4
        compute = 0.8 if not is_slow else 0.97
        step_s = num * self.step_s
        forward, backward = compute * 0.32 * step_s, compute * 0.60 * step_s
        optimizer, data = 0.03 * step_s, 0.01 * step_s
        loss: float | str = 1.8 + 9 * math.exp(-6 * progress) + noise(0, 0.03)
        if step % 996 == 0:
            loss = "nan"
        row = {
            **{"step": step, "steps": num, "samples": 256 * step, "tokens": 256 * 2048 * step, "loss": loss},
            **{"lr": self.lr * min(1.0, 20 * progress) * (0.1 + 0.9 * math.cos(progress * 1.5))},
            **{"grad_norm": abs(0.4 + 2 * math.exp(-8 * progress) + noise(0, 0.1)), "step_s": step_s},
            **{"forward_s": forward, "backward_s": backward, "optimizer_s": optimizer, "data_s": data},
            **{"comm_s": max(0.0, step_s - forward - backward - optimizer - data - 0.01 * step_s)},
            **{"mem_used": int(58 * GIB + noise(0, GIB)), "mem_peak": int(66 * GIB), "mem_total": 80 * GIB},
            **{"mem_parameters": 8 * GIB, "mem_gradients": 8 * GIB, "mem_optimizer": 24 * GIB},
            **{"mem_activations": int(14 * GIB)},
            "accuracy": 0.9 * (1 - math.exp(-4 * progress)),
        }
        return {name: value for name, value in row.items() if not self.is_plain or name in PLAIN}


def fold(rows: dict[int, dict[str, Any]]) -> dict[str, list[float]]:
    """As the agent of a host does: least, mean, greatest, and whose the first and the last are."""
    folded = {}
    for name in next(iter(rows.values())):
        column = [(row[name], rank) for rank, row in rows.items() if not isinstance(row[name], str)]
        if column:
            mean = sum(value for value, _ in column) / len(column)
            folded[name] = [min(column)[0], mean, max(column)[0], min(column)[1], max(column)[1]]
    return folded


def as_lines(events: Iterator[Event] | list[Event]) -> bytes:
    return b"".join(json.dumps(one, separators=(",", ":")).encode() + b"\n" for one in events)


def write_run(folder: Path, run: MadeRun) -> Path:
    """A folder as --log_dir makes it; returns its events."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "events.jsonl"
    path.write_bytes(as_lines(run.events()))
    return path
