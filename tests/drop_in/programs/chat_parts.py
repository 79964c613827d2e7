"""What the three steps of a program as DeepSpeed-Chat is have in common: ds_configs, LoRA layers, models,
how they are saved.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import get_accelerator
from deepspeed.compression.helper import recursive_getattr, recursive_setattr
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, OPTConfig, OPTForCausalLM, get_scheduler
from transformers.integrations.deepspeed import HfDeepSpeedConfig

VOCAB, LENGTH = 48, 10


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--zero_stage", type=int, default=0)
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--lora_dim", type=int, default=0)
    parser.add_argument("--enable_ema", action="store_true")
    parser.add_argument("--local_rank", type=int, default=-1)
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args()
    if args.local_rank != -1:
        get_accelerator().set_device(args.local_rank)
    deepspeed.init_distributed()
    args.global_rank = torch.distributed.get_rank()
    torch.manual_seed(1234)
    torch.distributed.barrier()
    return args


def zero_section(stage: int, *, offload: bool) -> dict[str, Any]:
    device = "cpu" if offload else "none"
    return {
        "stage": stage,
        "overlap_comm": True,
        "offload_param": {"device": device if stage == 3 else "none"},
        "offload_optimizer": {"device": device},
        "reduce_bucket_size": 50,
        "stage3_param_persistence_threshold": 20,
        "stage3_max_live_parameters": 3e7,
        "stage3_prefetch_bucket_size": 50,
        "memory_efficient_linear": False,
    }


def get_train_ds_config(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "train_batch_size": 4 * torch.distributed.get_world_size(),
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": 10,
        "zero_optimization": zero_section(args.zero_stage, offload=args.offload),
        "bfloat16": {"enabled": True},
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "wall_clock_breakdown": False,
        "hybrid_engine": {
            "enabled": False,
            "max_out_tokens": 512,
            "inference_tp_size": 1,
            "release_inference_cache": False,
            "pin_parameters": True,
            "tp_gather_partition_size": 8,
        },
        "tensorboard": {"enabled": False, "output_path": "", "job_name": "step"},
    }


def get_eval_ds_config(args: argparse.Namespace) -> dict[str, Any]:
    stage = 3 if args.zero_stage == 3 else 0
    return {
        "train_batch_size": 4 * torch.distributed.get_world_size(),
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": 10,
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 20,
            "offload_param": {"device": "none"},
            "memory_efficient_linear": False,
        },
        "bfloat16": {"enabled": True},
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "wall_clock_breakdown": False,
    }


def opt_config() -> OPTConfig:
    return OPTConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        word_embed_proj_dim=16,
        ffn_dim=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        dropout=0.0,
        pad_token_id=1,
        bos_token_id=2,
        eos_token_id=2,
    )


def create_hf_model(folder: Path, ds_config: dict[str, Any] | None) -> nn.Module:
    """from_pretrained() of what a step before this has left, or of a fresh model;
    with zero.Init at stage 3.
    """
    fresh = folder / "fresh"
    if torch.distributed.get_rank() == 0 and not fresh.exists():
        torch.manual_seed(3)
        OPTForCausalLM(opt_config()).save_pretrained(fresh)
    torch.distributed.barrier()
    at_stage_3 = ds_config is not None and ds_config["zero_optimization"]["stage"] == 3
    keep = HfDeepSpeedConfig(ds_config) if at_stage_3 else None
    model = AutoModelForCausalLM.from_pretrained(fresh, config=AutoConfig.from_pretrained(fresh))
    model.resize_token_embeddings(8 * ((VOCAB + 2 + 7) // 8))
    del keep  # transformers asks whether it is alive
    return model


class LinearLayer_LoRA(nn.Module):
    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, lora_dim: int) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        rows, columns = getattr(weight, "ds_shape", weight.shape)
        self.lora_right_weight = nn.Parameter(torch.randn(columns, lora_dim) / 4)
        self.lora_left_weight = nn.Parameter(torch.zeros(lora_dim, rows))
        self.weight.requires_grad = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        low = input @ self.lora_right_weight @ self.lora_left_weight
        return nn.functional.linear(input, self.weight, self.bias) + low


def convert_linear_layer_to_lora(model: nn.Module, part: str, lora_dim: int) -> nn.Module:
    names = [name for name, one in model.named_modules() if isinstance(one, nn.Linear) and part in name]
    for name in names:
        module = recursive_getattr(model, name)
        recursive_setattr(model, name, LinearLayer_LoRA(module.weight, module.bias, lora_dim))
    return model


def grouped_parameters(model: nn.Module, weight_decay: float = 0.01) -> list[dict[str, Any]]:
    plain = ("bias", "layer_norm.weight", "layernorm.weight")
    trained = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    groups = [
        {
            "params": [one for name, one in trained if not any(word in name.lower() for word in plain)],
            "weight_decay": weight_decay,
        },
        {
            "params": [one for name, one in trained if any(word in name.lower() for word in plain)],
            "weight_decay": 0.0,
        },
    ]
    return [group for group in groups if group["params"]]


def start_engine(args: argparse.Namespace, model: nn.Module, lr: float) -> Any:
    """As each of the steps does it: an optimizer of deepspeed.ops, a scheduler of transformers, a process
    group that is there.
    """
    AdamOptimizer = DeepSpeedCPUAdam if args.offload else FusedAdam
    optimizer = AdamOptimizer(grouped_parameters(model), lr=lr, betas=(0.9, 0.95))
    lr_scheduler = get_scheduler(
        name="cosine", optimizer=optimizer, num_warmup_steps=0, num_training_steps=20
    )
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        args=args,
        config=get_train_ds_config(args),
        lr_scheduler=lr_scheduler,
        dist_init_required=True,
    )
    return engine


def z3_params_to_fetch(params: list[torch.Tensor]) -> list[torch.Tensor]:
    return [one for one in params if hasattr(one, "ds_id") and one.ds_status == ZeroParamStatus.NOT_AVAILABLE]


def save_hf_format(model: Any, path: Path) -> None:
    """Rank 0 saves the state_dict that it has; at stage 3 the next function replaces it."""
    inner = model.module if hasattr(model, "module") else model
    state = inner.state_dict()
    for name in list(state):
        if "lora" in name:
            del state[name]
    torch.save(state, path)


def save_zero_three_model(model: Any, global_rank: int, path: Path, zero_stage: int) -> None:
    inner = model.module if hasattr(model, "module") else model
    if zero_stage != 3:
        state = inner.state_dict()
    else:
        state = {}
        for name, one in inner.named_parameters():
            if hasattr(one, "ds_id"):
                with deepspeed.zero.GatheredParameters(z3_params_to_fetch([one]), enabled=True):
                    value = one.data.cpu()
            else:
                value = one.cpu()
            if global_rank == 0 and "lora" not in name:
                state[name] = value
    if global_rank == 0:
        torch.save(state, path)
    torch.distributed.barrier()


def tokens_at(step: int) -> torch.Tensor:
    rank = int(os.environ["RANK"])
    return (torch.arange(LENGTH).view(1, -1) * torch.arange(1, 5).view(-1, 1) + step % 2 + 4 * rank) % 40 + 4
