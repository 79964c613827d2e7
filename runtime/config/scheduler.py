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
    """lr of the first two steps, 0 if left out"""
    warmup_max_lr: Lrs | None = None
    """left out: each group's own lr (WarmupDecayLR: 0.001)"""
    warmup_num_steps: Positive = 1000
    """1000 if left out; above 0, and 1 counts as 2"""
    warmup_type: WarmupType = "log"
    '''"log" (if left out) or "linear"'''
    last_batch_iteration: Start = -1
    """-1: from the start"""


class WarmupDecayParams(Section):
    """Warm-up as WarmupLR, then down to 0 in a straight line at total_num_steps."""

    total_num_steps: Positive
    """must be given"""
    warmup_min_lr: Lrs = 0.0
    warmup_max_lr: Lrs | None = 0.001
    warmup_num_steps: Positive = 1000
    warmup_type: WarmupType = "log"
    last_batch_iteration: Start = -1


class WarmupCosineParams(Section):
    """Warm-up to each group's own lr, then half a cosine down to cos_min_ratio of it."""

    total_num_steps: Positive
    warmup_min_ratio: Ratio = 0.0
    """0 if left out"""
    warmup_num_steps: Positive = 1000
    cos_min_ratio: Ratio = 0.0001
    """0.0001 if left out"""
    warmup_type: WarmupType = "log"
    last_batch_iteration: Start = -1


class OneCycleParams(Section):
    """Up from cycle_min_lr to cycle_max_lr and back once, then decay; momentum moves the other way."""

    cycle_min_lr: Lrs
    """must be given"""
    cycle_max_lr: Lrs
    """must be given"""
    decay_lr_rate: Size = 0.0
    """0 if left out"""
    cycle_first_step_size: Positive = 2000
    """2000 if left out"""
    cycle_second_step_size: Count | None = None
    """left out: as the first; 0: none"""
    cycle_first_stair_count: Count = 0
    """0, no stairs, if left out"""
    cycle_second_stair_count: Count | None = None
    """left out: as the first"""
    decay_step_size: Count = 0
    """0, no decay, if left out"""
    cycle_momentum: Bool = True
    """true if left out; needs an optimizer with betas"""
    cycle_min_mom: Moms = 0.8
    """0.8 if left out"""
    cycle_max_mom: Moms = 0.9
    """0.9 if left out"""
    decay_mom_rate: Number = 0.0
    """0 if left out"""
    last_batch_iteration: Start = -1


class LRRangeTestParams(Section):
    """An lr that grows from lr_range_test_min_lr without end, to see where training breaks."""

    lr_range_test_min_lr: Lrs = 1e-3
    """0.001 if left out"""
    lr_range_test_step_size: Positive = 2000
    """2000 if left out"""
    lr_range_test_step_rate: Size = 1.0
    """1 if left out"""
    lr_range_test_staircase: Bool = False
    """false if left out"""
    last_batch_iteration: Start = -1


class TorchSchedulerParams(Section):
    """The keyword arguments of a class of torch.optim.lr_scheduler, in `model_extra`."""

    model_config = ConfigDict(extra="allow")


class SchedulerConfig(Section):
    """The scheduler to build; the class of `params` follows from `type`."""

    type: str
    """WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest, or a class of
    torch.optim.lr_scheduler"""
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
