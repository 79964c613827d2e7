"""What the scripts beside this train, on plain torch and on dslaunch: a small model, data,
and the states that they leave.
"""

from __future__ import annotations

import gc
import math
import os
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM, set_seed
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
VOCAB, LENGTH, WARMUP = 64, 12, 4
LR = 2e-2
EPSILON = (
    1e-3  # above most gradients: an update is smooth in them, as it is not where Adam takes but their sign
)


class Numbers(torch.utils.data.Dataset[Any]):
    """Sequences that count by some step modulo a prime: a small model learns something of them at once.

    Where it is masked not all tokens have a label, so that micro batches differ in how many count.
    """

    def __init__(self, num_samples: int, first: int, *, is_masked: bool) -> None:
        self.num_samples, self.first, self.is_masked = num_samples, first, is_masked

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        number = self.first + index
        ids = (3 + torch.arange(LENGTH) * (1 + number % 5) + 7 * number) % 61
        labels = ids.clone()
        labels[: number % 4 if self.is_masked else 0] = -100
        return {"input_ids": ids, "labels": labels}


TRAIN, EVAL = Numbers(32, 0, is_masked=True), Numbers(12, 100, is_masked=False)


class MasterAdamW(torch.optim.AdamW):
    """AdamW on float32 copies of parameters in 16 bits: what bf16 means in a ds_config, on plain torch."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        copies = [
            {**group, "params": [p.detach().float().requires_grad_() for p in group["params"]]}
            for group in self.param_groups
        ]
        self.inner = torch.optim.AdamW(copies, **options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        pairs = list(zip(self.param_groups, self.inner.param_groups, strict=True))
        for ours, inner in pairs:
            inner["lr"] = ours["lr"]
            for param, copy in zip(ours["params"], inner["params"], strict=True):
                copy.grad = param.grad.float()
        self.inner.step()
        for ours, inner in pairs:
            for param, copy in zip(ours["params"], inner["params"], strict=True):
                param.copy_(copy)


def make_qwen(*, is_tied: bool = True) -> Any:
    """The same small model every time; `is_tied`: what reads a token is what writes one."""
    set_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.1,
            tie_word_embeddings=is_tied,
        )
    )


def warmup_factor(step: int) -> float:
    """DeepSpeed's WarmupLR: its first two steps have its smallest rate, here 0."""
    return min(1.0, math.log(max(step, 1)) / math.log(WARMUP))


def loss_of_saved(folder: Path) -> float:
    """The loss on EVAL of what from_pretrained() makes of a folder, on this rank alone."""
    model, report = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    if any(report.values()):
        raise AssertionError(f"{folder}: {report}")
    batch = {name: torch.stack([EVAL[i][name] for i in range(len(EVAL))]) for name in ("input_ids", "labels")}
    with torch.no_grad():
        return float(model.eval()(**batch).loss)


def tidy_up(environ: dict[str, str], accelerator: Accelerator | None = None) -> None:
    """Let the next case begin as in a process of its own: both libraries keep their states per process."""
    if accelerator is not None:
        accelerator.free_memory()
    unset_hf_deepspeed_config()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ.clear()
    os.environ.update(environ)
    gc.collect()
