"""What DeepSpeed trains and saves for test_deepspeed_import.py; the model and the data are the
same there and here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.runtime.models import GLOBAL_BATCH

NUM_RANKS = 2
BEFORE, AFTER = 4, 3  # steps before the checkpoint, and after it
TAG = f"global_step{BEFORE}"
CLIENT_STATE = {"epoch": 3, "note": "kept"}
CLIPPING = 0.5
WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 6, "warmup_max_lr": 0.02}}
ADAMW = {"lr": 0.01, "weight_decay": 0.1, "torch_adam": True}


class Tied(nn.Module):
    """Widths 7, 15, 17, so no shard ends where a parameter does; a tied weight, a frozen layer,
    two kinds of buffers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 15)
        self.square = nn.Linear(15, 15)
        self.frozen = nn.Linear(15, 17)
        self.frozen.requires_grad_(False)
        self.again = nn.Linear(15, 15)
        self.again.weight = self.square.weight
        self.back = nn.Linear(17, 15)
        self.last = nn.Linear(15, 1)
        self.register_buffer("shift", torch.arange(15) / 8)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = torch.tanh(self.square(self.first(x)) + self.shift.to(x.dtype))
        x = torch.tanh(self.again(x))
        result: Tensor = self.last(self.back(torch.tanh(self.frozen(x))))
        return result


def make_tied(seed: int) -> tuple[Tied, list[dict[str, Any]]]:
    """Return a model, and its parameters in two groups."""
    torch.manual_seed(seed)
    model = Tied()
    trained = [param for param in model.parameters() if param.requires_grad]
    groups = [
        {"params": [param for param in trained if param.ndim > 1]},
        {"params": [param for param in trained if param.ndim == 1], "weight_decay": 0.0},
    ]
    return model, groups


@dataclass(frozen=True)
class Case:
    """One training run of DeepSpeed's, and the checkpoint that it leaves in a folder of this name."""

    name: str
    stage: int
    dtype: torch.dtype = torch.float32
    zero: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    sgd: bool = False  # a client's optimizer
    is_universal: bool = False  # converted, too: <name>/<TAG>_universal

    @property
    def is_exported(self) -> bool:
        """Whether DeepSpeed's zero_to_fp32 takes it: not without ZeRO, nor from its BF16_Optimizer."""
        return self.stage > 0 and "data_types" not in self.more

    @property
    def kinds(self) -> tuple[str, ...]:
        """The states of the optimizer."""
        return ("momentum_buffer",) if self.sgd else ("exp_avg", "exp_avg_sq")

    def config(self) -> dict[str, Any]:
        """DeepSpeed's."""
        precision = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(self.dtype)
        return {
            "train_batch_size": GLOBAL_BATCH,
            "gradient_clipping": CLIPPING,
            "zero_allow_untested_optimizer": True,
            "optimizer": {"type": "AdamW", "params": dict(ADAMW)},
            "scheduler": WARMUP,
            **({precision: {"enabled": True}} if precision else {}),
            "zero_optimization": {"stage": self.stage, **self.zero},
            **self.more,
        }


BF16 = torch.bfloat16
# DeepSpeed divides the gradients of a step at whose end the scale grows by the new scale (stage_1_and_2.py:
# `_update_scale` comes before `unscale_and_clip_grads`); so does no step here between the checkpoint and the
# last loss: it grows in steps 3 and 6, counted from 0.
FP16 = {"enabled": True, "initial_scale_power": 6, "loss_scale_window": 3}
CASES = (
    Case("stage0", 0),
    Case("stage0-bf16", 0, BF16),
    Case("stage1", 1, is_universal=True),
    # The optimizer of another file, DeepSpeed's BF16_Optimizer.
    Case("stage1-bf16", 1, BF16, more={"data_types": {"grad_accum_dtype": "fp32"}}),
    Case("stage1-sgd", 1, sgd=True),
    Case("stage2", 2, zero={"round_robin_gradients": True, "parameter_alignment": True}),
    Case(
        "stage2-fp16",
        2,
        torch.float16,
        more={"fp16": FP16},
    ),
    Case("stage2-bf16", 2, BF16),
    Case("stage3", 3, zero={"sub_group_size": 200}, is_universal=True),
    Case("stage3-bf16", 3, BF16, zero={"stage3_param_persistence_threshold": 0}),
)
