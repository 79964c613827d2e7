"""Rehearsals of a job with other configurations and on more hosts, for suggestions and ways out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ..errors import LaunchError
from ..fit.answer import DEVICE, HOST, PINNED, Answer
from ..fit.candidates import (
    AUTO,
    MICRO_BATCH,
    MICRO_BATCHES,
    Candidate,
    Placing,
    Setup,
    has_own_batch,
    placing_of,
)
from ..fit.config_file import read_ds_config
from ..fit.devices import find_gpu
from ..fit.finding import FitFinding
from ..fit.forecast import Forecast
from ..fit.job_speeds import of_sheet
from ..fit.mesh_choices import mesh_choices
from ..fit.model import ds_config_of
from ..fit.model_bytes import STATES, Need, holds, model_bytes, room_of, setups_of
from ..fit.rehearse import Variant, rehearse_variants
from ..fit.step_time import whole_step
from ..fit.suggestion import Tried, middle
from ..fit.verdict import OUTSIDE_BYTES
from ..fit.ways_out import WayOut
from ..job.mesh import JobMesh
from .plan_job import PlannedJob

_NO_TIME = "no time is left"
_USUAL = "A100-80"  # the order of its times, nothing hidden, stands for devices whose speeds are not known
LEAST_S = 5.0  # what a rehearsal takes at least


class Attempted(NamedTuple):
    """A configuration to rehearse, on the job's hosts or on more."""

    candidate: Candidate
    num_hosts: int | None = None


class Search:
    """A job that was rehearsed as it is, and what is known of its other configurations."""

    def __init__(
        self, job: PlannedJob, found: FitFinding, *, config: dict[str, Any] | None, margin: float = 0.0
    ) -> None:
        """`config`: the ds_config, None if no argument of the program names one, so that none can be
        replaced; `margin`: the share of each GPU, or of hosts without GPUs, that stays free.
        """
        self._job, self._found, self._config = job, found, config
        self.has_gpus = job.memory.device_bytes is not None
        self._largest = max(found.rehearsed, key=lambda one: sum(size for _, size in one.answer.model))
        model = job.rehearsal.model
        setup = Setup(
            placing=self._placing(),
            is_checkpointed=bool(model and model["is_checkpointed"]),
            mesh=job.mesh,
        )
        world_size = job.plan.world_size
        sizes = model_bytes(
            self._largest.answer, config, setup, world_size=world_size, has_gpus=self.has_gpus
        )
        self.forecast = Forecast(sizes, room_of(job.memory, margin=margin), hosts=job.plan.host_slots)
        self.forecast.saw(sizes.given, self._fullest(found), world_size=world_size)

    @property
    def given(self) -> Candidate:
        """Return the configuration of the job."""
        return self.forecast.sizes.given

    def rank_bytes(self, need: Need) -> int:
        """Return what a rank needs of its GPU with what is outside of torch, or of a host without GPUs with
        what its process has.
        """
        if self.has_gpus:
            return int(need.on_device) + OUTSIDE_BYTES
        return int(need.on_host) + self._job.memory.process_bytes

    @property
    def divides_by_itself(self) -> bool:
        """Tell whether the ds_config divides layers or sequences, which another mesh would contradict."""
        config = self._config or {}
        return any(config.get(key) for key in ("mesh", "tensor_parallel", "sequence_parallel_size"))

    def has_time(self) -> bool:
        """Tell whether another rehearsal may begin."""
        return self._job.in_time().limit_s >= LEAST_S

    def configurations(self, *, has_meshes: bool) -> list[Candidate]:
        """Return all configurations that the job could have, none without a ds_config to replace."""
        if self._config is None:
            return []
        is_switched = self._job.rehearsal.model is not None  # a program's checkpointing is its own
        setups = setups_of(
            meshes=self._meshes() if has_meshes else [self.given.setup.mesh],
            checkpointing=(False, True) if is_switched else (self.given.setup.is_checkpointed,),
            has_gpus=self.has_gpus,
        )
        sizes = self.forecast.sizes
        return list(sizes.configurations(setups, may_change_batch=not has_own_batch(self._config)))

    def seconds(self, candidate: Candidate) -> float:
        """Return about how long a step should take, to compare it with others."""
        one = self._largest
        answer = replace(
            one.answer,
            steps=(self.forecast.work(candidate, one.answer.steps[-1]),),
            model=tuple({**dict(one.answer.model), "num_micro_batches": candidate.num_micro_batches}.items()),
        )
        speeds = self._job.device.speeds
        (times,) = (speeds or of_sheet(find_gpu(_USUAL))).times(
            [replace(one, answer=answer)], self._job.plan.host_slots, num_stages=candidate.setup.num_stages
        )
        whole = whole_step(times)
        return whole.high if speeds is None else middle(whole)  # what is sent counts, not what may hide it

    def rehearse(self, attempts: Sequence[Attempted], *, is_fullest_enough: bool = False) -> list[Tried]:
        """Rehearse the job with each of these configurations.

        `is_fullest_enough`: only the kind of rank that needs most is rehearsed, and stands for the others.
        """
        jobs, variants, failed = list[PlannedJob](), list[Variant](), dict[int, LaunchError]()
        for number, one in enumerate(attempts):
            try:
                job = self._job.changed(mesh=one.candidate.setup.mesh, num_hosts=one.num_hosts)
                variants.append(self._variant(job, one, is_fullest_enough=is_fullest_enough))
            except LaunchError as error:
                job, failed[number] = self._job, error
            jobs.append(job)
        results: list[Any] = [LaunchError(_NO_TIME)] * len(variants)
        if self.has_time():
            results = rehearse_variants(variants, self._job.in_time())
        rest = iter(results)
        return [
            self._tried(job, one, failed.get(number) or next(rest))
            for number, (job, one) in enumerate(zip(jobs, attempts, strict=True))
        ]

    def expected_hosts(self) -> Attempted | None:
        """Return the smallest number of hosts on which the job should fit as it is, or with stage 3."""
        for candidate in self._of_more_hosts():
            num_hosts = self.forecast.hosts_needed(candidate)
            if num_hosts is not None:
                return Attempted(candidate, num_hosts)
        return None

    def on_hosts(self, attempted: Attempted, tried: Tried) -> WayOut | None:
        """Return the number of hosts that was rehearsed, or where the job did not fit there, or could not be
        rehearsed, the one on which it should.
        """
        candidate, num_hosts = attempted
        if tried.finding is None or tried.finding.verdict.fits:
            return self.way_out(tried, num_hosts=num_hosts)
        again = self.forecast.hosts_needed(candidate)
        if again is None or num_hosts is None:
            return None
        return self.way_out(Tried(candidate=candidate, finding=None), num_hosts=max(again, num_hosts + 1))

    def more_hosts(self) -> WayOut | None:
        """Return the smallest number of hosts on which the job fits: by bounds, rehearsed once."""
        attempted = self.expected_hosts()
        if attempted is None:
            return None
        (tried,) = self.rehearse([attempted], is_fullest_enough=True)
        return self.on_hosts(attempted, tried)

    def way_out(self, tried: Tried, *, num_hosts: int | None = None) -> WayOut:
        """Return it as a way out, with what it should need where it was not rehearsed."""
        found = tried.finding
        if found is not None:
            return WayOut(
                candidate=tried.candidate,
                num_hosts=num_hosts,
                is_rehearsed=True,
                device_bytes=tried.device_bytes,
                host_bytes=max(use.needed_bytes for use in found.uses),
            )
        hosts = self._job.plan.host_slots
        per_host = max(one.num_ranks for one in hosts)
        world_size = None if num_hosts is None else num_hosts * self._job.plan.world_size // len(hosts)
        need = self.forecast.expected(tried.candidate, world_size=world_size)
        return WayOut(
            candidate=tried.candidate,
            num_hosts=num_hosts,
            is_rehearsed=False,
            device_bytes=self.rank_bytes(need),
            host_bytes=int(per_host * (need.on_host + self._job.memory.process_bytes)),
        )

    def _of_more_hosts(self) -> list[Candidate]:
        """Return the configuration of the job, and with stage 3, if that can be said to it."""
        as_given = self.given
        setup = as_given.setup
        if self._config is None or setup.num_stages > 1 or setup.placing.stage == 3:
            return [as_given]
        sharded = Setup(
            placing=Placing(stage=3, has_optimizer_on_host=setup.placing.has_optimizer_on_host),
            is_checkpointed=setup.is_checkpointed,
            mesh=setup.mesh,
        )
        other = Candidate(
            setup=sharded,
            micro_batch_size=as_given.micro_batch_size,
            num_micro_batches=as_given.num_micro_batches,
        )
        return [as_given, other]

    def _placing(self) -> Placing:
        """Return the placing of the job, as its ds_config or its rehearsal tells it."""
        if self._config is not None:
            return placing_of(self._config)
        answer = self._largest.answer
        is_on_host = (
            self.has_gpus and not holds(answer, STATES, DEVICE) and holds(answer, STATES, HOST, PINNED)
        )
        return Placing(stage=dict(answer.model).get("stage", 0), has_optimizer_on_host=is_on_host)

    def _meshes(self) -> list[JobMesh | None]:
        if self.divides_by_itself:
            return [self.given.setup.mesh]
        named = tuple(name for name, _ in self._job.options.mesh.sizes if name not in ("dp", "ep"))
        if not named and self._job.rehearsal.model is not None:
            named = ("tp",)
        return mesh_choices(self._job.mesh, axes=named, hosts=self._job.plan.host_slots)

    def _variant(self, job: PlannedJob, one: Attempted, *, is_fullest_enough: bool) -> Variant:
        candidate = one.candidate
        config = None if self._config is None else candidate.config(self._config)
        if config is not None and one.num_hosts is not None:
            config.pop("train_batch_size", None)  # each rank keeps its samples
        kinds = job.kinds
        if is_fullest_enough:
            fullest = max(self._found.rehearsed, key=lambda kind: _peak(kind.answer, self.has_gpus))
            if job.num_stages == 1:  # a stage learns from the stages before it what it is sent
                kinds = tuple(kind for kind in kinds if kind.place == fullest.place) or kinds[:1]
        batch = None
        if job.rehearsal.model is not None:
            batch = f"{candidate.micro_batch_size}x{job.rehearsal.model['batch'].partition('x')[2]}"
        name = candidate.text + ("" if one.num_hosts is None else f", {one.num_hosts} hosts")
        return Variant(
            plan=job.plan,
            kinds=kinds,
            name=name,
            config=config,
            batch=batch,
            is_checkpointed=None if batch is None else candidate.setup.is_checkpointed,
        )

    def _tried(self, job: PlannedJob, one: Attempted, result: tuple[Answer, ...] | LaunchError) -> Tried:
        candidate = one.candidate
        try:
            if isinstance(result, LaunchError):
                raise result
            found = job.find(result * len(job.kinds) if len(result) < len(job.kinds) else result)
        except LaunchError as error:
            return Tried(candidate=candidate, finding=None, why_not=str(error).partition("; plan its")[0])
        self.forecast.saw(candidate, self._fullest(found), world_size=job.plan.world_size)
        return Tried(candidate=candidate, finding=found)

    def _fullest(self, found: FitFinding) -> Answer:
        return max((one.answer for one in found.rehearsed), key=lambda answer: _peak(answer, self.has_gpus))


def config_of(job: PlannedJob) -> dict[str, Any]:
    """Return the ds_config that the program's arguments name, or that of a model in its place.

    Sizes of batches that the program fills in, and takes from arguments that are known, are left out.
    Errors: LaunchError if they name none, or it cannot be read
    """
    if job.rehearsal.model is not None:
        return dict(job.rehearsal.model["config"])
    config = read_ds_config(ds_config_of(job.plan.program.arguments), job.plan.cwd)
    named = {key for key, _ in job.rehearsal.mapped}
    return {
        key: value
        for key, value in config.items()
        if value != AUTO or key not in named.intersection((MICRO_BATCH, MICRO_BATCHES))
    }


def _peak(answer: Answer, has_gpus: bool) -> int:
    worst = answer.worst(DEVICE) if has_gpus else None
    return answer.host_bytes if worst is None else worst.peak(DEVICE).num_bytes
