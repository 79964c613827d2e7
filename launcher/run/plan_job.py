"""From a job's options to whether it fits: its plan, its devices, and the rehearsal of each kind of rank."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import LaunchError
from ..fit.answer import Answer, Rehearsed
from ..fit.devices import CPU, Gpu, find_gpu, gpu_of_model
from ..fit.finding import FitFinding, finding_of
from ..fit.host_memory import memory_here, process_bytes
from ..fit.job_speeds import JobSpeeds, of_measured, of_sheet
from ..fit.lengths import Lengths, PlannedLengths, read_lengths
from ..fit.measured_speeds import MEASURE, ClusterSpeeds
from ..fit.model import model_request
from ..fit.rank_kinds import RankKind, are_other_kinds, kinds_of
from ..fit.rehearse import RehearsalOptions, Variant, checked, rehearse, rehearse_variants
from ..fit.step_time import TimeRange
from ..fit.verdict import JobMemory, check_rehearsed
from ..job.mesh import JobMesh
from ..job.partners import copies_on
from ..job.plan import Plan
from ..job.restart import Attempt
from ..node.observe.devices import count_accelerators, gpu_models
from ..node.workers.preparation import why_no_script
from ..options import Options
from ..output.console import LAST_WORDS_S, Console
from .make_plan import choose_attempt, make_plan
from .show_plan import warn_of_plan
from .speeds_folder import speeds_of


class FitRequest(NamedTuple):
    """The options of `dslaunch plan` beside those of the job."""

    gpu: str | None
    gpu_memory_bytes: int | None
    host_memory_bytes: int | None
    model: str | None
    batch: str | None
    is_checkpointed: bool
    lengths: str | None
    limit_s: float
    is_verbose: bool
    mapped: tuple[tuple[str, str], ...] = ()  # keys of the ds_config, and arguments that repeat them
    speeds: str | None = None  # a file of measured speeds


class UnknownGpus(LaunchError):
    """The GPUs of the hosts were not named, were not measured, and are not those of this machine."""


class _Device(NamedTuple):
    """The device of each rank. `num_bytes` None: a CPU, whose memory is the host's."""

    name: str
    num_bytes: int | None
    source: str
    speeds: JobSpeeds | None = None  # None: they are not known


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedJob:
    """A job that is rehearsed, and what its ranks compute on."""

    options: Options
    attempt: Attempt
    plan: Plan
    kinds: tuple[RankKind, ...]
    rehearsal: RehearsalOptions
    device: _Device
    memory: JobMemory
    mesh: JobMesh | None  # that of the program, or of --mesh
    deadline: float  # a time.monotonic() before which all rehearsals end
    lengths: Lengths | None  # what --lengths says of the samples

    @property
    def num_stages(self) -> int:
        """Return the stages of its pipeline."""
        return 1 if self.mesh is None else self.mesh.pp

    @property
    def model_name(self) -> str:
        """Return the model that is planned in place of the program; empty for the program itself."""
        return "" if self.rehearsal.model is None else str(self.rehearsal.model["model"])

    def in_time(self) -> RehearsalOptions:
        """Return how rehearsals run in the time that is left, which may be none."""
        return replace(self.rehearsal, limit_s=max(0.0, self.deadline - time.monotonic()))

    def changed(self, *, mesh: JobMesh | None = None, num_hosts: int | None = None) -> PlannedJob:
        """Return the job with other axes, or on more hosts such as its last one.

        Errors: LaunchError if the axes and the number of ranks do not fit
        """
        options, hosts = self.options, self.attempt.hosts
        if num_hosts is None and mesh in (None, self.mesh):
            return self
        is_other = mesh is not None and mesh != self.mesh
        if mesh is not None and is_other:
            sizes = tuple((name, mesh.size(name)) for name in ("pp", "ep", "sp", "tp") if mesh.size(name) > 1)
            options = options._replace(mesh=options.mesh._replace(sizes=sizes or (("dp", mesh.dp),)))
        elif num_hosts is not None:
            given = tuple(one for one in options.mesh.sizes if one[0] != "dp")
            options = options._replace(mesh=options.mesh._replace(sizes=given))
        if num_hosts is not None:
            last = hosts[-1]
            names = [f"{last.host.name}+{number}" for number in range(1, num_hosts - len(hosts) + 1)]
            hosts += tuple(last._replace(host=last.host._replace(name=name)) for name in names)
        attempt = self.attempt._replace(hosts=hosts)
        plan = make_plan(options, attempt)
        bytes_of_host = self.memory.host_bytes
        bytes_of_host += bytes_of_host[-1:] * (len(hosts) - len(bytes_of_host))
        made = plan.mesh
        if made is None and self.mesh is not None and not is_other:  # the program's own, with more ranks
            made = self.mesh._replace(dp=plan.world_size * self.mesh.dp // self.plan.world_size)
        return replace(
            self,
            options=options,
            attempt=attempt,
            plan=plan,
            kinds=kinds_of(plan, made),
            memory=replace(self.memory, hosts=plan.host_slots, host_bytes=bytes_of_host),
            mesh=made,
        )

    def find(
        self,
        answers: Sequence[Answer],
        *,
        usual: Sequence[Answer] = (),
        lengths: PlannedLengths | None = None,
    ) -> FitFinding:
        """Judge the answers of its kinds of rank; times are those of `usual` answers where there are some.

        Errors: LaunchError for a program that cannot be rehearsed
        """
        rehearsed = self._rehearsed(answers)
        timed = self._rehearsed(usual) if usual else rehearsed
        speeds = self.device.speeds
        times = () if speeds is None else self.times(timed, speeds)
        return finding_of(
            rehearsed,
            self.memory,
            device=self.device.name,
            device_from=self.device.source,
            times=times,
            speeds=speeds,
            lengths=lengths,
        )

    def times(
        self, rehearsed: Sequence[Rehearsed], speeds: JobSpeeds, *, with_factors: bool = True
    ) -> Sequence[Mapping[str, TimeRange]]:
        """Return the parts of a step's time of each kind of rank."""
        hosts, num_stages = self.plan.host_slots, self.num_stages
        return speeds.times(rehearsed, hosts, num_stages=num_stages, with_factors=with_factors)

    def _rehearsed(self, answers: Sequence[Answer]) -> list[Rehearsed]:
        found = [kind.with_answer(answer) for kind, answer in zip(self.kinds, answers, strict=True)]
        check_rehearsed(found)
        return found


def plan_job(options: Options, request: FitRequest) -> tuple[PlannedJob, FitFinding]:
    """Rehearse each kind of rank of the job, and judge what was found. No other host is contacted.

    Errors: LaunchError as for a job that starts; for GPUs that are not known; for a program that cannot be
    rehearsed
    """
    console = Console(log_level=options.log_level)
    attempt = choose_attempt(options, console, may_look=False)
    plan = make_plan(options, attempt)
    if plan.program.python is None:
        raise LaunchError(
            "--no_python: only a Python program can be rehearsed; leave the option out, and give the script"
        )
    device = _device(plan, request)
    if plan.venv_script:
        console.warn(
            f"--venv_script={plan.venv_script} is not sourced: the program is rehearsed as things are here"
        )
    warn_of_plan(plan, console)
    here = request.host_memory_bytes or memory_here()
    lengths = _lengths(plan, request)
    job = PlannedJob(
        options=options,
        attempt=attempt,
        plan=plan,
        kinds=kinds_of(plan),
        rehearsal=RehearsalOptions(
            device="cpu" if device.num_bytes is None else "cuda",
            device_bytes=device.num_bytes or 0,
            model=_model(plan, request, lengths),
            limit_s=request.limit_s,
            is_verbose=request.is_verbose,
            say=console.say,
            mapped=request.mapped,
        ),
        device=device,
        memory=JobMemory(
            device_bytes=device.num_bytes,
            hosts=plan.host_slots,
            host_bytes=tuple(here if node.is_local else request.host_memory_bytes for node in plan.nodes),
            process_bytes=process_bytes(has_gpus=device.num_bytes is not None),
            copies=copies_on([one.host.rack for one in plan.nodes]) if options.snapshots.is_on else (),
        ),
        deadline=time.monotonic() + request.limit_s,
        lengths=lengths,
        mesh=plan.mesh,
    )
    if plan.program.script is not None and request.model is None:
        why_not = why_no_script(os.path.join(plan.cwd, plan.program.script))
        if why_not:
            raise LaunchError(why_not)
    job, found = _found(job)
    console.drain(LAST_WORDS_S)
    return job, found


def _found(job: PlannedJob) -> tuple[PlannedJob, FitFinding]:
    """Rehearse the job, and with lengths of samples also micro batches of the usual length. The job has the
    kinds of rank that were found then.
    """
    kinds, answers = _rehearse_kinds(job.plan, job.rehearsal)
    job = replace(job, kinds=kinds, mesh=answers[0].mesh or job.plan.mesh)
    if job.lengths is None or job.rehearsal.model is None:
        return job, job.find(answers)
    size = int(job.rehearsal.model["batch"].partition("x")[0])
    usual = math.ceil(job.lengths.padded(size))
    variant = Variant(plan=job.plan, kinds=kinds, name=f"{usual} tokens", batch=f"{size}x{usual}")
    (mean,) = (checked(one) for one in rehearse_variants([variant], job.in_time()))
    micro_batches = max(dict(one.model).get("num_micro_batches", 1) for one in answers)
    together = 1 if job.mesh is None else job.mesh.num_ranks // job.mesh.dp
    found = job.find(answers, usual=mean)
    planned = PlannedLengths(
        lengths=job.lengths,
        micro_batch_size=size,
        num_samples=size * micro_batches * job.plan.world_size // together,
        usual=usual,
        usual_bytes=job.find(mean).rank_bytes,
        longest_bytes=found.rank_bytes,
        room_bytes=found.rank_room,
    )
    return job, replace(found, lengths=planned)


def _rehearse_kinds(
    plan: Plan, rehearsal: RehearsalOptions
) -> tuple[tuple[RankKind, ...], tuple[Answer, ...]]:
    """Rehearse a rank of each kind. The kinds are those of the mesh that the program makes, which the
    rehearsal of rank 0 finds.
    """
    kinds = kinds_of(plan)
    answers = rehearse(plan, kinds, rehearsal)
    first = answers[0]
    made = kinds_of(plan, first.mesh)
    has_failed = first.problem is not None and not first.waits_for
    if has_failed or not are_other_kinds(kinds, made):
        return kinds, answers
    return made, rehearse(plan, made, rehearsal, known=answers[:1])


def _device(plan: Plan, request: FitRequest) -> _Device:
    """Return what the hosts compute on, as it was named, as it was measured, or as this machine shows it.

    Errors: LaunchError if none says it
    """
    if request.gpu is not None and request.gpu.lower() == CPU:
        if request.gpu_memory_bytes is not None:
            raise LaunchError(
                "--gpu=none says that there are no GPUs, and --gpu_memory how large they are; give one"
            )
        return _Device("CPU", None, "", _measured(plan, request, _has_no_gpu))
    gpu = None if request.gpu is None else find_gpu(request.gpu)
    if request.gpu_memory_bytes is not None:
        name = request.gpu or "GPU"
        return _Device(name, request.gpu_memory_bytes, "--gpu_memory", _gpu_speeds(plan, request, gpu))
    if gpu is not None:
        return _Device(gpu.name, gpu.memory_bytes, "as torch reports it", _gpu_speeds(plan, request, gpu))
    is_here = all(node.is_local for node in plan.nodes)
    if is_here and not count_accelerators():
        return _Device("CPU", None, "", _measured(plan, request, _has_no_gpu))
    measured = _measured(plan, request, lambda one: one.is_on_gpu or not is_here)
    if measured is not None and measured.measured is not None:
        one = measured.measured
        if not one.is_on_gpu:
            return _Device("CPU", None, "", measured)
        return _Device(one.device, one.device_bytes, "as it was measured", measured)
    (model, *others) = {*(gpu_models() if is_here else ())} or {""}
    named = None if others else gpu_of_model(model)
    if named is not None:
        return _Device(named.name, named.memory_bytes, f"this machine has {model}", of_sheet(named))
    raise UnknownGpus(
        "which GPUs do the hosts have? They are not looked at; give --gpu=A10, or another name, "
        f"--gpu_memory=24GB, or --gpu=none for hosts without GPUs, or measure them once with {MEASURE}"
    )


def _gpu_speeds(plan: Plan, request: FitRequest, gpu: Gpu | None) -> JobSpeeds | None:
    """Return the speeds of GPUs that were named, or are known by their memory alone."""
    measured = _measured(plan, request, lambda one: one.is_on_gpu and gpu in (None, gpu_of_model(one.device)))
    return measured or (None if gpu is None else of_sheet(gpu))


def _has_no_gpu(cluster: ClusterSpeeds) -> bool:
    return not cluster.is_on_gpu


def _measured(plan: Plan, request: FitRequest, fits: Callable[[ClusterSpeeds], bool]) -> JobSpeeds | None:
    """Return the speeds of the job's hosts, if they were measured."""
    found = speeds_of(plan.nodes, request.speeds, fits)
    return None if found is None else of_measured(found[1], found[0], plan.host_slots)


def _lengths(plan: Plan, request: FitRequest) -> Lengths | None:
    """Return the lengths of samples that were given, cut where --batch says it.

    Errors: LaunchError without --model, and as read_lengths()
    """
    if request.lengths is None:
        return None
    if request.model is None:
        raise LaunchError(
            "--lengths has no effect without --model: the lengths of a program's samples come from its data; "
            "give it data that begins with its longest samples, or plan its model with --model=FOLDER "
            "--batch=4"
        )
    found = read_lengths(Path(plan.cwd, request.lengths))
    _, by, most = (request.batch or "").partition("x")
    return found.cut(int(most)) if by and most.isdecimal() and int(most) else found


def _model(plan: Plan, request: FitRequest, lengths: Lengths | None) -> dict[str, Any] | None:
    """Return the model that is planned in place of the program, None for the program itself.

    Errors: LaunchError for one of the options without the others, and as model_request()
    """
    if request.model is None:
        if request.batch is not None or request.is_checkpointed:
            name = "--batch" if request.batch is not None else "--gradient_checkpointing"
            raise LaunchError(f"{name} has no effect without --model; add --model=FOLDER, or leave it out")
        return None
    if request.batch is None:
        raise LaunchError("--model has no batch; add --batch=4x2048, samples and tokens of a micro batch")
    batch = request.batch
    if lengths is not None:
        batch = f"{batch.partition('x')[0]}x{lengths.longest}"
    return model_request(
        os.path.join(plan.cwd, request.model),
        batch,
        is_checkpointed=request.is_checkpointed,
        arguments=plan.program.arguments,
        cwd=plan.cwd,
    )
