"""Cost of carrying output: many ranks that write many lines, beside torchrun in the same run.

Run: python benchmarks/bench_output.py [num_ranks [num_lines]]        (fails if dslaunch
                                                                            loses or mixes a line)

CPU seconds are those of the launcher and its agent: of the whole command, less what the workers say
they used. Without --tee, torchrun carries nothing: its workers write to our file themselves, and no process
keeps lines apart.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

WORKER = """
import os, sys
rank, num_lines = int(os.environ['RANK']), int(sys.argv[-1])
for number in range(num_lines):
    print(f'{rank:04d} {number:07d} loss=2.345678 grad_norm=0.123456 lr=0.000300 tokens_per_s=123456')
with open(f'cpu{rank}', 'w') as file:
    file.write(str(sum(os.times()[:2])))
"""


LINE = re.compile(rb"(\d{4}) (\d{7}) loss=2.345678 grad_norm=0.123456 lr=0.000300 tokens_per_s=123456\n$")


class Run(NamedTuple):
    wall_s: float
    cpu_s: float  # CPU seconds of all but the workers
    num_bytes: int
    num_bad: int  # lines that were lost, cut or mixed


def run(command: list[str], folder: Path, num_ranks: int, num_lines: int) -> Run:
    """Run one job with its stdout in a file."""
    num_shown = 1 if "--tee=0" in command else num_ranks
    with open(folder / "out", "wb") as out, open(folder / "err", "wb") as err:
        began = time.perf_counter()
        process = subprocess.Popen(command, cwd=folder, stdout=out, stderr=err)
        _, status, usage = os.wait4(process.pid, 0)
        wall_s = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"{command} ended with {process.returncode}:\n{(folder / 'err').read_text()}")
    workers_s = sum(float((folder / f"cpu{rank}").read_text()) for rank in range(num_ranks))
    last_of = [-1] * num_ranks
    num_good = 0
    with open(folder / "out", "rb") as lines:
        for line in lines:
            match = LINE.search(line)
            if match is None or line.count(b"loss") > 1:  # two lines in one
                continue
            rank, number = int(match[1]), int(match[2])
            num_good += number > last_of[rank]
            last_of[rank] = number
    num_bad = num_shown * num_lines - num_good
    cpu_s = usage.ru_utime + usage.ru_stime - workers_s
    return Run(wall_s, cpu_s, (folder / "out").stat().st_size, num_bad)


def main() -> None:
    num_ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 16
    num_lines = int(sys.argv[2]) if len(sys.argv) > 2 else 100_000
    python = sys.executable
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "worker.py").write_text(WORKER)
        ours = [python, "-m", "dslaunch", "--launcher=local", f"--num_gpus={num_ranks}"]
        theirs = [python, "-m", "torch.distributed.run", f"--nproc-per-node={num_ranks}", "--standalone"]
        script = ["worker.py", str(num_lines)]
        rows = {
            "dslaunch": [*ours, *script],
            "dslaunch --log_dir": [*ours, "--log_dir=logs", *script],
            "dslaunch --log_dir --tee=0": [*ours, "--log_dir=logs", "--tee=0", *script],
            "dslaunch --fold": [*ours, "--fold", *script],
            "torchrun": [*theirs, *script],
            "torchrun --tee 3": [*theirs, "--log-dir=logs", "--tee=3", *script],
        }
        print(f"{num_ranks} ranks x {num_lines} lines")
        print(f"{'':28} {'wall':>8} {'CPU':>8} {'lines/s':>10} {'MB/s':>7} {'bad lines':>10}")
        for title, command in rows.items():
            got = run(command, folder, num_ranks, num_lines)
            shown = num_ranks * num_lines / got.wall_s, got.num_bytes / got.wall_s / 1e6
            print(
                (
                    f"{title:28} {got.wall_s:6.1f} s {got.cpu_s:6.2f} s {shown[0]:10.0f} "
                    f"{shown[1]:7.1f} {got.num_bad:10}"
                ),
                flush=True,
            )
            if got.num_bad and title.startswith("dslaunch"):
                raise SystemExit("lines were lost, cut or mixed")


if __name__ == "__main__":
    main()
