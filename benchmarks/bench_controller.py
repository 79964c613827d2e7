"""Cost of a host for the launcher: the real controller and real frames,
with 100 to 4,000 hosts that exist in memory only.

Run: python benchmarks/bench_controller.py [--hosts 4000]       (nothing here fails on a number)

Each host has 8 workers that write 20 lines and end. This process is measured: CPU time and memory, in all and
for each host. Flat columns per host mean that the controller does O(1) work for each.
"""

from __future__ import annotations

import argparse
import gc
import io
import resource
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dslaunch.launcher.controller.controller import Controller
from dslaunch.launcher.job.plan import NodePlan
from dslaunch.launcher.output.console import Console
from dslaunch.launcher.wire.frames import Done, Exited, Frame, Output, Start, Started, encode
from tests.launcher.memory_host import MemoryHost, plan_of, way_to

RANKS_PER_HOST = 8
LINES_PER_RANK = 20


class MeasuredHost(MemoryHost):
    """Host that makes all its frames after the start before the measurement begins, and remembers no frame
    that it gets.
    """

    def __init__(self, node: NodePlan) -> None:
        super().__init__()
        self.heard = deque(maxlen=0)
        self._after_start = b"".join(encode(frame) for frame in whole_run(node))

    def _honest(self, frame: Frame) -> list[Frame | bytes]:
        return [self._after_start] if isinstance(frame, Start) else super()._honest(frame)


def whole_run(node: NodePlan) -> Iterator[Frame]:
    """Yield the frames of this host's agent, whose workers write their lines and end."""
    for rank in node.ranks:
        yield Started(rank.rank, 100 + rank.rank)
        for line in range(LINES_PER_RANK):
            yield Output(rank.rank, 1, f"step {line} loss 1.234\n")
        yield Exited(rank.rank, 0, 0, time.monotonic())
    yield Done(0)


def resident_bytes() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * resource.getpagesize()


def run_once(num_hosts: int) -> tuple[float, float, float]:
    """(wall seconds, CPU seconds, bytes of memory gained at the most) of one job."""
    plan = plan_of(num_hosts, slots=RANKS_PER_HOST, heartbeat_s=30.0, kill_grace_s=30.0)
    hosts = [MeasuredHost(node) for node in plan.nodes]
    gc.collect()
    memory, before = resident_bytes(), time.process_time()
    peak = memory
    is_over = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not is_over.wait(0.02):
            peak = max(peak, resident_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    out = io.BytesIO()
    console = Console(log_level="info", out=out, err=io.BytesIO())
    verdict = Controller(plan, connect=way_to(hosts), console=console).run()
    console.drain()
    wall = time.perf_counter() - began
    is_over.set()
    watcher.join()
    num_lines = out.getvalue().count(b"\n")
    if verdict.exit_code or num_lines != num_hosts * RANKS_PER_HOST * LINES_PER_RANK:
        raise AssertionError(f"exit code {verdict.exit_code}, {num_lines} lines: {verdict}")
    return wall, time.process_time() - before, max(0.0, peak - memory - len(out.getvalue()))


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU and memory of the controller for each host.")
    parser.add_argument("--hosts", type=int, default=4000)
    args = parser.parse_args()
    run_once(10)  # imports and first allocations
    print(
        f"{'hosts':>6} {'ranks':>7} {'wall':>9} {'CPU':>9} {'CPU/host':>11} "
        f"{'memory':>10} {'memory/host':>12}"
    )
    for num_hosts in (count for count in (100, 300, 1000, 2000, 4000) if count <= args.hosts):
        wall, cpu, memory = run_once(num_hosts)
        print(
            f"{num_hosts:6} {num_hosts * RANKS_PER_HOST:7} {wall:7.2f} s {cpu:7.2f} s "
            f"{cpu / num_hosts * 1e3:8.2f} ms {memory / 2**20:6.1f} MiB "
            f"{memory / num_hosts / 2**10:8.1f} KiB",
            flush=True,
        )


if __name__ == "__main__":
    main()
