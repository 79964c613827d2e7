"""Generate at ZeRO-3 with the engine, few tokens and many, and count the collectives that each takes."""

import json

import deepspeed
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

FEW, MANY = 8, 40

torch.manual_seed(0)
shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=64, eos_token_id=None, **shape))
config = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
prompt = torch.tensor([[5, 6, 7 + engine.global_rank]])


def collectives(num_tokens: int) -> int:
    with profile(activities=[ProfilerActivity.CPU]) as seen, torch.no_grad():
        answer = engine.generate(prompt, max_new_tokens=num_tokens, do_sample=False, pad_token_id=0)
    assert answer.shape[1] == prompt.shape[1] + num_tokens
    return sum(one.name.startswith("c10d::") for one in seen.events())


found = {"few": collectives(FEW), "many": collectives(MANY)}
print(json.dumps({"rank": engine.global_rank, **found}), flush=True)
