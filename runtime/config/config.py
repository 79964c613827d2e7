"""The configuration of one training run, checked and complete."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from .activation import ActivationConfig
from .checkpoint import CheckpointConfig
from .experts import ExpertParallelConfig
from .keys.value import Bool, Count, DtypeName, Interval, Positive, Size, choice
from .mesh import MeshConfig
from .monitor import (
    CommsLoggerConfig,
    CsvConfig,
    FlopsProfilerConfig,
    TensorBoardConfig,
    TimersConfig,
    WandbConfig,
)
from .offload import AioConfig
from .optimizer import OptimizerConfig
from .pipeline import PipelineConfig
from .precision import Bf16Config, DataTypesConfig, Fp16Config, TorchAutocastConfig
from .scheduler import SchedulerConfig
from .section import Section
from .sequence import SequenceConfig
from .tensor import TensorParallelConfig
from .zero import ZeroConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigOrigin:
    """Source of a Config, and how it was read. Two that mean the same are equal, wherever they come from."""

    name: str = field(compare=False)
    """Name in messages: a path, or "ds_config" for a dict."""
    given: dict[str, Any] = field(compare=False, repr=False)
    """Values of the source, as dicts, lists and scalars; without "auto" values where the
    reader was lenient.
    """
    is_lenient: bool = field(default=False, compare=False)
    """Whether the program was written for DeepSpeed, see `load_config`."""


class Config(Section):
    """Everything a ds_config says, with the defaults filled in.

    Units: batch sizes count samples; gradient_clipping is a global norm, 0 is off; steps are optimizer steps.
    """

    origin: ConfigOrigin = Field(exclude=True)
    world_size: Positive = Field(exclude=True)

    train_batch_size: Positive
    """samples for one optimizer step, over all ranks"""
    micro_batch_size: Positive = Field(alias="train_micro_batch_size_per_gpu")
    """samples for one forward and backward on one rank"""
    gradient_accumulation_steps: Positive
    """forward and backward passes for one optimizer step"""
    gradient_clipping: Size = 0.0
    """largest global gradient norm; 0 or left out: no clipping"""
    max_skipped_steps: Count | None = None
    """an error after so many steps in a row whose gradients are infinite or NaN; 0: any number; 1000 if left
    out where the loss is scaled, else 100; ours, not DeepSpeed's"""
    rerun_outliers: Size | None = None
    """a step whose gradients are infinite or NaN where the loss is not scaled, or whose norm is so many
    standard deviations above that of the last steps, has each rank compute its last micro batch again, to
    name a host that computes wrong; 10 is a good number; 0 or left out: off; ours, not DeepSpeed's"""
    steps_per_print: Interval = None
    """optimizer steps between two lines of progress; 0 or left out: none"""
    wall_clock_breakdown: Bool = False
    """rank 0 prints what forward, backward and step took, for each optimizer step"""
    dump_state: Bool = False
    """rank 0 prints the whole configuration in effect at the start, as JSON"""
    dataloader_drop_last: Bool = False
    """leave out the last micro batch where it is not full"""
    gradient_allreduce_op: Annotated[Literal["mean", "sum"], BeforeValidator(choice("mean", "sum").read)] = (
        "mean"
    )
    """"mean" (if left out) or "sum" of the gradients of the ranks that have samples of their own"""
    managed_gradient_accumulation: Bool = True
    """true if left out; false: every step() updates, after however many backwards, each of which has the
    share of gradient_accumulation_steps"""
    optimizer: OptimizerConfig | None = None
    scheduler: SchedulerConfig | None = None
    bf16: Bf16Config = Bf16Config()
    fp16: Fp16Config = Fp16Config()
    torch_autocast: TorchAutocastConfig = TorchAutocastConfig()
    data_types: DataTypesConfig = DataTypesConfig()
    communication_data_type: DtypeName | None = None
    """in which dtype gradients are averaged; left out: that of the parameters (gloo adds up in float32 all
    the same)"""
    zero: ZeroConfig = Field(default=ZeroConfig(), alias="zero_optimization")
    checkpoint: CheckpointConfig = CheckpointConfig()
    aio: AioConfig = AioConfig()
    activation_checkpointing: ActivationConfig | None = None
    tensor_parallel: TensorParallelConfig | None = None
    mesh: MeshConfig | None = None
    """Axes that the launcher, the ds_config and the program give; None: nothing but tp at most."""
    pipeline: PipelineConfig | None = None
    expert_parallel: ExpertParallelConfig | None = None
    use_data_before_expert_parallelism: Bool | None = None
    """ranks that hold the same experts are consecutive ones; else those are that hold different ones"""
    sequence_parallel_size: Positive | None = None
    """so many neighbours have the same samples, each another part of their sequences; 1 if left out"""
    data_parallel_size: Positive | None = None
    """must be the number of ranks without those neighbours; DeepSpeed needs both"""
    sequence: SequenceConfig | None = None
    """Sequence settings; None where no sequence is divided."""
    tensorboard: TensorBoardConfig | None = None
    csv_monitor: CsvConfig | None = None
    wandb: WandbConfig | None = None
    comms_logger: CommsLoggerConfig | None = None
    flops_profiler: FlopsProfilerConfig | None = None
    timers: TimersConfig | None = None

    @property
    def tp_size(self) -> int:
        """Over how many ranks layers are divided; 1: over none."""
        return 1 if self.tensor_parallel is None else self.tensor_parallel.size

    @property
    def sp_size(self) -> int:
        """Over how many ranks sequences are divided; 1: over none."""
        return self.sequence_parallel_size or 1

    @property
    def loss_scaling(self) -> Fp16Config:
        """Scale of the loss, if there is one."""
        return self.fp16 if self.fp16.enabled else self.torch_autocast.loss_scaling

    @property
    def checks_overflow(self) -> bool:
        """Whether a step with gradients that are infinite or NaN is skipped."""
        return self.bf16.check_grad_overflow or not self.bf16.enabled

    def describe(self) -> dict[str, Any]:
        """The configuration in effect, in DeepSpeed's spellings; `load_config` reads it back
        as the same Config.
        """
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)
