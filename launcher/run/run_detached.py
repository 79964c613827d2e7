"""A job that outlives the terminal: its options are checked, it starts apart, and its name is printed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from typing import NamedTuple

import click

from ..errors import LaunchError
from ..options import Options
from ..output.console import LAST_WORDS_S, Console
from ..registry.detached import EXIT_LOST, STRAY_FILE, start_apart
from ..registry.known_jobs import clean, known_jobs
from ..registry.own_entry import make_folder

# Variables of a batch system's job, whose end ends all processes that it has started.
_BATCH_JOBS = {"SLURM_JOB_ID": "Slurm", "PBS_JOBID": "PBS", "LSB_JOBID": "LSF"}


class Detached(NamedTuple):
    """The result of the start: name and exact name of the running job, or its exit code."""

    name: str = ""
    id: str = ""
    code: int = 0


def run_detached(options: Options, run: Callable[[Options, Console], int]) -> int:
    """Start the job in a process of its own; return 0 once all its workers run, or its exit code.

    Errors: LaunchError for a mistake in the options, and for one of the job before it has started
    """
    started = start_detached(options, run)
    if started.name:
        click.echo(started.name)
    return started.code


def start_detached(options: Options, run: Callable[[Options, Console], int]) -> Detached:
    """Do the same, but print no name on stdout."""
    option = "--watch" if options.detach.is_watched else "--detach"
    if options.process.stdin_rank is not None:
        raise LaunchError(
            f"{option} and --stdin={options.process.stdin_rank} exclude each other: a job that outlives the "
            "terminal has no input; leave out one of them"
        )
    if not options.backend.launcher.starts_itself:  # mpirun and srun read no input anyway
        options = options._replace(process=options.process._replace(gives_stdin=False))
    folder = make_folder(options)
    clean(keep=folder)
    warning = batch_warning(os.environ)
    news = start_apart(folder, options, run)
    name = _called(folder.name)
    if news is None:
        raise LaunchError(
            f"the process of job {name} was killed before its workers ran; what it printed is in "
            f"{folder / STRAY_FILE}",
            exit_code=EXIT_LOST,
        )
    if news.code is not None:
        # all of its output was shown here, and the name is free again
        shutil.rmtree(folder, ignore_errors=True)
        if news.message:
            raise LaunchError(news.message, exit_code=news.code)
        return Detached(code=news.code)
    console = Console(log_level=options.log_level)  # not earlier: it has a thread
    if warning:
        console.warn(warning)
    console.say(f"job {name} runs: `dslaunch logs -f {name}` shows it, and attach and stop reach it")
    console.drain(LAST_WORDS_S)
    return Detached(name=name, id=folder.name)


def _called(id: str) -> str:
    """Return the name alone, or the exact one if other running jobs have the same name."""
    name = id.rpartition(".")[0]
    others = [one for one in known_jobs() if one.record.name == name and one.is_live and one.record.id != id]
    return id if others else name


def batch_warning(environ: Mapping[str, str]) -> str:
    """Return a warning that a batch system's end will end a detached job, too."""
    for variable, system in _BATCH_JOBS.items():
        if environ.get(variable):
            return (
                f"this is inside job {environ[variable]} of {system}, whose end ends this one too; as the "
                "last command of its script, start dslaunch without --detach"
            )
    return ""
