"""`dslaunch plan --tune`: the best of the suggested configurations run for real, a few steps each."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import LaunchError
from ..fit.candidates import Candidate, Setup
from ..fit.config_file import read_ds_config
from ..fit.finding import FitFinding
from ..fit.model import ds_config_of, with_ds_config
from ..fit.scratch_folder import scratch_folder
from ..fit.suggestion import Suggestions, Tried
from ..fit.tuning import Halving, Outcome, TrialPlace, Tuning
from ..inputs.autotuning import SECTION, Autotuning, read_autotuning
from ..job.plan import Plan
from ..options import Options
from ..options.option import refuse
from ..output.job_report import put_file
from ..output.writer import unbuffered
from ..registry.record import name_from
from ..wording import count
from .plan_job import FitRequest, PlannedJob, plan_job
from .suggest_job import suggest
from .trial import TrialInterrupted, TrialJob, once, run_trial
from .tune_folder import TuneFolder, default_folder

NUM_CANDIDATES = 3
DEFAULT_STEPS, WARM_UP = 5, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneRequest:
    """Requests for the trials beside the ds_config's section. None: not given."""

    steps: int | None = None
    folder: Path | None = None
    is_verbose: bool = False
    option: str = "--tune"  # that asks for the trials
    say: Callable[[str], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """The suggestions, and what their trials measured. `tuning` None: none of them fits."""

    found: FitFinding  # what is found of the job as it is
    suggestions: Suggestions
    tuning: Tuning | None
    folder: Path | None


def check_tunable(options: Options, option: str) -> None:
    """Errors: LaunchError for jobs that have no trials"""
    launcher = options.backend.launcher
    if launcher.starts_itself:
        refuse((option,), f"--launcher={launcher.name}, which tells no numbers")
    if options.rendezvous.no_ssh:
        refuse((option,), "--no_ssh, where no node knows the numbers of the others")


def tuning_section(options: Options) -> Autotuning:
    """Return what the section `autotuning` of the job's ds_config asks for.

    Errors: LaunchError for a ds_config that cannot be read, and for keys that are not here
    """
    config = read_ds_config(ds_config_of(options.arguments), os.getcwd())
    return read_autotuning(config.get(SECTION))


def tune(options: Options, request: FitRequest, asked: TuneRequest) -> Tuned:
    """Rehearse configurations of the job, and run the best of those that fit.

    Errors: LaunchError as plan_job() and suggest(); if a trial is interrupted, with its exit code
    """
    check_tunable(options, asked.option)
    options = once(options)
    section = tuning_section(options)
    for note in section.notes:
        asked.say(note)
    request = request._replace(mapped=section.arg_mappings)
    with _without_section(options) as plain:
        job, found = plan_job(plain._replace(dry_run=True), request)
        suggested = suggest(job, found, has_meshes=False)
    fastest: dict[Setup, Tried] = {}  # the job as it is may be slower than another trial of its setup
    for one in suggested.tried:
        if one.fits() and section.allows(one.candidate):
            fastest.setdefault(one.candidate.setup, one)
    chosen = list(fastest.values())[: section.num_trials or NUM_CANDIDATES]
    if not chosen:
        return Tuned(found=found, suggestions=suggested, tuning=None, folder=None)
    _check_sizes(section, job, chosen[0].candidate)
    steps = asked.steps or section.steps or DEFAULT_STEPS
    halving = Halving(tuple(one.candidate.text for one in chosen), steps, section.metric)
    configs = {one.candidate.text: one.candidate.config(suggested.config) for one in chosen}
    warm_up = section.warm_up or WARM_UP
    key = _key(job.plan, options, {"configs": configs, "steps": steps, "warm_up": warm_up})
    name = name_from(options.program, is_module=options.is_module)
    place = asked.folder or section.results_dir or default_folder(name, key)
    folder = TuneFolder(place.resolve(), key)
    with folder.alone():
        if section.is_afresh:
            folder.known.clear()
        _tell_known(folder, asked)
        _Trials(
            options=options,
            plan=job.plan,
            halving=halving,
            configs=configs,
            folder=folder,
            asked=asked,
            warm_up=warm_up,
            mapped=section.arg_mappings,
        ).run()
    tuning = Tuning(tried=tuple(chosen), halving=halving, known=folder.known, config=suggested.config)
    return Tuned(found=found, suggestions=suggested, tuning=tuning, folder=folder.path)


def write_best(path: Path, tuned: Tuned) -> bool:
    """Write the ds_config of the fastest; tell whether there is one.

    Errors: LaunchError if it cannot be written
    """
    config = None if tuned.tuning is None else tuned.tuning.best_config()
    if config is None:
        return False
    try:
        put_file(path, (json.dumps(config, indent=2) + "\n").encode())
    except OSError as error:
        raise LaunchError(f"{path}: cannot be written: {error.strerror}") from None
    return True


def _check_sizes(section: Autotuning, job: PlannedJob, one: Candidate) -> None:
    """Errors: LaunchError if the job's batch or tensor parallel size is not what the section asks for"""
    mesh = job.mesh
    tp = 1 if mesh is None else mesh.tp
    if section.num_tensor_parts not in (None, tp):
        raise LaunchError(
            f"autotuning.mp_size {section.num_tensor_parts}: layers are divided over {count(tp, 'rank')}; "
            f"write --mesh=tp={section.num_tensor_parts}, or leave mp_size out"
        )
    num_ranks = job.plan.world_size // (1 if mesh is None else mesh.pp * mesh.sp * mesh.tp)
    size = one.micro_batch_size * one.num_micro_batches * num_ranks
    least, most = section.batches
    if not least <= size <= most:
        raise LaunchError(
            f"autotuning: a step of the job has {size} samples, and its limits of train_batch_size are "
            f"{least} and {most}; trials leave that as it is: change train_batch_size, or leave the limit out"
        )


@contextlib.contextmanager
def _without_section(options: Options) -> Iterator[Options]:
    """Yield the options with a ds_config without the section `autotuning`, which no engine knows."""
    config = read_ds_config(ds_config_of(options.arguments), os.getcwd())
    if config.pop(SECTION, None) is None:
        yield options
        return
    with scratch_folder("tune") as folder:
        path = folder / "ds_config.json"
        path.write_text(json.dumps(config))
        yield options._replace(arguments=with_ds_config(options.arguments, str(path)))


def _key(plan: Plan, options: Options, more: Mapping[str, Any]) -> str:
    """Return a text that differs where what was measured would no longer hold."""
    script = plan.program.script
    content = b""
    if script is not None:
        with contextlib.suppress(OSError):
            content = Path(plan.cwd, script).read_bytes()
    facts = {
        "program": [options.program, *with_ds_config(options.arguments, "")],
        "content": hashlib.sha256(content).hexdigest(),
        "cwd": plan.cwd,
        "hosts": [[node.host.name, len(node.ranks)] for node in plan.nodes],
        "mesh": None if plan.mesh is None else plan.mesh.text,
        **more,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _tell_known(folder: TuneFolder, asked: TuneRequest) -> None:
    if folder.is_of_another:
        asked.say(
            f"tune: what {folder.path} holds is of another job, ds_config or program: all is measured anew"
        )
    elif folder.known:
        number = count(len(folder.known), "trial")
        asked.say(
            f"tune: {number} ended before, and {folder.path} has what was measured; remove it to begin anew"
        )


@dataclass(slots=True, kw_only=True)
class _Trials:
    """The trials of one job, in their order."""

    options: Options
    plan: Plan
    halving: Halving
    configs: Mapping[str, Mapping[str, Any]]  # by the name of the configuration
    folder: TuneFolder
    asked: TuneRequest
    warm_up: int
    mapped: tuple[tuple[str, str], ...]
    has_told_of_files: bool = False

    def run(self) -> None:
        """Run all that are due.

        Errors: LaunchError if one is interrupted, or a host could not be used
        """
        while (due := self.halving.next_trial(self.folder.known)) is not None:
            place, num_steps = due
            self.asked.say(
                f"tune: round {place.number + 1}, {place.name}: {self.warm_up} + {num_steps} steps on "
                f"{count(self.plan.world_size, 'rank')}"
            )
            try:
                outcome = self._run(place, num_steps)
            except TrialInterrupted as interrupted:
                raise LaunchError(
                    f"interrupted in a trial; {self.folder.path} has what was measured before, and the same "
                    "command goes on from there",
                    exit_code=interrupted.code,
                ) from None
            self.folder.add(place, outcome)
            self._tell(place, outcome)

    def _run(self, place: TrialPlace, num_steps: int) -> Outcome:
        config = self.configs[place.name]
        number = 1 + self.halving.names.index(place.name)
        path = self.folder.put(f"ds_config{number}.json", config)
        trial = TrialJob(
            config=config,
            config_file=path,
            warm_up=self.warm_up,
            num_steps=num_steps,
            mapped=self.mapped,
        )
        if self.asked.is_verbose:
            return run_trial(self.options, self.plan, trial, unbuffered(sys.stderr))
        with self.folder.open_log(self._log_of(place)) as log:
            return run_trial(self.options, self.plan, trial, log)

    def _log_of(self, place: TrialPlace) -> str:
        return f"output{1 + self.halving.names.index(place.name)}-round{place.number + 1}.txt"

    def _tell(self, place: TrialPlace, outcome: Outcome) -> None:
        if outcome.kept_files and not self.has_told_of_files:
            self.has_told_of_files = True
            self.asked.say(
                f"tune: files that the program writes in a trial are written: {outcome.kept_files}"
            )
        if outcome.step_s is None:
            where = (
                ""
                if self.asked.is_verbose
                else f"; its output is in {self.folder.path / self._log_of(place)}"
            )
            self.asked.say(f"tune: out: {outcome.why_out}{where}")
