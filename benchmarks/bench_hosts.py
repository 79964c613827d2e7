"""The time until the last of N hosts runs something: dslaunch beside the tools people start jobs with.

Run: python benchmarks/bench_hosts.py --help           (as root: it makes the hosts on this machine)

Each host is a network, process and mount namespace with an sshd of its own; all of them and the launching one
share this machine's cores, so what is compared is the work that a tool makes for itself and for the hosts.
Nothing here fails on a time. A tool that is not installed is left out by name.

Files, each importing only those before it: launch_peers -> launch_clock,
launch_results -> launch_measures -> this one.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.guide_section import GUIDE
from benchmarks.launch_clock import CommandFailed
from benchmarks.launch_measures import Bench, Size
from benchmarks.launch_results import markdown, publish, write
from tests.lab import Lab, LabError

COUNTS = (1, 2, 4, 8, 16, 32, 64)
QUICK = Size(counts=(2,), num_runs=1, num_warm_ups=0, num_local_workers=2)
HEAVY = ("deepspeed", "torchrun")  # the peers of which every process imports torch


def main() -> int:
    args = _parser().parse_args()
    size = (
        QUICK
        if args.quick
        else Size(counts=args.hosts, num_runs=args.runs, num_warm_ups=1, num_local_workers=8)
    )
    reason = Lab.can_be_made()
    if reason is not None:
        print(f"no hosts can be made here: {reason}")
        return 0
    began = time.monotonic()
    try:
        with Lab.up(max(2, *size.counts), name=args.lab, report=say) as lab:
            results = Bench(lab, size, say, without=frozenset(args.without)).run()
    except (LabError, CommandFailed) as error:
        print(f"bench_hosts: {error}", file=sys.stderr)
        return 1
    print(f"\n{markdown(results)}\nit took {time.monotonic() - began:.0f} s")
    if args.out:
        write(results, args.out)
    if args.publish:
        publish(results, GUIDE)
    return 0


def say(line: str) -> None:
    print(line, flush=True)


def _counts(text: str) -> tuple[int, ...]:
    counts = tuple(sorted({int(word) for word in text.split(",")}))
    if counts[0] < 1:
        raise ValueError
    return counts


_counts.__name__ = "list of numbers of hosts"  # argparse shows it


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    shown = ",".join(map(str, COUNTS))
    parser.add_argument("--hosts", type=_counts, default=COUNTS, help=f"numbers of hosts, default {shown}")
    parser.add_argument("--runs", type=int, default=3, help="of each command, after one that does not count")
    parser.add_argument("--quick", action="store_true", help="2 hosts, one run: to see that it works")
    parser.add_argument(
        "--without", action="append", default=[], choices=HEAVY, help="a peer to leave out; may be repeated"
    )
    parser.add_argument("--out", type=Path, help="write launch.json, launch.md and launch.png in this folder")
    parser.add_argument("--publish", action="store_true", help="put the tables and the picture into docs/")
    parser.add_argument("--lab", default="bench", help="name of the lab to make")
    return parser


if __name__ == "__main__":
    sys.exit(main())
