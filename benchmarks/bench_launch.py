"""Time until something runs: the command itself, and a one-line job on this
machine, beside torchrun.

Run: python benchmarks/bench_launch.py      (medians of whole processes; nothing here fails on a time)
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RUNS = 7
NUM_WORKERS = 2
WORKER = "import os; assert os.environ['WORLD_SIZE'] == '2'\n"


def median_s(command: list[str], folder: Path) -> float:
    """The median wall time of a command, after one run that does not count."""
    times = []
    for run in range(RUNS + 1):
        began = time.perf_counter()
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
        if run:
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def main() -> None:
    python = sys.executable
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "worker.py").write_text(WORKER)
        torchrun = [python, "-m", "torch.distributed.run"]
        rows = [
            ("python -c pass", [python, "-c", "pass"], None),
            ("import dslaunch", [python, "-c", "import dslaunch"], None),
            ("dslaunch --help", [python, "-m", "dslaunch", "--help"], [*torchrun, "--help"]),
            (
                f"{NUM_WORKERS} workers that do nothing",
                [python, "-m", "dslaunch", f"--num_gpus={NUM_WORKERS}", "worker.py"],
                [*torchrun, f"--nproc-per-node={NUM_WORKERS}", "--standalone", "worker.py"],
            ),
        ]
        print(f"{'':30} {'dslaunch':>10} {'torchrun':>10} {'ratio':>7}")
        for title, command, peer in rows:
            ours = median_s(command, folder)
            theirs = median_s(peer, folder) if peer else None
            shown = f"{theirs * 1e3:7.0f} ms {ours / theirs:7.3f}" if theirs else ""
            print(f"{title:30} {ours * 1e3:7.0f} ms {shown}", flush=True)


if __name__ == "__main__":
    main()
