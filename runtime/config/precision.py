"""bf16, fp16 and data_types: the data types of parameters, gradients and buffers."""

from __future__ import annotations

from .section import Section
from .value import Bool, Count, DtypeName, Positive, Size


class Bf16Config(Section):
    """bfloat16 parameters and gradients with a float32 master copy; off means float32 throughout."""

    enabled: Bool = False


class Fp16Config(Section):
    """float16 parameters and gradients with a float32 master copy, and a scaled loss."""

    enabled: Bool = False
    auto_cast: Bool = False
    loss_scale: Size = 0.0
    """0: dynamic."""
    initial_scale_power: Count = 16
    loss_scale_window: Positive = 1000
    hysteresis: Positive = 2
    consecutive_hysteresis: Bool = False
    min_loss_scale: Size = 1.0


class DataTypesConfig(Section):
    """In which dtype gradients are added up over micro batches, and what buffers become; None: as they are."""

    grad_accum_dtype: DtypeName | None = None
    buffer_dtype: DtypeName | None = None
