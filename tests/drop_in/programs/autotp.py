"""Layers divided over neighbouring ranks by the ds_config, with an mpu of the program's own that says so: the
optimizer is made before the layers are divided. Without --tp_size the same data train the whole model.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
BATCH, LENGTH, VOCAB = 2, 12, 64
RULES = [
    {"patterns": [r".*mlp\.dense_h_to_4h\.weight$"], "partition_type": "column"},
    {"patterns": [r".*mlp\.dense_4h_to_h\.weight$"], "partition_type": "row"},
]


@dataclass
class ModelParallelUnit:
    tp_group: Any
    dp_group: Any
    tp_size: int
    dp_size: int
    tp_rank: int
    dp_rank: int

    def get_data_parallel_group(self) -> Any:
        return self.dp_group

    def get_model_parallel_group(self) -> Any:
        return self.tp_group

    def get_data_parallel_world_size(self) -> int:
        return self.dp_size

    def get_model_parallel_world_size(self) -> int:
        return self.tp_size

    def get_data_parallel_rank(self) -> int:
        return self.dp_rank

    def get_model_parallel_rank(self) -> int:
        return self.tp_rank


def build_tp_dp_groups(rank: int, tp_size: int, dp_size: int) -> ModelParallelUnit:
    tp_group = dp_group = None
    for dp_index in range(dp_size):
        ranks = list(range(dp_index * tp_size, (dp_index + 1) * tp_size))
        group = dist.new_group(ranks)
        tp_group = group if rank in ranks else tp_group
    for tp_index in range(tp_size):
        ranks = [tp_index + dp_index * tp_size for dp_index in range(dp_size)]
        group = dist.new_group(ranks)
        dp_group = group if rank in ranks else dp_group
    return ModelParallelUnit(tp_group, dp_group, tp_size, dp_size, rank % tp_size, rank // tp_size)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--zero_stage", type=int, default=0)
    parser.add_argument("--tp_size", type=int, default=1)
    parser.add_argument("--rules", action="store_true")
    args = parser.parse_args()
    deepspeed.init_distributed()
    rank, dp_size = dist.get_rank(), dist.get_world_size() // args.tp_size
    mpu = build_tp_dp_groups(rank, args.tp_size, dp_size)

    torch.manual_seed(7)
    model: Any
    if args.rules:
        model = GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=VOCAB, **SIZES))
    else:
        model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **SIZES))
    ds_config: dict[str, Any] = {
        "train_batch_size": BATCH * dp_size,
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": {"stage": args.zero_stage},
        "data_parallel_size": dp_size,
    }
    if args.tp_size > 1:
        ds_config["tensor_parallel"] = {"autotp_size": args.tp_size}
        if args.rules:
            ds_config["tensor_parallel"]["partition_config"] = {
                "use_default_specs": False,
                "layer_specs": RULES,
            }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=ds_config, mpu=mpu)

    losses = []
    for step in range(4):
        torch.manual_seed(10 * step + mpu.dp_rank)
        input_ids = torch.randint(0, VOCAB, (BATCH, LENGTH))
        if mpu.tp_rank:
            input_ids.zero_()
        dist.broadcast(input_ids, src=mpu.dp_rank * args.tp_size, group=mpu.tp_group)
        outputs = engine(input_ids=input_ids, labels=input_ids.clone())
        engine.backward(outputs.loss)
        engine.step()
        losses.append(outputs.loss.item())
    engine.save_checkpoint(args.folder / "checkpoint")
    engine.save_16bit_model(args.folder)
    print("RESULT", rank, *losses, flush=True)


if __name__ == "__main__":
    main()
