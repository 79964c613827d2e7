"""bf16, fp16 and data_types: what parameters, gradients and buffers are; torch_autocast:
what operations are.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator

from .keys.value import Bool, DtypeName, LossScale, Positive, ScalePower, Texts, choice
from .section import Section


class Bf16Config(Section):
    """bfloat16 parameters and gradients with a float32 master copy; off means float32 throughout."""

    enabled: Bool = False
    check_grad_overflow: Bool = True
    """Skip a step whose gradients are infinite or NaN."""


class Fp16Config(Section):
    """float16 parameters and gradients with a float32 master copy, and a scaled loss."""

    enabled: Bool = False
    auto_cast: Bool = False
    loss_scale: LossScale = 0.0
    """0: dynamic."""
    initial_scale_power: ScalePower = 16
    loss_scale_window: Positive = 1000
    hysteresis: Positive = 2
    consecutive_hysteresis: Bool = False
    min_loss_scale: LossScale = 1.0


class DataTypesConfig(Section):
    """In which dtype gradients are added up over micro batches, and what buffers become;
    None: as they are.
    """

    grad_accum_dtype: DtypeName | None = None
    buffer_dtype: DtypeName | None = None
    param_dtype: DtypeName | None = None
    """None: as bf16 or fp16 say, which it may not contradict."""
    keep_in_fp32_modules: Texts | None = None
    """Patterns of the buffers that are float32 in a model of 16 bits; None: those that the model lists."""


_AUTOCAST_DTYPES: dict[str, str] = {
    **dict.fromkeys(("bfloat16", "bf16", "torch.bfloat16"), "bfloat16"),
    **dict.fromkeys(("float16", "fp16", "half", "torch.float16"), "float16"),
}
AUTOCAST_DTYPE = choice(*_AUTOCAST_DTYPES)


def _read_autocast_dtype(value: object) -> str:
    return _AUTOCAST_DTYPES[AUTOCAST_DTYPE.read(value)]


class TorchAutocastConfig(Section):
    """float32 parameters, gradients and states; the forward runs under torch.autocast."""

    enabled: Bool = False
    dtype: Annotated[Literal["bfloat16", "float16"], BeforeValidator(_read_autocast_dtype)] = "bfloat16"

    @property
    def loss_scaling(self) -> Fp16Config:
        """How the loss is scaled: for float16 with the numbers of torch.amp.GradScaler, else not at all."""
        is_half = self.enabled and self.dtype == "float16"
        return Fp16Config(enabled=is_half, loss_scale_window=2000, hysteresis=1)
