"""scheduler: which one, and its parameters."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict

from .keys.value import Bool, Count, Lrs, Moms, Number, Positive, Ratio, Size, Start, choice
from .section import Section

WARMUP_TYPES = ("log", "linear")
WarmupType = Annotated[Literal["log", "linear"], BeforeValidator(choice(*WARMUP_TYPES).read)]


class WarmupParams(Section):
    """From warmup_min_lr up to warmup_max_lr (None: each parameter group's own lr), then level."""

    warmup_min_lr: Lrs = 0.0
    warmup_max_lr: Lrs | None = None
    warmup_num_steps: Positive = 1000
    warmup_type: WarmupType = "log"
    last_batch_iteration: Start = -1


class WarmupDecayParams(Section):
    """Warm-up as WarmupLR, then down to 0 in a straight line at total_num_steps."""

    total_num_steps: Positive
    warmup_min_lr: Lrs = 0.0
    warmup_max_lr: Lrs = 0.001
    warmup_num_steps: Positive = 1000
    warmup_type: WarmupType = "log"
    last_batch_iteration: Start = -1


class WarmupCosineParams(Section):
    """Warm-up to each group's own lr, then half a cosine down to cos_min_ratio of it."""

    total_num_steps: Positive
    warmup_min_ratio: Ratio = 0.0
    warmup_num_steps: Positive = 1000
    cos_min_ratio: Ratio = 0.0001
    warmup_type: WarmupType = "log"
    last_batch_iteration: Start = -1


class OneCycleParams(Section):
    """Up from cycle_min_lr to cycle_max_lr and back once, then decay; momentum moves the other way."""

    cycle_min_lr: Lrs
    cycle_max_lr: Lrs
    decay_lr_rate: Size = 0.0
    cycle_first_step_size: Positive = 2000
    cycle_second_step_size: Count | None = None  # 0: there is no way down
    cycle_first_stair_count: Count = 0
    cycle_second_stair_count: Count | None = None
    decay_step_size: Count = 0
    cycle_momentum: Bool = True
    cycle_min_mom: Moms = 0.8
    cycle_max_mom: Moms = 0.9
    decay_mom_rate: Number = 0.0
    last_batch_iteration: Start = -1


class LRRangeTestParams(Section):
    """An lr that grows from lr_range_test_min_lr without end, to see where training breaks."""

    lr_range_test_min_lr: Lrs = 1e-3
    lr_range_test_step_size: Positive = 2000
    lr_range_test_step_rate: Size = 1.0
    lr_range_test_staircase: Bool = False
    last_batch_iteration: Start = -1


class TorchSchedulerParams(Section):
    """The keyword arguments of a class of torch.optim.lr_scheduler, in `model_extra`."""

    model_config = ConfigDict(extra="allow")


class SchedulerConfig(Section):
    """The scheduler to build; the class of `params` follows from `type`."""

    type: str
    params: (
        WarmupParams
        | WarmupDecayParams
        | WarmupCosineParams
        | OneCycleParams
        | LRRangeTestParams
        | TorchSchedulerParams
    )


PARAMS_OF: dict[str, type[Section]] = {
    "WarmupLR": WarmupParams,
    "WarmupDecayLR": WarmupDecayParams,
    "WarmupCosineLR": WarmupCosineParams,
    "OneCycle": OneCycleParams,
    "LRRangeTest": LRRangeTestParams,
}
