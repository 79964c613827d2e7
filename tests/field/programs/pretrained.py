"""Load a pretrained mixture of experts at ZeRO-3 by from_pretrained(): pretrained.py MODEL_TYPE."""

import json
import sys

import deepspeed
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations import HfDeepSpeedConfig

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
deepspeed.init_distributed()
rank = deepspeed.comm.get_rank()
if rank == 0:
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(sys.argv[-1], **SHAPE))
    made.save_pretrained("pretrained")
    torch.save(dict(made.named_parameters()), "weights.pt")
deepspeed.comm.barrier()
config = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}
told = HfDeepSpeedConfig(config)
model = AutoModelForCausalLM.from_pretrained("pretrained")
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
wanted = torch.load("weights.pt", weights_only=False)
with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
    found = dict(engine.module.named_parameters())
    lost = [name for name in wanted if name not in found or not torch.equal(found[name], wanted[name])]
print(json.dumps({"rank": rank, "lost": lost}), flush=True)
