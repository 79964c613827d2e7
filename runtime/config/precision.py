"""bf16, fp16 and data_types: what parameters, gradients and buffers are; torch_autocast:
what operations are.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator

from .keys.value import (
    Bool,
    DtypeName,
    LossScale,
    OptimizerStateDtype,
    Positive,
    ScalePower,
    StateDtype,
    Texts,
    choice,
)
from .section import Section


class Bf16Config(Section):
    """bfloat16 parameters and gradients, with a float32 master copy unless the keys below say bfloat16; off
    means float32 throughout.
    """

    enabled: Bool = False
    """bfloat16 parameters and gradients with a float32 master copy (old name: bfloat16)"""
    check_grad_overflow: Bool = True
    """skip a step whose gradients are infinite or NaN; true if left out. False: it is applied, without
    clipping"""
    bf16_master_weights_and_grads: Bool = False
    """as data_types.master_dtype bf16"""
    bf16_optimizer_states: Bool = False
    """as data_types.optimizer_state_dtype bf16"""


class Fp16Config(Section):
    """float16 parameters and gradients with a float32 master copy, and a scaled loss."""

    enabled: Bool = False
    """float16 parameters and gradients with a float32 master copy, and a scaled loss"""
    auto_cast: Bool = False
    """floating-point inputs of the model become float16"""
    loss_scale: LossScale = 0.0
    """a constant; 0, which is the default: as large as the gradients allow"""
    initial_scale_power: ScalePower = 16
    """it begins at 2 to the power of this; 16 if left out"""
    loss_scale_window: Positive = 1000
    """it is doubled after so many steps without inf or NaN; 1000 if left out"""
    hysteresis: Positive = 2
    """so many steps with inf or NaN halve it; 2 if left out"""
    consecutive_hysteresis: Bool = False
    """a good step between them starts the count again"""
    min_loss_scale: LossScale = 1.0
    """it is an error if half of that were needed; 1 if left out"""


class DataTypesConfig(Section):
    """Dtype in which gradients are added up over micro batches, and dtypes of buffers, masters and states;
    None: as they are.
    """

    grad_accum_dtype: DtypeName | None = None
    """in which dtype gradients of micro batches are added up: fp32, or the model's; left out: fp32 at stages
    2 and 3, where it costs 4/N bytes for each, and the model's at stages 0 and 1, where it would cost 4"""
    buffer_dtype: DtypeName | None = None
    """what floating-point buffers become; left out: they stay what they are"""
    master_dtype: StateDtype | None = None
    """what the optimizer updates: fp32, a copy of 4 bytes for each bfloat16 parameter, or bf16, the parameter
    itself, which is rounded by random bits; gradients are then added up in bfloat16, unless grad_accum_dtype
    says fp32; fp32 if left out; for Adam, AdamW, Lion, Adagrad and SGD"""
    optimizer_state_dtype: OptimizerStateDtype | None = None
    """what the optimizer remembers of each element: fp32, which takes 4 bytes, bf16, which takes 2, or 8bit,
    which takes 1 and 1/64; the last two are rounded by random bits; fp32 if left out; for Adam and AdamW, all
    but 8bit also for Lion, Adagrad and SGD"""
    param_dtype: DtypeName | None = None
    """must be what bf16.enabled or fp16.enabled set, and float32 without them"""
    keep_in_fp32_modules: Texts | None = None
    """patterns of the names of buffers that are float32 in a model of 16 bits, whatever buffer_dtype is; *
    stands for any characters. Left out or "auto": as a model of transformers lists; []: none"""


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
    """float32 parameters and gradients; the forward runs under torch.autocast"""
    dtype: Annotated[Literal["bfloat16", "float16"], BeforeValidator(_read_autocast_dtype)] = "bfloat16"
    """"bfloat16" (if left out) or "float16", with a scaled loss"""

    @property
    def loss_scaling(self) -> Fp16Config:
        """Scale of the loss: for float16 with the numbers of torch.amp.GradScaler, else none."""
        is_half = self.enabled and self.dtype == "float16"
        return Fp16Config(enabled=is_half, loss_scale_window=2000, hysteresis=1)
