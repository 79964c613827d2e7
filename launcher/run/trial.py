"""One trial: a job that takes its first optimizer steps as any job does, is measured, and ends."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import click

from ...shared import variables
from ..errors import EXIT_HOST, LaunchError
from ..fit.model import with_ds_config, with_mapped
from ..fit.scratch_folder import scratch_folder
from ..fit.tuning import Outcome, measured, micro_batch_of
from ..inputs.env_file import EnvEntry
from ..job.plan import Plan
from ..options import Options
from ..options.detach import DetachOptions
from ..options.elastic import ElasticOptions
from ..options.end import EndOptions
from ..options.logs import LogOptions
from ..options.metrics import MetricsOptions
from ..options.restart import RestartOptions
from ..options.trace import TraceOptions
from ..run_state.run_state import RunState
from ..telemetry.telemetry import Telemetry
from ..wording import cleaned, count
from .no_workers_yet import InterruptedJob
from .run_job import run

_MODULE = f"{__package__.partition('.')[0]}.runtime.plan.in_scratch"
_MAX_REASON = 160  # characters


class TrialInterrupted(Exception):
    """A signal has ended the trial; `code` is the exit code that follows."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class TrialJob(NamedTuple):
    """A ds_config that runs for so many steps. `mapped`: arguments of the program that repeat keys of it."""

    config: Mapping[str, Any]
    config_file: Path
    warm_up: int
    num_steps: int
    mapped: tuple[tuple[str, str], ...] = ()


def once(options: Options) -> Options:
    """Return the options of a job that runs once, in the foreground, and leaves no files or messages."""
    return options._replace(
        report=None,
        logs=LogOptions(),
        metrics=MetricsOptions(),
        end=EndOptions(),
        trace=TraceOptions(),
        restart=RestartOptions(),
        elastic=ElasticOptions(),
        detach=DetachOptions(),
        process=options.process._replace(stdin_rank=None, gives_stdin=False, saves_pid=False),
        autotuning=None,
        dry_run=False,
    )


def keeps_no_files(plan: Plan, config: Mapping[str, Any]) -> str:
    """Return why what a trial writes is kept; empty if it can vanish with the trial.

    Ranks of several hosts may read what another host's ranks write, and a disk in memory is none.
    """
    if len(plan.nodes) > 1 or not plan.nodes[0].is_local:
        return "it runs on other hosts"
    if plan.nodes[0].host.exec_prefix:
        return "it runs in a container"
    zero = config.get("zero_optimization") or {}
    places = (zero.get("offload_optimizer"), zero.get("offload_param"))
    if any(isinstance(one, Mapping) and one.get("device") == "nvme" for one in places):
        return "the ds_config offloads to a disk"
    return ""


def run_trial(options: Options, plan: Plan, trial: TrialJob, output: IO[bytes]) -> Outcome:
    """Run it; what the job prints goes to `output`.

    Errors: TrialInterrupted; LaunchError if a host could not be used, which says nothing about the ds_config
    """
    kept = keeps_no_files(plan, trial.config)
    entry = EnvEntry(
        name=variables.TRIAL, value=(f"{trial.warm_up}:{trial.num_steps}",), source="dslaunch plan --tune"
    )
    arguments = with_ds_config(options.arguments, str(trial.config_file))
    options = options._replace(
        arguments=with_mapped(arguments, trial.mapped, trial.config), variables=(*options.variables, entry)
    )
    telemetry = Telemetry()
    with scratch_folder("trial") as folder:
        if not kept:
            safe = ("-P",) if sys.version_info >= (3, 11) else ()  # the folder of the job may have a torch.py
            prefix = (sys.executable, *safe, "-m", _MODULE, str(folder / "layers"))
            options = options._replace(exec_prefix=prefix)
        code = _run(options, telemetry, output)
    outcome = _outcome(code, telemetry.state, trial, num_ranks=plan.world_size)
    return Outcome(
        step_s=outcome.step_s,
        num_samples=outcome.num_samples,
        num_steps=outcome.num_steps,
        why_out=outcome.why_out,
        kept_files=kept or outcome.kept_files,
    )


def _run(options: Options, telemetry: Telemetry, output: IO[bytes]) -> int:
    try:
        code = run(options, telemetry=telemetry, output=output)
    except click.exceptions.Exit as ended:
        raise TrialInterrupted(ended.exit_code) from None
    except InterruptedJob as error:
        raise TrialInterrupted(error.exit_code) from None
    verdict = None if telemetry.state.attempt is None else telemetry.state.attempt.verdict
    if verdict is None:
        return code
    if verdict.keys.get("interrupted_by"):
        raise TrialInterrupted(code)
    if verdict.culprit and verdict.culprit.get("kind") != "rank":
        raise LaunchError(f"a trial could not run: {verdict.text}", exit_code=code or EXIT_HOST)
    return code


def _outcome(code: int, state: RunState, trial: TrialJob, *, num_ranks: int) -> Outcome:
    verdict = None if state.attempt is None else state.attempt.verdict
    if code != 0:
        text = verdict.text if verdict is not None else f"exit code {code}"
        return Outcome(why_out=cleaned(text, _MAX_REASON))
    found = measured(state.trials, num_ranks=num_ranks)
    if found is None:
        return Outcome(
            why_out=f"the program has ended after {count(state.step or 0, 'optimizer step')}; a trial takes "
            f"{trial.warm_up} before it measures"
        )
    size = trial.config.get("train_micro_batch_size_per_gpu")
    rows = micro_batch_of(state.trials)
    if isinstance(size, int) and rows is not None and rows != size:
        return Outcome(
            why_out=f"the program's micro batches have {rows} samples, and the ds_config says {size}"
        )
    return found
