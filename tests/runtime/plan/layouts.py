"""Layouts of a training: pieces of a ds_config by name."""

from __future__ import annotations

import tempfile
from typing import Any

from tests.runtime.plan.programs import SAMPLES, Config

PINNED = {"device": "cpu", "pin_memory": True}
DISK = {"device": "nvme", "nvme_path": tempfile.gettempdir()}
_BF16 = {"bf16": {"enabled": True}}
_ZERO: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "stage 3, small parameters kept": {"stage": 3, "stage3_param_persistence_threshold": 100_000},
    "stage 1, optimizer on cpu": {"stage": 1, "offload_optimizer": PINNED},
    "stage 2, optimizer on cpu": {"stage": 2, "offload_optimizer": PINNED},
    "stage 2, optimizer on nvme": {"stage": 2, "offload_optimizer": DISK},
    "stage 3, optimizer on cpu": {"stage": 3, "offload_optimizer": PINNED},
    "stage 3, optimizer on nvme": {"stage": 3, "offload_optimizer": DISK},
    "stage 3, parameters on cpu": {"stage": 3, "offload_param": PINNED},
    "stage 3, both on cpu": {"stage": 3, "offload_param": PINNED, "offload_optimizer": PINNED},
    "stage 3, both on nvme": {"stage": 3, "offload_param": DISK, "offload_optimizer": DISK},
    "stage 3, hpZ": {"stage": 3, "zero_hpz_partition_size": 2},
    "stage 2, large buckets": {"stage": 2, "reduce_bucket_size": 5e8},
}
_REST: dict[str, Config] = {
    "bf16": _BF16,
    "fp32": {},
    "fp16": {"fp16": {"enabled": True}},
    "torch_autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "bf16, clipped": {**_BF16, "gradient_clipping": 1.0},
    "bf16, states too": {**_BF16, "data_types": {"optimizer_state_dtype": "bf16"}},
    "bf16, masters too": {
        **_BF16,
        "data_types": {"master_dtype": "bf16", "optimizer_state_dtype": "bf16"},
    },
    "bf16, 2 micro batches": {**_BF16, "gradient_accumulation_steps": 2},
    "bf16, 4 micro batches": {**_BF16, "gradient_accumulation_steps": 4},
    "bf16, layers over 2 ranks": {**_BF16, "tensor_parallel": {"autotp_size": 2}},
    "bf16, experts over 2 ranks": {**_BF16, "expert_parallel": {"enabled": True, "autoep_size": 2}},
    "bf16, Muon": {**_BF16, "optimizer": {"type": "Muon", "params": {"lr": 0.001}}},
    "fp32, 2 micro batches": {"gradient_accumulation_steps": 2},
}


def layout(zero: str, rest: str = "bf16", **changes: Any) -> tuple[str, Config]:
    """Return a name and the ds_config."""
    section = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 20_000, **_ZERO[zero]}
    return f"{zero}, {rest}", {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
        "zero_optimization": section,
        **_REST[rest],
        **changes,
    }
