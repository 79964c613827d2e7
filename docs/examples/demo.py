"""`make demo`: train a small GPT on two hosts made on this machine, and show what came out.

Where hosts cannot be made (they need root on Linux) the same program runs as two processes of this machine.
Then a second job measures what a rank holds of a model at each ZeRO stage. What comes out is in demo-out/:
the loss curve, a picture of memory and start times, the metrics of every step, the memory of every rank and
the launcher's report.
"""

from __future__ import annotations

import json
import math
import os
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.lab import Lab

CHECKOUT = Path(__file__).resolve().parents[2]
OUT = Path("demo-out")  # in the checkout, where everything here runs
NUM_HOSTS = 2
NUM_SLOTS = 2
SILENCE_S = 2.0  # after so long without a line something is said
JOB = (
    f"--report {OUT}/report.json docs/examples/train_chars.py --deepspeed --deepspeed_config "
    f"docs/examples/ds_config_chars.json --steps 300 --log_every 10 --cpu --threads 1 --out {OUT}"
)
MEMORY_JOB = f"--preload=torch docs/examples/memory_by_stage.py --cpu --out {OUT}"
NEXT = (
    (
        "dslaunch --num_gpus 2 docs/examples/train_digits.py "
        "--deepspeed_config docs/examples/ds_config_digits.json",
        "train on this machine, with a program to copy and change",
    ),
    (
        "dslaunch check -H hosts",
        "look at hosts of your own before a job on them; `hosts` has lines such as `node1 slots=8`",
    ),
    ("make docs-serve", "read the documents in a browser; docs/README.md says which page answers what"),
)
END_STEPS = 20  # the loss at the end is the mean of so many steps: one batch says little
LN_2 = math.log(2)  # nats in a bit
SMOOTH_STEPS = 5  # on both sides, in the picture
STAR = "hosts\nThe star is one first start on this machine, the curves are medians of repeated ones"
READ_BYTES = 1 << 16

Start = Callable[..., "subprocess.Popen[bytes]"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where the job runs: how to start the launcher there, and what the launcher is told."""

    start: Start  # like subprocess.Popen
    prompt: str
    options: tuple[str, ...]
    title: str
    num_hosts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """What the job left in demo-out/."""

    steps: tuple[dict[str, Any], ...]  # metrics.jsonl
    memory: tuple[dict[str, Any], ...]  # memory.json, in rank order
    phases_s: dict[str, float]  # seconds from the command's start to the end of each phase
    held_bytes: dict[str, int]  # of a model on a rank, by ZeRO stage; see memory_by_stage.py
    num_ranks: int
    num_hosts: int

    @property
    def first_loss(self) -> float:
        return float(self.steps[0]["loss"])

    @property
    def last_loss(self) -> float:
        last = self.steps[-END_STEPS:]
        return sum(float(step["loss"]) for step in last) / len(last)

    @property
    def tokens_per_s(self) -> float:
        tokens = sum(
            step["tokens_per_s"] * took for step, took in zip(self.steps, self.step_seconds(), strict=True)
        )
        return float(tokens / self.steps[-1]["seconds"])

    def step_seconds(self) -> list[float]:
        ends = [float(step["seconds"]) for step in self.steps]
        return [end - begin for begin, end in zip([0.0, *ends], ends, strict=False)]


def main() -> int:
    os.chdir(CHECKOUT)
    sys.path.insert(0, str(CHECKOUT))  # for tests.lab, which is not installed
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.default_int_handler)  # the same way out as Ctrl-C
    OUT.mkdir(exist_ok=True)
    for name in (
        "report.json",
        "metrics.jsonl",
        "memory.json",
        "memory_by_stage.json",
        "loss.png",
        "why.png",
    ):
        (OUT / name).unlink(missing_ok=True)
    try:
        with choose_site() as site:
            code = run_job(site, JOB) or run_job(site, MEMORY_JOB)
            num_hosts = site.num_hosts
    except KeyboardInterrupt:
        say("stopped")
        return 128 + signal.SIGINT
    if code:
        say(f"the job ended with exit code {code}")
        return code
    show(read_results(num_hosts), site.title)
    return 0


def say(line: str) -> None:
    print(f"demo: {line}", flush=True)


# ---- where it runs


@contextmanager
def choose_site() -> Iterator[Site]:
    """Two hosts made here, taken down at the end; else this machine alone."""
    from tests.lab import Lab, LabError  # the checkout has only now been put on the path

    reason = Lab.can_be_made()
    if reason is not None:
        say(f"two local processes instead of two hosts: {reason}")
        yield local_site()
        return
    say(f"making a head and {NUM_HOSTS} hosts on this machine, each with its own network, processes and sshd")
    try:
        lab = Lab.up(NUM_HOSTS, name="demo", shared=[CHECKOUT / OUT], report=say)
    except LabError as error:
        raise SystemExit(f"demo: {error}") from None
    with lab:
        try:
            yield lab_site(lab)
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # taking the hosts down takes a second; let it end
            say("taking the hosts down")
    signal.signal(signal.SIGINT, signal.default_int_handler)


def lab_site(lab: Lab) -> Site:
    slots = num_slots()
    (OUT / "hostfile").write_text("".join(f"{node.name} slots={slots}\n" for node in lab.nodes))
    return Site(
        start=lab.head.popen,
        prompt="head$",
        options=("-H", str(OUT / "hostfile")),
        title=f"{NUM_HOSTS} hosts x {slots} workers",
        num_hosts=NUM_HOSTS,
    )


def local_site() -> Site:
    slots = num_slots()
    options = ("--launcher=local", f"--num_gpus={slots}")
    title = f"{slots} workers on one machine"
    return Site(start=subprocess.Popen, prompt="$", options=options, title=title, num_hosts=1)


def num_slots() -> int:
    """How many workers each host gets: where there are GPUs, the launcher gives every worker its own."""
    from dslaunch.launcher.node.observe.devices import (
        count_accelerators,  # late, so that the first line comes at once
    )

    return min(NUM_SLOTS, count_accelerators() or NUM_SLOTS)


# ---- the job


def run_job(site: Site, job: str) -> int:
    """Run the command, showing its output as it comes; returns its exit code."""
    words = (*site.options, *job.split())
    print(f"\n{site.prompt} {shlex.join(('dslaunch', *words))}", flush=True)
    process = site.start(
        [str(Path(sys.executable).with_name("dslaunch")), *words],
        cwd=CHECKOUT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # so that Ctrl-C reaches it once, from here
    )
    with process:
        while not copy_output(process):
            say("stopping the job")
            process.send_signal(signal.SIGINT)
    print(flush=True)
    return process.returncode


def copy_output(process: subprocess.Popen[bytes]) -> bool:
    """Show the output as it comes, and something where none comes; False if Ctrl-C came before its end."""
    if process.stdout is None:
        raise AssertionError("the job was started without a pipe")
    fd = process.stdout.fileno()
    silent_since = time.monotonic()
    try:
        while True:
            if not select.select([fd], [], [], SILENCE_S)[0]:
                say(f"no line for {time.monotonic() - silent_since:.0f} s, the job is running")
                continue
            data = os.read(fd, READ_BYTES)
            if not data:
                return True
            sys.stdout.buffer.write(data)
            sys.stdout.flush()
            silent_since = time.monotonic()
    except KeyboardInterrupt:
        return False


# ---- what came out


def read_results(num_hosts: int) -> Results:
    held = json.loads((OUT / "memory_by_stage.json").read_text())
    lines = (OUT / "metrics.jsonl").read_text().splitlines()
    return Results(
        steps=tuple(json.loads(line) for line in lines),
        memory=tuple(json.loads((OUT / "memory.json").read_text())),
        phases_s=json.loads((OUT / "report.json").read_text())["phases_s"],
        held_bytes=held["bytes"],
        num_ranks=held["world_size"],
        num_hosts=num_hosts,
    )


def show(results: Results, title: str) -> None:
    from rich.console import Console  # late, so that the first line comes at once
    from rich.table import Table

    table = Table(title=f"train_chars.py on {title}", title_justify="left", show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(no_wrap=True)
    seconds = results.steps[-1]["seconds"]
    table.add_row("loss", f"{results.first_loss:.3f} -> {results.last_loss:.3f} nats per byte")
    table.add_row(
        "speed", f"{results.tokens_per_s:,.0f} tokens/s over {len(results.steps)} steps in {seconds:.1f} s"
    )
    table.add_section()
    for name, took in phases(results.phases_s):
        table.add_row(name, took)
    table.add_section()
    for one in results.memory:
        table.add_row(f"rank {one['rank']} on {one['host']}", peak_memory(one))
    table.add_section()
    for name, held in results.held_bytes.items():
        table.add_row(
            f"a model: {name}", f"{held / 2**20:.1f} MiB{'' if 'PyTorch' in name else ' on a rank'}"
        )
    Console(soft_wrap=True).print(table)
    draw(results, title)
    draw_why(results)
    say(f"loss curve: {OUT / 'loss.png'}")
    say(f"memory by stage, and start times beside other launchers: {OUT / 'why.png'}")
    say("what to do next, after `. .venv/bin/activate`:")
    for command, purpose in NEXT:
        print(f"    {command}\n        {purpose}", flush=True)


def phases(phases_s: dict[str, float]) -> list[tuple[str, str]]:
    """What the launcher did, each with how long it took: the report counts from the command's start.

    Phases without words of their own here count as part of the next one.
    """
    words = {
        "connected": "reach the hosts",
        "prepared": "prepare the hosts",
        "started": "start the workers",
        "ended": "run the job",
    }
    rows, before = [], 0.0
    for name, at_s in phases_s.items():
        if name in words:
            rows.append((words[name], f"{at_s - before:.2f} s"))
            before = at_s
    return rows


def peak_memory(one: dict[str, Any]) -> str:
    text = f"{one['max_rss_bytes'] / 2**20:.0f} MiB at most"
    on_gpu = one["cuda_peak_bytes"]
    return text if on_gpu is None else f"{text}, {on_gpu / 2**20:.0f} MiB on the GPU"


def draw(results: Results, title: str) -> None:
    """Write loss.png: the loss of every step, its running mean, and the loss of a guess."""
    import matplotlib  # late: it takes a second, and the job comes first

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = [int(one["step"]) for one in results.steps]
    losses = [float(one["loss"]) for one in results.steps]
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(steps, losses, color="tab:blue", alpha=0.35, linewidth=1, label="each step")
    axes.plot(
        steps,
        running_mean(losses),
        color="tab:blue",
        linewidth=2,
        label=f"mean of {2 * SMOOTH_STEPS + 1} steps around",
    )
    axes.axhline(math.log(256), color="gray", linestyle="--", linewidth=1, label="guessing among 256 bytes")
    axes.set(xlabel="optimizer step", ylabel="loss (nats per byte)", xlim=(0, steps[-1]), ylim=(0, 6))
    right = axes.secondary_yaxis("right", functions=(lambda nats: nats / LN_2, lambda bits: bits * LN_2))
    right.set_ylabel("bits per byte")
    figure.suptitle("A small GPT learns the source text of Python's standard library")
    axes.set_title(
        f"{title}, {results.tokens_per_s:,.0f} tokens/s, {results.steps[-1]['seconds']:.0f} s", fontsize=10
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(OUT / "loss.png", dpi=150)


def draw_why(results: Results) -> None:
    """Write why.png: what a rank holds of a model at each stage, as measured now, and the published start
    times beside other launchers, with this run among them.
    """
    from matplotlib import pyplot  # late, as above

    from benchmarks.overview import GUIDE, draw_starts, figures  # the checkout was put on the path

    figure, (memory, start) = pyplot.subplots(1, 2, figsize=(11, 4.3), layout="constrained")
    names = list(results.held_bytes)
    mebibytes = [held / 2**20 for held in results.held_bytes.values()]
    colors = ["0.5", *["tab:blue"] * (len(names) - 1)]
    bars = memory.bar([name.replace(", ", "\n") for name in names], mebibytes, color=colors)
    memory.bar_label(bars, fmt="%.0f")
    memory.set_title(
        f"Parameters, gradients and AdamW's states: MiB on each of {results.num_ranks} ranks", fontsize=10
    )
    published = figures(GUIDE.read_text(encoding="utf-8"))
    draw_starts(start, published.start_s)
    start.plot([results.num_hosts], [results.phases_s["started"]], "k*", markersize=12, label="this run")
    start.set_title(f"Start on N hosts: seconds, published ({published.machine})", fontsize=10)
    start.set_xlabel(STAR, fontsize=8)
    start.legend(fontsize=7, ncols=2, loc="upper left")
    figure.savefig(OUT / "why.png", dpi=150)


def running_mean(values: list[float]) -> list[float]:
    """The mean of each value and SMOOTH_STEPS on both sides; of fewer at the ends."""
    windows = (values[max(0, at - SMOOTH_STEPS) : at + SMOOTH_STEPS + 1] for at in range(len(values)))
    return [sum(window) / len(window) for window in windows]


if __name__ == "__main__":
    sys.exit(main())
