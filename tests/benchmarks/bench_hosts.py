"""How long it takes until the last of N hosts runs a trivial program: dslaunch beside the tools people start jobs with.

Run: python tests/benchmarks/bench_hosts.py [--hosts 64] [--out FOLDER]     (as root: it makes the hosts on this machine)

Each host is a network, process and mount namespace with an sshd of its own; all of them and the launching one share this
machine's cores, so what is compared is the work that a tool makes for itself and for the hosts. The program writes the
time; the figure is the time of the last one minus the time when the command was started. Medians; nothing here fails on
a time. A tool that is not installed is left out by name.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.lab import Lab

RUNS = 3
STAMP = '#!/bin/sh\ndate +%s.%N > "stamp-$(hostname)"\n'
OPENMPI = "mpirun.openmpi"

Command = Callable[[list[str], Path], list[str]]


def dslaunch(hosts: list[str], folder: Path) -> list[str]:
    (folder / "hosts").write_text("".join(f"{name} slots=1\n" for name in hosts))
    words = ["-q", "-H", "hosts", "--no_python", "--no_local_rank", "./stamp.sh"]
    return [sys.executable, "-m", "dslaunch", *words]


def dslaunch_tree(hosts: list[str], folder: Path) -> list[str]:
    """The same through gateways; up to 8 hosts that is no other way."""
    words = dslaunch(hosts, folder)
    return [*words[:3], "--tree_above=8", "--tree_radix=8", *words[3:]]


def pdsh(hosts: list[str], folder: Path) -> list[str]:
    return ["pdsh", "-R", "ssh", "-f", "1024", "-w", ",".join(hosts), f"cd {folder} && ./stamp.sh"]


def openssh(hosts: list[str], folder: Path) -> list[str]:
    each = f"ssh -o BatchMode=yes {{}} 'cd {folder} && ./stamp.sh'"
    return ["sh", "-c", f"printf '%s\\n' {' '.join(hosts)} | xargs -P 64 -I{{}} {each}"]


def mpirun(hosts: list[str], folder: Path) -> list[str]:
    words = ["--allow-run-as-root", "--host", ",".join(hosts), "-n", str(len(hosts))]
    return [OPENMPI, *words, "--mca", "btl", "tcp,self", "./stamp.sh"]


TOOLS: dict[str, tuple[str, Command]] = {
    "dslaunch": (sys.executable, dslaunch),
    "dslaunch --tree": (sys.executable, dslaunch_tree),
    "pdsh": ("pdsh", pdsh),
    "ssh + xargs": ("ssh", openssh),
    "mpirun": (OPENMPI, mpirun),
}


def last_start_s(lab: Lab, hosts: list[str], command: Command) -> float:
    """Seconds from the command to the last host's program, median."""
    folder = lab.shared / "bench"
    times = []
    for run in range(RUNS + 1):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / "stamp.sh").write_text(STAMP)
        (folder / "stamp.sh").chmod(0o755)
        words = command(hosts, folder)
        began = time.time()
        lab.head.run(words, cwd=str(folder), timeout=300, check=True)
        stamps = [float(path.read_text()) for path in folder.glob("stamp-*")]
        if len(stamps) != len(hosts):
            raise AssertionError(f"{words[0]}: {len(stamps)} of {len(hosts)} hosts ran the program")
        if run:
            times.append(max(stamps) - began)
    return statistics.median(times)


def measure(num_hosts: int) -> tuple[list[int], dict[str, list[float]]]:
    counts = [count for count in (1, 2, 4, 8, 16, 32, 64) if count <= num_hosts]
    tools = {name: command for name, (program, command) in TOOLS.items() if shutil.which(program)}
    for name in TOOLS.keys() - tools.keys():
        print(f"{name} is not installed and left out")
    table: dict[str, list[float]] = {name: [] for name in tools}
    with Lab.up(num_hosts, name="bench", report=print) as lab:
        print(f"{'hosts':>5} " + " ".join(f"{name:>15}" for name in tools) + "   dslaunch / pdsh")
        for count in counts:
            hosts = [node.name for node in lab.nodes[:count]]
            for name, command in tools.items():
                table[name].append(last_start_s(lab, hosts, command))
            row = [table[name][-1] for name in tools]
            ratio = f"{row[0] / table['pdsh'][-1]:16.2f}" if "pdsh" in table else ""
            print(f"{count:5} " + " ".join(f"{value:13.2f} s" for value in row) + ratio, flush=True)
    return counts, table


def draw(counts: list[int], table: dict[str, list[float]], path: Path) -> None:
    import matplotlib  # late: only for the picture

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for name, values in table.items():
        axes.plot(counts, values, marker="o", linewidth=2.5 if name == "dslaunch" else 1.2, label=name)
    axes.set(xscale="log", yscale="log", xlabel="hosts", ylabel="seconds until the last one runs the program")
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    axes.set_title("Starting a program on N hosts, all on one 2-core machine")
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description="Time to the last of N hosts, beside other tools.")
    parser.add_argument("--hosts", type=int, default=64)
    parser.add_argument("--out", type=Path, help="write launch.json and launch.png there")
    args = parser.parse_args()
    reason = Lab.can_be_made()
    if reason is not None:
        print(f"no hosts can be made here: {reason}")
        return 0
    counts, table = measure(args.hosts)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "launch.json").write_text(
            json.dumps({"hosts": counts, "seconds": table}, indent=2) + "\n"
        )
        draw(counts, table, args.out / "launch.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
