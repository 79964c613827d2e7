"""`dslaunch numerics`: the options of a job, which is run twice.

The comparison is the runtime's, in a process of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import copy
from math import prod
from pathlib import Path
from typing import Any

import click

from ...shared import variables
from ..controller.job_signals import ended_in_order
from ..errors import LaunchError
from ..inputs.env_file import EnvEntry
from ..options import Options
from ..options.end import EndOptions
from ..options.logs import LogOptions
from ..options.metrics import MetricsOptions
from ..options.number import Whole
from ..options.trace import TraceOptions
from .cli import dslaunch, job_options
from .prefix_command import PROGRAM_SETTINGS, PrefixCommand

# Options of a job that is run once, and in the foreground or not.
NOT_OURS = ("dry_run", "version", "detach", "watch", "no_ssh", "autotuning")
DEFAULT_STEPS = 3
CONFIGURED, PLAIN, STAGE_0 = "configured", "plain", "stage0"
EPILOG = """
\b
Examples:
  dslaunch numerics train.py --deepspeed --deepspeed_config ds_config.json
      the first three steps on all slots, and the same steps by torch alone
  dslaunch numerics -H hosts --steps 5 --keep steps train.py
      five steps on these hosts, which all see the folder `steps`

All options of a job are allowed but for those of one in the background; `dslaunch help all` shows them.

Each rank of the second run has the whole model. Where it does not fit in memory, the second run is the same
engine at ZeRO stage 0; --reference says which.

The exit code is 0 if both runs are equal within the bounds that are printed, 1 if they differ, that of the
job if one of its runs fails (2 where that is 1), and 2 for a mistake.
"""
EXIT_DIFFERS, EXIT_FAILED = 1, 2


@click.command(
    cls=PrefixCommand,
    groups={"Options": ("steps", "reference", "keep", "help")},
    epilog=EPILOG,
    context_settings=PROGRAM_SETTINGS,
)
@click.option(
    "--steps",
    type=Whole(1),
    default=DEFAULT_STEPS,
    metavar="N",
    help=f"Compare the first N optimizer steps.  [default: {DEFAULT_STEPS}]",
)
@click.option(
    "--reference",
    type=click.Choice(["auto", PLAIN, STAGE_0]),
    default="auto",
    help="Compare with torch alone, or with ZeRO stage 0.  [default: auto, plain where that fits]",
)
@click.option(
    "--keep",
    metavar="DIR",
    help=(
        "Write both runs' numbers into DIR, and leave them there; all hosts must see it.  [default: a folder "
        "in the current one, which is removed]"
    ),
)
@ended_in_order()
def command(**given: Any) -> int:
    """Run the first steps of SCRIPT as configured, and once more with the same samples by torch alone,
    without any division over ranks; name the first step, quantity and parameter that differs beyond rounding.
    """
    if not given["script"]:
        raise click.UsageError("which script? Write: dslaunch numerics [options] script.py [its arguments]")
    from .runtime_program import require_runtime, run_program

    require_runtime("dslaunch numerics")
    options = job_options({**given, "dry_run": False})
    with _folder(given["keep"]) as folder:
        runs = _Runs(options, folder, given["steps"])
        code = runs.run(CONFIGURED)
        reference = "" if code else _reference(given["reference"], folder)
        code = code or runs.run(reference)
        if code:
            return EXIT_FAILED if code == EXIT_DIFFERS else code
        request = {"folder": str(folder), "reference": reference}
        return run_program("numerics", request, what="dslaunch numerics")


@contextmanager
def _folder(kept: str | None) -> Iterator[Path]:
    """Make a new folder for the numbers of the runs; one that is kept goes if nothing was written into it.

    Errors: LaunchError as _made_folder()
    """
    was_there = kept is not None and Path(kept).expanduser().exists()
    folder = _made_folder(kept)
    try:
        yield folder
    finally:
        if kept is None:
            shutil.rmtree(folder, ignore_errors=True)
        elif not was_there:
            with suppress(OSError):  # it has what the runs have written
                folder.rmdir()


def _made_folder(kept: str | None) -> Path:
    """Return a new folder for the numbers of the runs.

    Errors: LaunchError if it cannot be made, or has those of earlier runs
    """
    try:
        if kept is None:
            return Path(tempfile.mkdtemp(prefix=".dslaunch-numerics-", dir=os.getcwd()))
        folder = Path(kept).expanduser().absolute()
        if folder.exists() and any(folder.iterdir()):
            raise LaunchError(f"--keep={kept}: the folder is not empty; give a new one, or remove it")
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(
            f"the folder for the numbers of the runs cannot be made: {error}; name another with --keep=DIR"
        ) from None
    return folder


class _Runs:
    """The two runs of one job."""

    def __init__(self, options: Options, folder: Path, steps: int) -> None:
        self._options, self._folder, self._steps = options, folder, steps

    def run(self, part: str) -> int:
        """Run the program; return its exit code.

        Errors: LaunchError if it has taken no step of an engine
        """
        from ..run.run_job import run

        is_first = part == CONFIGURED
        what = {CONFIGURED: "as configured", PLAIN: "by torch alone", STAGE_0: "at ZeRO stage 0"}[part]
        click.echo(f"dslaunch: numerics: run {1 if is_first else 2} of 2, {what}", err=True)
        value = f"{part}:{self._steps}:{self._folder}"
        entry = EnvEntry(name=variables.NUMERICS, value=(value,), source="dslaunch numerics")
        options = self._options._replace(variables=(entry,))
        if not is_first:  # files and messages are those of the first run
            options = options._replace(
                report=None,
                logs=LogOptions(),
                metrics=MetricsOptions(),
                end=EndOptions(),
                trace=TraceOptions(),
            )
        code = run(options)
        if code == 0:
            self._check_written(part, what)
        return code

    def _check_written(self, part: str, what: str) -> None:
        """Errors: LaunchError if the program has taken no step of an engine, or a rank wrote elsewhere"""
        place = self._folder / part / "engine0"
        if not (place / "step1.rank0.json").exists():
            raise LaunchError(
                f"the program has ended {what}, and this machine sees no step of its engine in "
                f"{self._folder}; give a program that calls initialize() and engine.step(), and on several "
                "hosts --keep=DIR with a folder that all of them see"
            )
        num_ranks = prod(_facts(self._folder)["axes"].values())
        missing = [rank for rank in range(num_ranks) if not (place / f"step1.rank{rank}.json").exists()]
        if missing:
            raise LaunchError(
                f"the numbers of rank {missing[0]} are not in {self._folder}, which its host does not share "
                "with this machine; give --keep=DIR with a folder that all hosts see"
            )


def _facts(folder: Path) -> dict[str, Any]:
    """Return what the first run has written of itself."""
    written = json.loads((folder / CONFIGURED / "engine0" / "step0.rank0.json").read_text())
    facts: dict[str, Any] = written["notes"]
    return facts


def _reference(wanted: str, folder: Path) -> str:
    """Return the second run's part: plain torch, unless another is wanted or the memory is too small."""
    if wanted != "auto":
        return wanted
    facts = _facts(folder)
    if facts["plain_bytes"] <= facts["free_bytes"]:
        return PLAIN
    needed, free = (facts[name] / 2**30 for name in ("plain_bytes", "free_bytes"))
    click.echo(
        f"dslaunch: numerics: the whole model in each rank needs {needed:.1f} GiB, and {free:.1f} GiB are "
        "free: the second run is at ZeRO stage 0",
        err=True,
    )
    return STAGE_0


command.params[:0] = [one for one in dslaunch.params[:-2] if one.name not in NOT_OURS]
_script = copy(dslaunch.params[-2])
_script.metavar = "SCRIPT"  # the script is required here; the usage of a job shows it as optional
command.params += [_script, dslaunch.params[-1]]
