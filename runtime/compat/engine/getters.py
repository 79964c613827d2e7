"""Values of an engine that programs for DeepSpeed read: counters, sizes, switches."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

from ...comm import comms_log
from ...config.monitor import FlopsProfilerConfig
from ...engine.base import RUN_BY_THE_PROGRAM, EngineBase
from ...engine.step_engine import StepEngine
from ...placement.stage_policy import Placement
from .absent import Fixed, why_absent
from .deepspeed_config import DeepSpeedConfig
from .optimizer import DeepSpeedOptimizer


class DeepSpeedEngine(EngineBase):
    """Interface of both engines for programs for DeepSpeed. Its getters, most of which are methods, are no
    collectives.
    """

    optimizer: DeepSpeedOptimizer | None

    gradient_average = Fixed(
        lambda engine: engine.settings.gradient_allreduce_op == "mean",
        "the ds_config's gradient_allreduce_op says it",
    )
    enable_backward_allreduce = Fixed(
        True, "for backwards that average nothing, open engine.coalesce_grad_reduction()"
    )

    @property
    def _config(self) -> DeepSpeedConfig:
        """Return the settings by the names that they have in DeepSpeed, for programs that read them there."""
        return DeepSpeedConfig(self.settings)

    @property
    def micro_steps(self) -> int:
        """Return the number of micro batches that were stepped since the beginning of the training."""
        return self._progress.micro_steps

    @micro_steps.setter
    def micro_steps(self, count: int) -> None:
        self._progress.micro_steps = count

    @property
    def global_steps(self) -> int:
        """Return the number of optimizer steps since the beginning of the training, skipped ones included."""
        return self._progress.global_steps

    @global_steps.setter
    def global_steps(self, count: int) -> None:
        self._progress.global_steps = count

    @property
    def global_samples(self) -> int:
        """Return the number of samples that all ranks were trained on since the beginning of the training."""
        return self._progress.global_samples

    @global_samples.setter
    def global_samples(self, count: int) -> None:
        self._progress.global_samples = count

    @property
    def skipped_steps(self) -> int:
        """Return the number of optimizer steps that were skipped, for gradients that were not finite."""
        return self._progress.skipped_steps

    @skipped_steps.setter
    def skipped_steps(self, count: int) -> None:
        self._progress.skipped_steps = count

    def was_step_applied(self) -> bool:
        """Whether the last `step()` updated the parameters."""
        return self._was_step_applied

    def get_global_grad_norm(self) -> float | None:
        """Return the last step's gradient norm, before clipping, the same on all ranks;
        None only before the first.
        """
        return self._grad_norm

    def get_type(self) -> list[Any]:
        """Return each parameter group's "type", which a scheduler may have put there;
        0.0 where there is none.
        """
        return [group.get("type", 0.0) for group in self._groups()]

    # These three let Lightning's Fabric call the engine optimizable,
    # so that its optimizer.step() is the engine's.

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's groups; the module's attribute where it has one, as for the next two."""
        return self._optimizers("param_groups")  # type: ignore[no-any-return]

    @property
    def defaults(self) -> dict[str, Any]:
        """Return the optimizer's defaults."""
        return self._optimizers("defaults")  # type: ignore[no-any-return]

    @property
    def state(self) -> Any:
        """Return the optimizer's `state`, in which there is nothing: a rank has shards."""
        return self._optimizers("state")

    def _optimizers(self, name: str) -> Any:
        """Errors: AttributeError where neither the module nor an optimizer has it"""
        owner = self.module if hasattr(self.module, name) or self.optimizer is None else self.optimizer
        return getattr(owner, name)

    def optimizer_name(self) -> str | None:
        """Return what updates the parameters, as its class is called; None if there is no optimizer."""
        return None if self.optimizer is None else self.optimizer.rule.name

    def optimizer_params(self) -> dict[str, Any] | None:
        """Return what the ds_config says of the optimizer, with defaults; None if it says nothing."""
        optimizer = self.settings.optimizer
        return None if optimizer is None else optimizer.params.model_dump()

    def scheduler_name(self) -> str | None:
        """Return the class of the scheduler; None if there is none."""
        return None if self.lr_scheduler is None else type(self.lr_scheduler).__name__

    def scheduler_params(self) -> dict[str, Any] | None:
        """Return what the ds_config says of the scheduler, with defaults; None if it says nothing."""
        scheduler = self.settings.scheduler
        return None if scheduler is None else scheduler.params.model_dump()

    def get_batch_info(self) -> tuple[int, int, int]:
        """Return `train_batch_size()`, `train_micro_batch_size_per_gpu()` and
        `gradient_accumulation_steps()`.
        """
        config = self.settings
        return config.train_batch_size, config.micro_batch_size, config.gradient_accumulation_steps

    def gradient_accumulation_steps(self) -> int:
        """Return the micro batches of one optimizer step."""
        return self.settings.gradient_accumulation_steps

    def log_level(self) -> str | None:
        """Return what the ds_config says; the level is that of the logger dslaunch."""
        return self.settings.origin.given.get("log_level")

    def use_node_local_storage(self) -> bool:
        """Return checkpoint.use_node_local_storage of the ds_config."""
        return self.settings.checkpoint.use_node_local_storage

    def managed_gradient_accumulation(self) -> bool:
        """Whether step() counts micro batches; False: each step() updates."""
        return self.settings.managed_gradient_accumulation

    def gradient_clipping(self) -> float:
        """Return the norm to which gradients are clipped; 0.0 if they are not."""
        return self.settings.gradient_clipping if self.optimizer is None else self.optimizer.clip_grad or 0.0

    def steps_per_print(self) -> int | None:
        """Return after how many optimizer steps the throughput is printed; None for never."""
        return self.settings.steps_per_print

    def wall_clock_breakdown(self) -> bool:
        """Whether the times of forward, backward and step are measured and printed."""
        return self.settings.wall_clock_breakdown

    def dump_state(self) -> bool:
        """Whether the settings are logged at the start."""
        return self.settings.dump_state

    def dataloader_drop_last(self) -> bool:
        """Whether the engine's loader leaves out a last batch that is not full."""
        return self.settings.dataloader_drop_last

    def get_model_parallel_rank(self) -> int:
        """Return this rank's number among those over which a layer is divided."""
        return self._axes.coordinates(self.global_rank)["tp"]

    def get_tensor_parallel_rank(self) -> int:
        """Return get_model_parallel_rank(), under DeepSpeed's other name."""
        return self.get_model_parallel_rank()

    def autotp_size(self) -> int:
        """Return `tensor_parallel.autotp_size`: the ranks over which layers are divided, 0 for none."""
        return 0 if self._axes.tp == 1 else self._axes.tp

    def zero_optimization_stage(self) -> int:
        """Return the ZeRO stage, 0 to 3."""
        return self._policy.stage

    def zero_optimization(self) -> bool:
        """Whether anything is sharded."""
        return self._policy.is_sharded

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether gradients are sharded: at stages 2 and 3."""
        return self._policy.gradients is Placement.SHARDED

    def zero_optimization_partition_weights(self) -> bool:
        """Whether parameters are sharded: at stage 3."""
        return self._policy.parameters is Placement.SHARDED

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Whether `save_16bit_model()` writes the whole model: always."""
        return True

    def zero_reduce_bucket_size(self) -> int:
        """Return the number of elements that are reduced together."""
        return self.settings.zero.reduce_bucket_numel

    def zero_prefetch_bucket_size(self) -> int:
        """Return the number of elements that are gathered together, at stage 3."""
        return self.settings.zero.prefetch_bucket_numel

    def zero_param_persistence_threshold(self) -> int:
        """Return the elements of the largest parameter that stays whole with the others of
        its unit, at stage 3.
        """
        return self.settings.zero.max_whole_numel[0]

    def zero_model_persistence_threshold(self) -> int:
        """Return the number of elements in small parameters that stay whole, at most."""
        return self.settings.zero.max_whole_numel[1]

    def bfloat16_enabled(self) -> bool:
        """Whether parameters are in bfloat16, by the ds_config's section bf16."""
        return self.settings.bf16.enabled

    def fp16_enabled(self) -> bool:
        """Whether parameters are in float16, by the ds_config's section fp16."""
        return self.settings.fp16.enabled

    def fp16_auto_cast(self) -> bool:
        """Whether inputs of the forward are cast to float16."""
        return self.settings.fp16.auto_cast

    def torch_autocast_enabled(self) -> bool:
        """Whether the forward runs under torch.autocast."""
        return self.settings.torch_autocast.enabled

    def torch_autocast_dtype(self) -> torch.dtype | None:
        """Return the data type of operations under torch_autocast; None where that is off."""
        wanted = self.settings.torch_autocast
        return getattr(torch, wanted.dtype) if wanted.enabled else None

    def loss_scale(self) -> float:
        """Return the constant that the ds_config gives; 0 for a loss scale that follows the gradients.

        What it is now is `engine.optimizer.loss_scale`.
        """
        return self.settings.fp16.loss_scale

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss is scaled, by a number that follows the gradients."""
        return self._scaler.is_dynamic

    def initial_dynamic_scale(self) -> float:
        """Return the loss scale at the start."""
        return 2.0**self.settings.loss_scaling.initial_scale_power

    def comm_bytes(self) -> dict[str, int]:
        """Return the bytes that this rank has sent, by kind of collective (ring formulas; see `Meter`)."""
        return self._wire.meter.bytes_by_kind()

    def comm_order_hash(self) -> int:
        """Return a hash of the order of collectives so far; equal on all ranks unless one has gone astray."""
        return self._wire.meter.order_hash

    def get_wall_clock_timers(self) -> dict[str, float]:
        """Return what "fwd", "bwd" and "step" took in the last step, in milliseconds; empty without
        wall_clock_breakdown.
        """
        return self._instruments.times_ms()

    def log_comm_summary(
        self, show_straggler: bool = False, return_dict: bool = False
    ) -> dict[str, Any] | None:
        """Print what the collectives of this process took, as `comms_log.log_summary()`, which see."""
        return comms_log.log_summary(show_straggler, return_dict)

    def flops_profiler_enabled(self) -> bool:
        """Whether one step's forwards are profiled, by the ds_config's section flops_profiler."""
        return self._flops_profiler.enabled

    def flops_profiler_profile_step(self) -> int:
        """Return after how many steps the profile is made."""
        return self._flops_profiler.profile_step

    def flops_profiler_module_depth(self) -> int:
        """Return down to which depth modules are shown; -1 for all."""
        return self._flops_profiler.module_depth

    def flops_profiler_top_modules(self) -> int:
        """Return how many classes of modules are shown at each depth."""
        return self._flops_profiler.top_modules

    def flops_profiler_detailed(self) -> bool:
        """Whether every module is shown."""
        return self._flops_profiler.detailed

    def flops_profiler_output_file(self) -> str | None:
        """Return the file that the profile is written to; None where it is printed."""
        return self._flops_profiler.output_file

    def flops_profiler_recompute_fwd_factor(self) -> float:
        """Return how many forwards a backward repeats, for its FLOPS."""
        return self._flops_profiler.recompute_fwd_factor

    @property
    def _flops_profiler(self) -> FlopsProfilerConfig:
        return self.settings.flops_profiler or FlopsProfilerConfig()

    @property
    def sequence_parallel_size(self) -> int:
        """Return over how many ranks a sequence is divided."""
        return self._axes.sp

    @property
    def seq_dp_world_size(self) -> int:
        """Return how many ranks share parameters: those with other samples or other parts of them."""
        return self._axes.dp * self._axes.sp

    def get_sequence_parallel_group(self) -> Any:
        """Return the process group of the ranks that share this one's samples; None where no sequence is
        divided."""
        sequence = self._domains.sequence
        return None if sequence.is_alone else sequence.group or dist.group.WORLD

    def _consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, Any] | None:
        """Return the module's state_dict in rank 0's host memory, None on other ranks; DeepSpeed's name.

        Order: every rank must call this
        """
        left_out = self._weights.frozen() if exclude_frozen_parameters else set()
        return self._weights.consolidated_state_dict(left_out)

    _zero3_consolidated_16bit_state_dict = _consolidated_16bit_state_dict  # name that older trainers call

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            why = why_absent(name)
            if why is None:
                raise
            raise AttributeError(f"engine.{name}, which DeepSpeed has, is not here: {why}") from error


def _passed_on(name: str) -> Callable[..., Any]:
    @wraps(getattr(StepEngine, name))
    def call(engine: DeepSpeedEngine, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(DeepSpeedEngine, engine), name)(*args, **kwargs)

    return call


# Programs wrap DeepSpeedEngine's own backward() and step(), and read their signatures.
for _name in RUN_BY_THE_PROGRAM:
    setattr(DeepSpeedEngine, _name, _passed_on(_name))
