"""Rate at which the right rank or link is named, and at which one is named where all is well.

    python benchmarks/bench_stragglers.py [--runs 20] [--labs 3] [--kinds compute data link none]
                                                [--engine]

Real jobs of three ranks on three hosts of labs, which average real gradients over gloo; in each run another
rank is slowed by 30 %: its computing, its data, or the link of its host, outgoing or incoming. With --engine
they train with an engine, in steps of 30 ms, of which it times some; then not over slow links. Needs root.
"""

from __future__ import annotations

import argparse
import json
import queue
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.lab import Lab
from tests.launcher.command import Command

WORKER = Path(__file__).parent / "straggler_worker.py"
KINDS = ("compute", "data", "link", "none")
NUM_HOSTS = 3
SECONDS = 40.0  # time of training: the window, the time until it is full, and some more
LIMIT_S = 400.0
LINK_MBIT = 700.0  # 53 Mbit of a step take 76 ms, of 100 ms without network


class Run(NamedTuple):
    """One job, the rank or link to be named, and the named one."""

    kind: str
    number: int
    expected: tuple[tuple[int, str, str], ...]
    named: tuple[tuple[int, str, str], ...]
    texts: tuple[str, ...]
    err: str
    step_s: float

    @property
    def is_right(self) -> bool:
        return self.named == self.expected


def run_job(
    lab: Lab,
    kind: str,
    number: int,
    *,
    seconds: float = SECONDS,
    mbit: float = LINK_MBIT,
    has_engine: bool = False,
) -> Run:
    """Train on the first hosts of the lab; return the ranks or links that were named."""
    rank = number % NUM_HOSTS
    node = lab.nodes[rank]
    folder = lab.shared / f"{kind}-{number}"
    folder.mkdir()
    (folder / "hosts").write_text("".join(f"{one.name} slots=1\n" for one in lab.nodes[:NUM_HOSTS]))
    if kind == "link" and number // NUM_HOSTS % 2:
        node.receive_slowly(mbit)
    elif kind == "link":
        node.slow_down(mbit)
    try:
        words = ("-H", "hosts", "--events", "events", "--no_local_rank")
        command = Command(
            lab.head,
            folder,
            *words,
            *(str(WORKER), f"{seconds:g}", kind, str(rank), *(["engine"] if has_engine else [])),
            env={"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"},
        )
        code = command.wait(LIMIT_S)
    finally:
        node.end_slowness()
    if code:
        raise SystemExit(f"{kind} {number} ended with code {code}:\n{command.out}\n{command.err}")
    events = [json.loads(line) for line in (folder / "events").read_text().splitlines()]
    said = [one for one in events if one["event"] == "straggler"]
    return Run(
        kind=kind,
        number=number,
        expected=() if kind == "none" else ((rank, node.name, kind),),
        named=tuple((one["rank"], one["host"], one["cause"]) for one in said),
        texts=tuple(one["text"] for one in said),
        err=command.err,
        step_s=step_of(events),
    )


def step_of(events: Sequence[dict[str, Any]]) -> float:
    """Return the mean time of a step over all ranks."""
    rows = [row for one in events if one["event"] == "metrics" for row in one["ranks"].values()]
    steps = sum(row.get("steps", 0) for row in rows)
    return sum(row.get("step_s", 0.0) for row in rows) / steps if steps else 0.0


def main() -> None:
    """Run all and print the score."""
    parser = argparse.ArgumentParser(description="How often stragglers are named right.")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--labs", type=int, default=3, help="so many jobs run at the same time")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--engine", action="store_true", help="train with one, in short steps")
    options = parser.parse_args()
    kinds = [kind for kind in options.kinds if kind != "link" or not options.engine]
    left: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
    for number in range(options.runs):
        for kind in kinds:
            left.put((kind, number))
    runs: list[Run] = []

    def work(place: int) -> None:
        with Lab.up(NUM_HOSTS, name=f"stragglers{place}") as lab:
            while True:
                try:
                    kind, number = left.get_nowait()
                except queue.Empty:
                    return
                one = run_job(lab, kind, number, has_engine=options.engine)
                runs.append(one)
                mark = "right" if one.is_right else f"WRONG, expected {one.expected}"
                print(f"{kind} {number}: {mark}; step {one.step_s:.3f} s; {list(one.texts)}", flush=True)

    threads = [threading.Thread(target=work, args=(place,)) for place in range(options.labs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for kind in kinds:
        of_kind = [one for one in runs if one.kind == kind]
        right = sum(one.is_right for one in of_kind)
        what = "with no name" if kind == "none" else "named right"
        mean_s = sum(one.step_s for one in of_kind) / max(1, len(of_kind))
        print(f"{kind}: {right} of {len(of_kind)} {what}, steps of {1000 * mean_s:.0f} ms")


if __name__ == "__main__":
    main()
