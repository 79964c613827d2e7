"""`dslaunch plan`: the options of a job, and whether the job fits on its hosts."""

from __future__ import annotations

import json
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...shared.table import terminal_columns
from ..controller.job_signals import ended_in_order
from ..errors import LaunchError
from ..fit.finding import FitFinding
from ..fit.verdict import DEFAULT_LIMIT_S, EXIT_FITS, EXIT_TOO_LARGE
from ..options import Options
from ..options.number import Seconds, Size, Whole
from ..wording import shown_size
from .cli import dslaunch, job_options
from .prefix_command import PROGRAM_SETTINGS, PrefixCommand
from .runtime_program import require_pages, require_runtime

if TYPE_CHECKING:
    from ..run.plan_job import FitRequest
    from ..run.tune_job import Tuned

NOT_OURS = ("dry_run", "version", "autotuning")
EPILOG = """
\b
Examples:
  dslaunch plan -H hosts --gpu A10 train.py --deepspeed --deepspeed_config ds.json
      does this job fit, and where is its memory at the peak?
  dslaunch plan -H node[1-2]:8 --gpu_memory 80GB --host_memory 1TB --json train.py
      the same for GPUs and hosts that are named by their sizes, with all numbers as JSON
  dslaunch plan --gpu A10 --tune --out best.json train.py --deepspeed --deepspeed_config ds.json
      which configuration is the fastest? Run the three that should be, on the job's own hosts
  dslaunch plan -H hosts --from_run train-3f2a train.py --deepspeed --deepspeed_config ds.json
      the plan of a job beside what its run took, which later plans on these hosts are corrected by

All options of a job are allowed: its command needs only the word `plan`. `dslaunch help all` shows them.

The program runs here until the end of its second optimizer step, once for each kind of rank, without values,
GPUs and other ranks. No host is contacted, but with --tune, which runs jobs on them.

\b
The exit code is 0 if the job fits, 1 if not, and 2 for a mistake or a program that cannot be rehearsed.
"""


@click.command(
    cls=PrefixCommand,
    groups={
        "Devices": ("gpu", "gpu_memory", "host_memory"),
        "In place of the program": ("model", "batch", "lengths", "gradient_checkpointing"),
        "Speeds": ("speeds", "from_run"),
        "Suggestions": ("suggest", "tune", "tune_steps", "tune_dir", "out"),
        "Options": ("page", "as_json", "verbose", "time_limit", "help"),
    },
    epilog=EPILOG,
    context_settings=PROGRAM_SETTINGS,
)
@click.option(
    "--gpu", metavar="NAME", help="Model of the hosts' GPUs, such as A10 or H100; none: they have no GPUs."
)
@click.option(
    "--gpu_memory", type=Size(), metavar="SIZE", help="Memory of each GPU, such as 24GB or 22.5GiB."
)
@click.option(
    "--host_memory",
    type=Size(),
    metavar="SIZE",
    help="Memory of each host.  [default: this machine's, and not judged elsewhere]",
)
@click.option(
    "--model",
    metavar="FOLDER",
    help="Plan this model of transformers, a folder or its config.json, with the ds_config that SCRIPT gets.",
)
@click.option(
    "--batch", metavar="SIZES", help="With --model: samples and tokens of a micro batch, as 4x2048."
)
@click.option(
    "--lengths",
    metavar="FILE",
    help="With --model: lengths of samples, one a line, or a length and a number. Micro batches are padded "
    "to their longest, and a second number of --batch cuts samples.",
)
@click.option(
    "--gradient_checkpointing",
    is_flag=True,
    help="With --model: its blocks are computed again in the backward.",
)
@click.option(
    "--speeds",
    metavar="FILE",
    help="Time a step by these measured speeds.  [default: those that `dslaunch check --bandwidth` has kept "
    "of these hosts, else the GPUs' data sheets]",
)
@click.option(
    "--from_run",
    metavar="RUN",
    help="Show the plan beside what this run of the same job took, and correct later plans on these hosts "
    "by it. RUN is a job's name, or its folder of --log_dir.",
)
@click.option(
    "--page", metavar="FILE", help="Write a page for a browser that draws the memory of each kind of rank."
)
@click.option(
    "--suggest",
    is_flag=True,
    help="Rehearse other stages, offload, micro batches, checkpointing and meshes, too, and tell the fastest "
    "that fits.",
)
@click.option(
    "--tune",
    is_flag=True,
    help="Run the best three of those for real, some steps each, the better half longer; tell the fastest.",
)
@click.option(
    "--tune_steps",
    type=Whole(1),
    metavar="N",
    help="With --tune: measure N steps in the first round, after 2 that are not, and twice as many in each "
    "further round.  [default: 5]",
)
@click.option(
    "--tune_dir",
    metavar="DIR",
    help="With --tune: keep what was measured in DIR, from which the same command goes on. All hosts must "
    "see it.  [default: a folder of this user's]",
)
@click.option(
    "--out",
    metavar="FILE",
    help="With --suggest or --tune: write the ds_config of the first into FILE.",
)
@click.option("--json", "as_json", is_flag=True, help="Print everything that was found as JSON.")
@click.option("--verbose", is_flag=True, help="Show the program's own output, on stderr.")
@click.option(
    "--time_limit",
    type=Seconds(1),
    default=DEFAULT_LIMIT_S,
    metavar="S",
    help=f"Seconds that all rehearsals may take.  [default: {DEFAULT_LIMIT_S:.0f}]",
)
@ended_in_order()
def command(**given: Any) -> int:
    """Tell whether the job of SCRIPT fits on its hosts: memory of GPUs and hosts, by kind, at every peak."""
    if not given["script"]:
        raise click.UsageError("which script? Write: dslaunch plan [options] script.py [its arguments]")
    from ..run.past_job import put_beside, read_past_job
    from ..run.plan_job import FitRequest, plan_job

    require_runtime("dslaunch plan")
    _check_tune_options(given)
    options = job_options({**given, "dry_run": True})
    request = FitRequest(
        gpu=given["gpu"],
        gpu_memory_bytes=given["gpu_memory"],
        host_memory_bytes=given["host_memory"],
        model=given["model"],
        batch=given["batch"],
        is_checkpointed=given["gradient_checkpointing"],
        lengths=given["lengths"],
        limit_s=given["time_limit"],
        is_verbose=given["verbose"],
        speeds=given["speeds"],
    )
    past = None if given["from_run"] is None else read_past_job(given["from_run"])
    place = None if given["page"] is None else _place(given["page"])
    out = None if given["out"] is None else _config_place(given)
    tuned, beside, suggested = None, None, None
    if given["tune"]:
        tuned = _tuned(given, options, request)
        found, suggested = tuned.found, tuned.suggestions
    else:
        job, found = plan_job(options, request)
        beside = None if past is None else put_beside(job, found, past)
        if given["suggest"]:
            from ..run.suggest_job import suggest

            suggested = suggest(job, found)
        if not found.verdict.fits:
            from ..run.ways_out_job import with_ways_out

            found = with_ways_out(job, found, suggested)
    tuning = None if tuned is None else tuned.tuning
    columns = terminal_columns()
    if given["as_json"]:
        data = found.as_data() | ({} if suggested is None else {"suggestions": suggested.as_data()})
        data |= {} if beside is None else {"from_run": beside.as_data()}
        data |= {} if tuning is None else {"tuning": tuning.as_data()}
        click.echo(json.dumps(data, indent=2).encode())
    else:
        lines = [*found.lines(columns), *([] if beside is None else beside.lines(columns))]
        lines += [] if suggested is None else suggested.lines(columns)
        lines += [] if tuning is None else tuning.lines(columns)
        click.echo("\n".join(lines).encode())
    if place is not None:
        _write(place, found, title=f"plan of {given['script']}")
    if suggested is None:
        return found.verdict.exit_code
    if tuned is not None:
        from ..run.tune_job import write_best

        if out is not None and write_best(out, tuned):
            click.echo(f"dslaunch: wrote {out}", err=True)
        return EXIT_FITS if tuning is not None and tuning.best is not None else EXIT_TOO_LARGE
    if out is not None and suggested.best is not None:
        from ..run.suggest_job import write_config

        write_config(out, suggested)
        click.echo(f"dslaunch: wrote {out}", err=True)
    return EXIT_FITS if suggested.best is not None else EXIT_TOO_LARGE


def _config_place(given: dict[str, Any]) -> Path:
    """Return where the suggested ds_config is written.

    Errors: LaunchError if nothing is suggested, or it cannot be written there
    """
    if not given["suggest"] and not given["tune"]:
        raise LaunchError("--out has no effect without --suggest; add --suggest, or leave it out")
    from ..run.suggest_job import check_config_place

    out = Path(given["out"]).expanduser()
    check_config_place(out)
    return out


def _tuned(given: dict[str, Any], options: Options, request: FitRequest) -> Tuned:
    """Run the trials."""
    if given["model"] is not None:
        raise LaunchError(
            "--tune runs the program, and --model plans another in its place; leave one of them out"
        )
    if options.roles.is_on:
        raise LaunchError(
            "--tune and --role exclude each other: trials run one after the other, and start no servers; "
            "leave out one of them"
        )
    from ..run.tune_job import TuneRequest, tune

    folder = given["tune_dir"]
    asked = TuneRequest(
        steps=given["tune_steps"],
        folder=None if folder is None else Path(folder).expanduser().absolute(),
        is_verbose=given["verbose"],
        say=lambda text: click.echo(f"dslaunch: {text}", err=True),
    )
    return tune(options, request, asked)


def _check_tune_options(given: dict[str, Any]) -> None:
    """Errors: LaunchError for options of trials without trials, and for one that they have no use for"""
    for name in ("tune_steps", "tune_dir"):
        if given[name] is not None and not given["tune"]:
            raise LaunchError(f"--{name} has no effect without --tune; add --tune, or leave it out")
    if given["tune"] and given["from_run"] is not None:
        raise LaunchError(
            "--from_run is the job as it was, and --tune runs it in other ways; leave one of them out"
        )


def _place(word: str) -> Path:
    """Return where the page is written.

    Errors: LaunchError if it cannot be made or written
    """
    require_pages("dslaunch plan --page")
    from ..page.page_file import check_page_place

    place = Path(word).expanduser()
    check_page_place(place, option="--page")
    return place


def _write(place: Path, found: FitFinding, *, title: str) -> None:
    from ..page.page_file import write_page
    from ..page.plan_page import PlannedMemory, plan_page

    ranks = [
        PlannedMemory(
            name=one.name,
            points=one.answer.curve,
            phases=tuple(phase.clock for phase in one.answer.stretches),
        )
        for one in found.rehearsed
    ]
    page = plan_page(title=title, fits=found.verdict.fits, lines=found.lines(), ranks=ranks)
    size = write_page(place, page, option="--page")
    click.echo(f"dslaunch: wrote {place} ({shown_size(size)})", err=True)


command.params[:0] = [one for one in dslaunch.params[:-2] if one.name not in NOT_OURS]
_script = copy(dslaunch.params[-2])
_script.metavar = "SCRIPT"  # the script is required here; the usage of a job shows it as optional
command.params += [_script, dslaunch.params[-1]]
