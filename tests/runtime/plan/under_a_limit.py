"""A training on CPUs under the limit of a cgroup, beside what a plan says that it needs.

`python -m tests.runtime.plan.under_a_limit` looks for the smallest limit under which it trains; with
--publish the result stands in docs/reference/plan-accuracy.md.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.guide_section import CHECKOUT, replace_section, table
from tests.lab.cgroup import own_folder

PAGE = CHECKOUT / "docs" / "reference" / "plan-accuracy.md"
COMMAND = "python -m tests.runtime.plan.under_a_limit"
NUM_RANKS = 2
OPTIONS = (f"--num_gpus={NUM_RANKS}", "--no_local_rank")
LIMIT_S = 300
STEP = 0.01  # of what is needed, between the limits that are tried
MIB = 2**20
PROGRAM = """
import json
import sys

import torch
from torch import nn

import dslaunch

layers, config = int(sys.argv[1]), json.loads(sys.argv[2])
dslaunch.init_distributed()
model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(layers)))
engine, *_ = dslaunch.initialize(model=model, model_parameters=model.parameters(), config=config)
for step in range(3):
    engine.backward(engine(torch.ones(64, 1024)).square().mean())
    engine.step()
print("trained", flush=True)
"""
CONFIG = {
    "train_micro_batch_size_per_gpu": 64,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
}


class Training(NamedTuple):
    """A model of so many layers of 4 MiB in float32, at a ZeRO stage."""

    num_layers: int
    stage: int

    @property
    def words(self) -> tuple[str, ...]:
        """Return the arguments of the program."""
        return str(self.num_layers), json.dumps({**CONFIG, "zero_optimization": {"stage": self.stage}})


class Ended(NamedTuple):
    """A run under a limit. `is_killed`: the kernel has killed a process of it for its memory."""

    code: int
    has_trained: bool
    is_killed: bool
    output: str


def why_no_limit() -> str:
    """Return why this process cannot limit memory; empty if it can."""
    if os.geteuid() != 0:
        return "it needs root"
    with contextlib.suppress(OSError), limited(1 << 40):
        return ""
    return "no cgroup that limits memory can be made here"


@contextmanager
def limited(num_bytes: int) -> Iterator[Path]:
    """Make a cgroup with this limit below that of this process, without swap; yield its folder.

    Errors: OSError if the kernel refuses it
    """
    folder, is_v1 = own_folder("memory"), True
    if folder is None:
        folder, is_v1 = own_folder(""), False
    if folder is None:
        raise FileNotFoundError("no memory controller")
    own = folder / f"dslaunch-limit-{uuid.uuid4().hex[:12]}"
    own.mkdir()
    try:
        limit, with_swap = "memory.limit_in_bytes", "memory.memsw.limit_in_bytes"
        if not is_v1:
            limit, with_swap = "memory.max", "memory.swap.max"
        (own / limit).write_text(str(num_bytes))
        with contextlib.suppress(FileNotFoundError):  # a kernel without swap
            (own / with_swap).write_text(str(num_bytes) if is_v1 else "0")
        yield own
    finally:
        own.rmdir()


def needed_bytes(program: Path, training: Training, *words: str) -> tuple[int, int]:
    """Return what a plan says that the host needs, and its exit code."""
    done = subprocess.run(
        [
            _dslaunch(),
            "plan",
            *OPTIONS,
            "--gpu=none",
            "--json",
            *words,
            program,
            *training.words,
        ],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{done.stdout}{done.stderr}")
    (host,) = json.loads(done.stdout)["hosts"]
    return int(host["needed_bytes"]), done.returncode


def run_under(num_bytes: int, program: Path, training: Training) -> Ended:
    """Run the job, its launcher included, in a cgroup with this limit."""
    with limited(num_bytes) as group:
        done = subprocess.run(
            [
                "sh",
                "-c",
                f'echo $$ > {group}/cgroup.procs && exec "$@"',
                "sh",
                _dslaunch(),
                *OPTIONS,
                program,
                *training.words,
            ],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        kills = _kills(group)
    return Ended(
        code=done.returncode,
        has_trained=done.returncode == 0 and done.stdout.count("trained") == NUM_RANKS,
        is_killed=kills > 0,
        output=done.stdout,
    )


def _kills(group: Path) -> int:
    for name in ("memory.oom_control", "memory.events"):
        with contextlib.suppress(FileNotFoundError):
            rows = (line.split() for line in (group / name).read_text().splitlines())
            return int(next(row[1] for row in rows if row[0] == "oom_kill"))
    raise FileNotFoundError(f"{group}: no counter of killed processes")


def _dslaunch() -> str:
    return str(Path(sys.executable).parent / "dslaunch")


def smallest(needed: int, program: Path, training: Training) -> int:
    """Return the smallest limit under which the job trains, in hundredths of what is needed."""
    low, high = 80, 110  # hundredths: fails below, trains above
    while high - low > 1:
        middle = (low + high) // 2
        ended = run_under(needed * middle // 100, program, training)
        print(f"{training}: {middle} %: {ended.code} {ended.has_trained}", flush=True)
        low, high = (low, middle) if ended.has_trained else (middle, high)
    return needed * high // 100


TRAININGS = (Training(96, 1), Training(96, 3), Training(192, 1))


def main() -> None:
    """Print what is planned and the smallest limit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--publish", action="store_true", help=f"write the table into {PAGE.name}")
    given = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "train.py")
        program.write_text(PROGRAM)
        for training in TRAININGS:
            needed, _ = needed_bytes(program, training)
            limit = smallest(needed, program, training)
            rows.append(_cells(training, needed, limit))
    day = datetime.datetime.now(tz=datetime.timezone.utc).date()
    head = ["parameters", "stage", "planned, MiB", "smallest limit that it trains under, MiB", "difference"]
    text = f"Run on {day}.\n\n{table(head, rows)}"
    print(text)
    if given.publish:
        replace_section(PAGE, COMMAND, text)


def _cells(training: Training, needed: int, limit: int) -> list[Any]:
    return [
        f"{training.num_layers * MIB:,}",
        str(training.stage),
        f"{needed / MIB:,.0f}",
        f"{limit / MIB:,.0f}",
        f"{100 * (needed / limit - 1):+.0f} %",
    ]


if __name__ == "__main__":
    main()
