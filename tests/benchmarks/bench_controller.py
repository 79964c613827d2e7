"""What a host costs the launcher: the real controller and real frames, with 100 to 4,000 hosts that exist in memory only.

Run: python tests/benchmarks/bench_controller.py [--hosts 4000]       (nothing here fails on a number)

Each host has 8 workers that write 20 lines and end. What is measured is this process: CPU time and memory, in all and for
each host. Flat columns per host mean that the controller does O(1) work for each.
"""

from __future__ import annotations

import argparse
import gc
import io
import queue
import resource
import sys
import threading
import time
from pathlib import Path

from dslaunch.launcher.backends.bootstrap import agent_source
from dslaunch.launcher.controller.controller import Controller
from dslaunch.launcher.inputs.hostfile import Host
from dslaunch.launcher.inputs.selection import Selected
from dslaunch.launcher.job.plan import Endpoint, NodePlan, Plan, plan_nodes, plan_program
from dslaunch.launcher.output.console import Console
from dslaunch.launcher.wire.frames import (
    MAGIC,
    Decoder,
    Done,
    Exited,
    Frame,
    Hello,
    Listen,
    Listening,
    Output,
    Ping,
    Pong,
    Prepare,
    Reach,
    Reached,
    Ready,
    Start,
    Started,
    encode,
)

RANKS_PER_HOST = 8
LINES_PER_RANK = 20
SOURCE = agent_source()


class MemoryChannel:
    """A host that answers as an agent would, without a process or a socket. Made before the measurement begins."""

    local_address = "10.0.0.1"

    def __init__(self, node: NodePlan) -> None:
        self._node = node
        self._decoder = Decoder()
        self._num_source_bytes = len(SOURCE)
        self._answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._end = b"".join(
            encode(one) for one in self._whole_run()
        )  # now, for it is not the launcher's work
        hello = Hello(hostname=node.host.name, python="3", reached_at="10.0.0.2", num_devices=8, pid=1)
        self._answers.put(MAGIC + encode(hello))

    def read(self) -> bytes:
        return self._answers.get()

    def write(self, data: bytes) -> None:
        if self._num_source_bytes:
            self._num_source_bytes -= len(data)
            return
        for frame in self._decoder.feed(data):
            if isinstance(frame, Start):
                self._answers.put(self._end)
            else:
                answer = b"".join(encode(one) for one in self._answer(frame))
                self._answers.put(answer) if answer else None

    def error_text(self) -> str:
        return ""

    def exit_status(self) -> int | None:
        return None

    def close(self) -> None:
        self._answers.put(b"")

    def _answer(self, frame: Frame) -> list[Frame]:
        if isinstance(frame, Ping):
            return [Pong(frame.number, time.monotonic())]
        if isinstance(frame, Prepare):
            return [Ready(29500, [])]
        if isinstance(frame, Listen):
            return [Listening(29500, ["10.0.0.2"], "")]
        if isinstance(frame, Reach):
            return [Reached([""] * len(frame.addresses))]
        return []

    def _whole_run(self) -> list[Frame]:
        answers: list[Frame] = []
        for rank in self._node.ranks:
            answers.append(Started(rank.rank, 100 + rank.rank))
            answers += [Output(rank.rank, 1, f"step {line} loss 1.234\n") for line in range(LINES_PER_RANK)]
            answers.append(Exited(rank.rank, 0, 0, time.monotonic()))
        return [*answers, Done(0)]


def plan_of(num_hosts: int) -> Plan:
    devices = tuple(str(device) for device in range(RANKS_PER_HOST))
    hosts = tuple(
        Selected(host=Host(name=f"node{number:04}", slots=RANKS_PER_HOST), devices=devices)
        for number in range(num_hosts)
    )
    program = plan_program("train.py", ("--lr", "1e-3"), python=sys.executable)
    return Plan(
        nodes=plan_nodes(hosts, program, local_names=frozenset()),
        master=Endpoint(address=None, port=29500, is_port_fixed=False),
        program=program,
        cwd="/job",
        venv_script=None,
        environment=(),
        kill_grace_s=30.0,
        heartbeat_s=30.0,
    )


def resident_bytes() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * resource.getpagesize()


def run_once(num_hosts: int) -> tuple[float, float, float]:
    """(wall seconds, CPU seconds, bytes of memory gained at the most) of one job."""
    plan = plan_of(num_hosts)
    channels = [MemoryChannel(node) for node in plan.nodes]
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
    controller = Controller(plan, connect=lambda node: channels[node.node_rank], console=console)
    verdict = controller.run()
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
        f"{'hosts':>6} {'ranks':>7} {'wall':>9} {'CPU':>9} {'CPU/host':>11} {'memory':>10} {'memory/host':>12}"
    )
    for num_hosts in (count for count in (100, 300, 1000, 2000, 4000) if count <= args.hosts):
        wall, cpu, memory = run_once(num_hosts)
        print(
            f"{num_hosts:6} {num_hosts * RANKS_PER_HOST:7} {wall:7.2f} s {cpu:7.2f} s {cpu / num_hosts * 1e3:8.2f} ms "
            f"{memory / 2**20:6.1f} MiB {memory / num_hosts / 2**10:8.1f} KiB",
            flush=True,
        )


if __name__ == "__main__":
    main()
