"""The table of docs/train/which-configuration.md: large models on machines that are not here, planned.

`python -m tests.docs.configurations` plans all rows and writes the table.
"""

from __future__ import annotations

import datetime
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.guide_section import CHECKOUT, replace_section, table
from dslaunch.launcher.fit.step_time import TimeRange, shown_range

EXAMPLES = CHECKOUT / "docs" / "examples"
PAGE = CHECKOUT / "docs" / "train" / "which-configuration.md"
COMMAND = "python -m tests.docs.configurations"
LIMIT_S = 600
GIB = 2**30


class Machines(NamedTuple):
    """Hosts by the options that name them."""

    name: str
    words: str


SMALL = Machines("4 GPUs of 24 GB", "-H node1:4 --gpu A10 --host_memory 256GB")
LARGE = Machines("8 GPUs of 80 GB", "-H node1:8 --gpu H100 --host_memory 2TB")


class Configuration(NamedTuple):
    """One row: a model, what of it is trained, on which machines, with which ds_config."""

    model: str
    machines: Machines
    ds_config: str
    is_lora: bool

    @property
    def command(self) -> str:
        """Return the command that plans it, for the folder docs/examples."""
        model = f"--model models/{self.model.lower()}.json"
        if self.is_lora:
            program = f"train_by_config.py {model} --lora 16"
        else:
            model = f"{model} --batch 1x2048 --gradient_checkpointing"
            program = f"{model} train_by_config.py"
        return f"dslaunch plan {self.machines.words} {program} --deepspeed_config {self.ds_config}"


STAGE_2, STAGE_3, ON_CPU = "ds_config_stage2.json", "ds_config_stage3.json", "ds_config_stage3_cpu.json"
ROWS = [
    Configuration("7B", SMALL, STAGE_2, is_lora=True),
    Configuration("7B", SMALL, STAGE_3, is_lora=True),
    Configuration("7B", SMALL, STAGE_3, is_lora=False),
    Configuration("7B", SMALL, ON_CPU, is_lora=False),
    Configuration("14B", SMALL, STAGE_2, is_lora=True),
    Configuration("14B", SMALL, STAGE_3, is_lora=True),
    Configuration("14B", SMALL, ON_CPU, is_lora=False),
    Configuration("70B", LARGE, STAGE_3, is_lora=True),
    Configuration("70B", LARGE, STAGE_3, is_lora=False),
    Configuration("70B", LARGE, ON_CPU, is_lora=False),
]
_PLACES = {
    STAGE_2: "stage 2",
    STAGE_3: "stage 3",
    ON_CPU: "stage 3, optimizer on cpu",
}


def plan(row: Configuration) -> dict[str, Any]:
    """Return all numbers of its plan.

    Errors: RuntimeError with what was printed, if it cannot be planned
    """
    done = subprocess.run(
        [*shlex.split(row.command.replace("dslaunch plan", f"dslaunch plan --json --time_limit {LIMIT_S}"))],
        cwd=EXAMPLES,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=2 * LIMIT_S,
        check=False,
    )
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{row.command}:\n{done.stdout}{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def cells(row: Configuration, found: dict[str, Any]) -> list[str]:
    """Return a row of the table."""
    peak = max(
        phase["peaks"]["device"]["bytes"]
        for rank in found["ranks"]
        for phase in rank["phases"]
        if "device" in phase["peaks"]
    )
    on_gpu = peak + found["device"]["outside_of_torch_bytes"]
    on_host = max(host["needed_bytes"] for host in found["hosts"])
    steps = [
        sum(part[bound] for part in parts.values()) for parts in found["step_seconds"] for bound in _BOUNDS
    ]
    return [
        row.model,
        row.machines.name,
        "LoRA" if row.is_lora else "all",
        _PLACES[row.ds_config],
        "fits" if found["fits"] else "does not fit",
        f"{on_gpu / GIB:.1f} of {found['device']['memory_bytes'] / GIB:.1f}",
        f"{on_host / GIB:.0f}",
        shown_range(TimeRange(min(steps), max(steps))),
    ]


_BOUNDS = ("low", "high")
HEAD = ["model", "on", "trained", "zero_optimization", "answer", "GiB of a GPU", "GiB of the host", "a step"]


def main() -> None:
    """Plan all rows, and write the table."""
    found = []
    for row in ROWS:
        found.append(cells(row, plan(row)))
        print(row.command, found[-1], flush=True)
    day = datetime.datetime.now(tz=datetime.timezone.utc).date()
    commands = "\n".join(f"    {row.command}" for row in ROWS)
    rows = f"{table(HEAD, found)}\n\nThe rows are these commands, in their order:\n\n{commands}"
    replace_section(PAGE, COMMAND, f"Planned on {day}.\n\n{rows}")


if __name__ == "__main__":
    main()
