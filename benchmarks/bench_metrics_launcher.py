"""Cost of a large job's numbers for its launcher: real frames, the real stream of events, all its files,
and an endpoint that Prometheus asks, with hosts that exist in memory only.

Run: python benchmarks/bench_metrics_launcher.py [--hosts 64]       (nothing here fails on a number)

Each host has 8 ranks and 8 GPUs. Its frame is made as its agent makes it: ranks folded into least, mean and
greatest in a job of more than 64 ranks. What is measured is the CPU time of this process for one interval of
all hosts, as percent of one core at one interval a second.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dslaunch.launcher.inputs.line_prefix import Origin
from dslaunch.launcher.job.plan import MOST_SINGLE_RANKS
from dslaunch.launcher.node.observe.metrics import fold
from dslaunch.launcher.output.event_files import EventRing, keep_events, write_events
from dslaunch.launcher.output.prometheus import open_endpoint
from dslaunch.launcher.telemetry.telemetry import Telemetry
from dslaunch.launcher.wire.frames import Decoder, Metrics, encode

RANKS_PER_HOST = 8
NUMBERS = (
    *("step", "samples", "tokens", "loss", "lr", "grad_norm", "loss_scale", "skipped", "steps", "step_s"),
    *("forward_s", "backward_s", "optimizer_s", "comm_s", "data_s", "mem_used", "mem_peak", "mem_total"),
    *("mem_parameters", "mem_gradients", "mem_optimizer", "mem_activations", "mem_other", "accuracy"),
)
NAMES_OF_HOST = (
    "cpu",
    "cores",
    "load1",
    "mem_used",
    "mem_total",
    "net_in",
    "net_out",
    "disk_read",
    "disk_write",
)
NAMES_OF_GPU = ("util", "mem_used", "mem_total", "power_w", "temp_c", "ecc")
WARM_UP = 5


def frame_of(host: int, interval: int, *, is_folded: bool) -> bytes:
    """Return the frame that this host's agent sends."""
    rows = {
        RANKS_PER_HOST * host + local: {
            name: value_of(name, interval + place + local) for place, name in enumerate(NUMBERS)
        }
        for local in range(RANKS_PER_HOST)
    }
    ranks = {"*": fold(rows)} if is_folded else {str(rank): row for rank, row in rows.items()}
    numbers = {name: 0.31 * interval + place for place, name in enumerate(NAMES_OF_HOST)}
    gpus = [{name: 0.77 * interval + place for place, name in enumerate(NAMES_OF_GPU)} for _ in range(8)]
    return encode(Metrics(float(interval), ranks, {**numbers, "gpus": gpus}))


def value_of(name: str, number: int) -> float:
    """Counts and bytes are whole numbers."""
    is_whole = name.startswith("mem_") or name in ("step", "samples", "tokens", "skipped", "steps")
    return 1024 * number if is_whole else 0.137 * number


def fail(problem: str) -> None:
    raise AssertionError(problem)


Sinks = dict[str, Callable[[Telemetry, Path], object]]
SINKS: Sinks = {
    "frames and telemetry": lambda telemetry, folder: None,
    "the job's own record": lambda telemetry, folder: telemetry.add(
        EventRing(folder / "ring", max_bytes=8 << 20, opening=lambda: telemetry.opening, on_problem=fail)
    ),
    "--log_dir": lambda telemetry, folder: keep_events(telemetry, folder, on_problem=fail),
    "--events": lambda telemetry, folder: write_events(telemetry, folder / "events", on_problem=fail),
    "--metrics_port": lambda telemetry, folder: open_endpoint(telemetry, "127.0.0.1", 0, interval_s=1.0),
}


def measure(names: list[str], *, num_hosts: int, num_intervals: int, scrape_every: int = 0) -> float:
    """CPU seconds of an interval with these sinks. The endpoint is asked once in so many intervals."""
    is_folded = num_hosts * RANKS_PER_HOST > MOST_SINGLE_RANKS
    decoders = [Decoder() for _ in range(num_hosts)]
    with tempfile.TemporaryDirectory() as path:
        telemetry = Telemetry()
        telemetry.begin({"name": "bench"}, interval_s=1.0)
        sinks = [SINKS[name](telemetry, Path(path)) for name in names]
        url = sinks[-1]
        telemetry.begin_attempt(
            tuple(
                Origin(f"node{rank // RANKS_PER_HOST}", rank // RANKS_PER_HOST, rank, rank % RANKS_PER_HOST)
                for rank in range(num_hosts * RANKS_PER_HOST)
            )
        )
        spent = 0.0
        for interval in range(WARM_UP + num_intervals):
            frames = [frame_of(host, interval, is_folded=is_folded) for host in range(num_hosts)]
            began = time.process_time()
            for host, data in enumerate(frames):
                for frame in decoders[host].feed(data):
                    telemetry.take_metrics(f"node{host}", frame)
            telemetry.flush()
            if scrape_every and interval % scrape_every == 0:
                time.sleep(0.3)  # the page that was made may be shown for so long
                with urllib.request.urlopen(str(url)) as answer:
                    answer.read()
            time.sleep(0.05)  # the threads that write do it now
            if interval >= WARM_UP:
                spent += time.process_time() - began
        telemetry.close()
    return spent / num_intervals


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=64)
    parser.add_argument("--intervals", type=int, default=30)
    given = parser.parse_args()
    size = len(frame_of(0, 1, is_folded=given.hosts * RANKS_PER_HOST > MOST_SINGLE_RANKS))
    print(f"{given.hosts} hosts, {given.hosts * RANKS_PER_HOST} ranks, {size} bytes of a host in an interval")
    names = list(SINKS)
    before = 0.0
    for number in range(1, len(names) + 1):
        taken = measure(names[:number], num_hosts=given.hosts, num_intervals=given.intervals)
        print(f"{names[number - 1]:<24} {100 * (taken - before):6.2f} % of a core")
        before = taken
    for every in (15, 1):
        asked = measure(names, num_hosts=given.hosts, num_intervals=given.intervals, scrape_every=every)
        print(f"asked every {every:>2} s          {100 * (asked - before):6.2f} %")
        if every == 15:
            print(f"all, asked every 15 s    {100 * asked:6.2f} %")


if __name__ == "__main__":
    main()
