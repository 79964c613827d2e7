"""Settings that do not work with a pipeline, each refused by its name."""

from __future__ import annotations

from ..comm.agreement import fail_together
from ..config import Config
from ..config.pipeline import PipelineConfig
from ..errors import ConfigError
from ..experts.layer import MoE
from ..placement.stage_policy import Placement, Policy, policy_for_stage
from ..step.flat_optimizer import FlatOptimizer
from .module import StagesModule
from .schedule import Shape, shape_of
from .tied import tied_over_stages

MICRO_BATCH = "micro_batch"


def check_fits(module: StagesModule, config: Config, optimizer: FlatOptimizer | None) -> None:
    """Errors: ConfigError for a model or a setting that cannot be trained in stages"""
    _check_when(module, config.pipeline or PipelineConfig(), policy_for_stage(config.zero.stage))
    name = module.shape.schedule
    if module.shape.splits_backward and module.activation_checkpoint_interval:
        raise ConfigError(
            f"activation_checkpoint_interval {module.activation_checkpoint_interval} with the schedule "
            f"{name}: its backward comes in two halves, each of which would compute the activations again; "
            "leave it out, or take 1f1b"
        )
    offload = config.zero.offload_optimizer
    for key, is_on in (
        ("super_offload", offload.super_offload),
        ("delayed_update.enabled", offload.delayed_update.enabled),
    ):
        if is_on:
            raise ConfigError(
                f"zero_optimization.offload_optimizer.{key} true with a PipelineModule: a pipeline has one "
                "step for all micro batches; leave it out"
            )
    if config.zero.offload_param.is_on:
        raise ConfigError(
            f"zero_optimization.offload_param.device {config.zero.offload_param.device!r} with a "
            "PipelineModule is not available; leave it out: a rank has the parameters of its stages only"
        )
    if config.rerun_outliers:
        raise ConfigError(
            f"rerun_outliers {config.rerun_outliers:g} with a PipelineModule is not available; leave it out: "
            "no rank computes a micro batch alone"
        )
    for key, size in (
        ("zero_hpz_partition_size", config.zero.hpz_partition_size),
        ("mics_shard_size", config.zero.mics_shard_size),
    ):
        if size is not None:
            raise ConfigError(
                f"zero_optimization.{key} {size} with a PipelineModule is not available; leave it out"
            )
    _check_tied_experts(module)
    tied = tied_over_stages(module)
    if tied and optimizer is not None and not optimizer.rule.steps_by_sub_buffer:
        raise ConfigError(
            f"optimizer {optimizer.rule.name} with the tied layer '{tied[0][0]}' on several stages: it wants "
            "to see whole parameters, and those lie on other ranks than the rest; take Adam or SGD"
        )


def _check_tied_experts(module: StagesModule) -> None:
    """Refuse experts in tied layers: experts and tied layers are shared by different ranks.

    Order: a collective
    """
    all_tied, problem = tied_over_stages(module), ""
    for key, stages in all_tied:
        layers = module.tied_modules[key].modules() if key in module.tied_modules else ()
        if any(isinstance(one, MoE) and one.ep_size > 1 for one in layers):
            problem = (
                f"the tied layer '{key}' lies on the stages {', '.join(map(str, stages))} and has experts on "
                "different ranks: tie a layer without them, give its MoE ep_size=1, or cut the model so that "
                "all of its uses are on one stage"
            )
    if all_tied:
        fail_together(problem)


def _check_when(module: StagesModule, how: PipelineConfig, policy: Policy) -> None:
    halves = f"with the schedule {module.shape.schedule}: its backward comes in two halves"
    if how.reduce == MICRO_BATCH:
        key, tied = 'pipeline.reduce "micro_batch"', tied_over_stages(module)
        if policy.gradients is Placement.REPLICATED:
            raise ConfigError(
                f"{key} at stage {policy.stage}: every rank keeps whole gradients; leave it out, or write "
                "stage 2 or 3"
            )
        if module.shape.splits_backward:
            raise ConfigError(f"{key} {halves}, and no micro batch ends in one; leave it out, or take 1f1b")
        if tied:
            raise ConfigError(
                f"{key} with the tied layer '{tied[0][0]}' on several stages: these come to a micro batch at "
                "different times, and would wait for each other; leave it out"
            )
    if how.unshard == MICRO_BATCH:
        key = 'pipeline.unshard "micro_batch"'
        if policy.parameters is Placement.REPLICATED:
            raise ConfigError(
                f"{key} at stage {policy.stage}: every rank has whole parameters; leave it out, or write "
                "stage 3"
            )
        if module.shape.splits_backward:
            raise ConfigError(f"{key} {halves}, and one needs what the other had; leave it out, or take 1f1b")


def fitting_shape(shape: Shape, how: PipelineConfig) -> Shape:
    """Return the module's shape with the ds_config's schedule, which must have the stages on the same ranks.

    Errors: ConfigError if it has them on other ranks
    """
    per_rank = shape.per_rank if how.stages_per_rank is None else how.stages_per_rank
    if per_rank == shape.per_rank and how.schedule in (None, shape.schedule):
        return shape
    wanted = _shape_or_none(how.schedule or shape.schedule, shape.num_ranks, per_rank)
    stages = range(shape.num_stages)
    if (
        wanted is None
        or wanted.num_stages != shape.num_stages
        or [wanted.owner(one) for one in stages] != [shape.owner(one) for one in stages]
    ):
        given = {"schedule": how.schedule, "stages_per_rank": how.stages_per_rank}
        said = ", ".join(f"pipeline.{key} {value!r}" for key, value in given.items() if value is not None)
        raise ConfigError(
            f"{said} does not have the stages where the PipelineModule has them, which was built with "
            f"schedule={shape.schedule!r} and {shape.per_rank} on each rank; give them to "
            "PipelineModule(schedule=..., stages_per_rank=...)"
        )
    return wanted


def _shape_or_none(schedule: str, num_ranks: int, per_rank: int) -> Shape | None:
    try:
        return shape_of(schedule, num_ranks=num_ranks, per_rank=per_rank)
    except ConfigError:
        return None
