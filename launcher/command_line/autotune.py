"""`dslaunch --autotuning` of DeepSpeed's launcher: trials as of `dslaunch plan --tune`, and then the job."""

from __future__ import annotations

from pathlib import Path

import click

from ...shared.table import terminal_columns
from ..errors import LaunchError
from ..fit.model import with_ds_config
from ..fit.verdict import DEFAULT_LIMIT_S, EXIT_TOO_LARGE
from ..inputs.autotuning import BEST, RESULTS_DIR
from ..options import Options
from .runtime_program import require_runtime


def autotune(options: Options) -> int:
    """Find the fastest ds_config and write it into the folder of results; with "run", start the job with it.

    Errors: LaunchError as `dslaunch plan --tune`
    """
    from ..run.plan_job import FitRequest, UnknownGpus
    from ..run.run_job import run
    from ..run.tune_job import TuneRequest, tune, tuning_section, write_best

    require_runtime("dslaunch --autotuning")
    folder = (tuning_section(options).results_dir or Path(RESULTS_DIR)).absolute()
    request = FitRequest(
        gpu=None,
        gpu_memory_bytes=None,
        host_memory_bytes=None,
        model=None,
        batch=None,
        is_checkpointed=False,
        lengths=None,
        limit_s=DEFAULT_LIMIT_S,
        is_verbose=False,
    )
    asked = TuneRequest(
        folder=folder, option="--autotuning", say=lambda text: click.echo(f"dslaunch: {text}", err=True)
    )
    try:
        tuned = tune(options, request, asked)
    except UnknownGpus:
        raise LaunchError(
            "--autotuning: the GPUs of the hosts are not looked at; name them in dslaunch plan --tune "
            "--gpu=A10, with the other options behind it"
        ) from None
    tuning = tuned.tuning
    lines = [
        *tuned.suggestions.lines(terminal_columns()),
        *([] if tuning is None else tuning.lines(terminal_columns())),
    ]
    click.echo("\n".join(lines).encode(), err=options.autotuning == "run")
    best = folder / BEST
    if not write_best(best, tuned):
        return EXIT_TOO_LARGE
    click.echo(f"dslaunch: wrote {best}", err=True)
    if options.autotuning == "tune":
        return 0
    arguments = with_ds_config(options.arguments, str(best))
    return run(options._replace(arguments=arguments, autotuning=None))
