"""A folder brought to hosts that do not share it: `dslaunch --sync` beside `rsync -a` in a loop over ssh.

Run: python benchmarks/bench_sync.py --help           (as root: it makes the hosts on this machine)

All hosts share this machine's cores and disk, so what is compared is the work that each makes, and the bytes
that the launching host sends. Nothing here fails on a time. rsync is left out where it is not installed.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.lab import Lab

SEED = 20


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--files", type=int, default=2000)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--lab", default="bench-sync", help="the name of the lab")
    args = parser.parse_args()
    reason = Lab.can_be_made()
    if reason is not None:
        print(f"no hosts can be made here: {reason}")
        return 0
    with Lab.up(args.hosts, name=args.lab) as lab:
        folder = lab.head.home / "project"
        num_bytes = make_folder(folder, num_files=args.files, num_bytes=args.megabytes << 20)
        (folder / "hosts").write_text("".join(f"{node.name} slots=1\n" for node in lab.nodes))
        print(f"{args.files} files, {num_bytes / 1e6:.0f} MB, {args.hosts} hosts, {os.cpu_count()} cores\n")
        print(f"{'what':44} {'s':>7} {'head sent, MB':>14}")
        dslaunch = [sys.executable, "-m", "dslaunch", "-H", "hosts", "--sync", ".", "--no_python", "true"]
        measure(lab, "dslaunch --sync, nothing there", dslaunch)
        measure(lab, "the same again", dslaunch)
        measure(lab, "without --sync", [one for one in dslaunch if one not in ("--sync", ".")])
        change(folder, 20)
        measure(lab, "dslaunch --sync, 20 files changed", dslaunch)
        if shutil.which("rsync") is None:
            print("rsync is not installed")
            return 0
        remove(lab)
        loop = "for host in $(cut -d' ' -f1 hosts); do rsync -a ./ $host:project/ || exit 1; done"
        measure(lab, "rsync -a in a loop, nothing there", ["sh", "-c", loop])
        measure(lab, "the same again", ["sh", "-c", loop])
        remove(lab)
        once = "for host in $(cut -d' ' -f1 hosts); do rsync -a ./ $host:project/ & done; wait"
        measure(lab, "rsync -a to all at once, nothing there", ["sh", "-c", once])
    return 0


def make_folder(folder: Path, *, num_files: int, num_bytes: int) -> int:
    """Half of the bytes in a tenth of the files; of text and of what cannot be compressed."""
    draw = random.Random(SEED)
    total = 0
    for number in range(num_files):
        path = folder / f"part{number % 20}" / f"module{number % 7}" / f"file{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        is_large = number % 10 == 0
        size = num_bytes // 2 // (num_files // 10 if is_large else num_files - num_files // 10)
        data = draw.randbytes(size)
        path.write_bytes(data if is_large else data[: size // 4].hex().encode() * 2)
        total += path.stat().st_size
        os.utime(path, (time.time() - 100, time.time() - 100))
    return total


def change(folder: Path, num_files: int) -> None:
    for path in sorted(folder.rglob("*.py"))[:num_files]:
        path.write_bytes(path.read_bytes() + b"# changed\n")


def remove(lab: Lab) -> None:
    for node in lab.nodes:
        shutil.rmtree(node.home / "project")
    subprocess.run(["sync"], check=True)


def measure(lab: Lab, what: str, command: list[str]) -> None:
    before, began = lab.head.tx_bytes(), time.monotonic()
    done = lab.head.run(command, cwd="/root/project", timeout=600)
    took_s, sent = time.monotonic() - began, lab.head.tx_bytes() - before
    print(f"{what:44} {took_s:7.2f} {sent / 1e6:14.2f}", flush=True)
    if done.returncode:
        print(done.stderr[-2000:])
    for line in done.stderr.splitlines():
        if "--sync" in line:
            print(f"    {line}")


if __name__ == "__main__":
    sys.exit(main())
