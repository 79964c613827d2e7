"""The engines that `initialize()` returns: those of the runtime, with what programs for DeepSpeed ask."""

from __future__ import annotations

from torch import Tensor

from ...engine.stages_engine import StagesEngine
from ...engine.step_engine import StepEngine
from ..pipeline.module import PipelineModule
from ..pipeline.topology import PipelineParallelGrid
from .getters import DeepSpeedEngine


class Engine(DeepSpeedEngine, StepEngine):
    """A model that trains itself with `engine(batch)`, `engine.backward(loss)` and `engine.step()`.

    It has the methods of DeepSpeed's engine, hence so many. Attributes that it does not have itself are the
    module's. Every call of `step()` ends a micro batch. At a gradient accumulation boundary it then takes one
    optimizer step, and steps the scheduler.
    """


class PipelineEngine(DeepSpeedEngine, StagesEngine):
    """A model in stages: `train_batch()` and `eval_batch()` in place of `engine(batch)`, `backward()` and
    `step()`.

    Of a batch, gradient_accumulation_steps micro batches pass through the stages. Sharded parameters are
    whole, and gradients are summed on each rank, from the first micro batch to the last, unless the
    ds_config's `pipeline` section says otherwise.
    """

    module: PipelineModule

    @property
    def grid(self) -> PipelineParallelGrid:
        """Return this rank's place and groups."""
        return self.module.mpu()

    @property
    def num_stages(self) -> int:
        """Return over how many ranks a copy of the model is cut."""
        return self.module.num_stages

    @property
    def stage_id(self) -> int:
        """Return the index of this rank's stage."""
        return self.module.stage_id

    @property
    def prev_stage(self) -> int:
        """Return the place before this one along the pipeline; -1 before the first."""
        return self.stage_id - 1

    @property
    def next_stage(self) -> int:
        """Return the place after this one; their number after the last."""
        return self.stage_id + 1

    @property
    def is_pipe_parallel(self) -> bool:
        """Whether there are several stages."""
        return self._axes.pp > 1

    @property
    def is_data_parallel(self) -> bool:
        """Whether several ranks train the same layers."""
        return self._axes.dp > 1

    @property
    def is_model_parallel(self) -> bool:
        """Whether layers are divided over ranks."""
        return self._axes.tp > 1

    @property
    def micro_batch_size(self) -> int:
        """Return the samples of a micro batch."""
        return self.settings.micro_batch_size

    def get_pipeline_parallel_rank(self) -> int:
        """Return `stage_id`."""
        return self.stage_id

    def get_additional_losses(self) -> dict[str, Tensor] | None:
        """Return the means of the last batch's losses beside the loss that is trained, if the module has
        any.
        """
        return self.agg_additional_losses

    def reset_activation_shape(self) -> None:
        """Do nothing: other shapes of inputs are noticed."""

    def set_has_attention_mask(self, value: bool) -> None:
        """Do nothing: a tensor that takes no gradient is noticed."""
