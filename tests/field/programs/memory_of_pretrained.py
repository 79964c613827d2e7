"""Measure the memory that each rank needs to load a pretrained model at ZeRO-3."""

import json
from pathlib import Path

import deepspeed
from library.memory import peak_while
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations import HfDeepSpeedConfig

MB = 2**20

deepspeed.init_distributed()
rank = deepspeed.comm.get_rank()
shape = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 8}
if rank == 0:
    made = LlamaForCausalLM(LlamaConfig(vocab_size=1024, **shape))
    made.save_pretrained("pretrained")
    del made
deepspeed.comm.barrier()
weights_mb = Path("pretrained/model.safetensors").stat().st_size / MB
config = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}
told = HfDeepSpeedConfig(config)
grown = peak_while(lambda: LlamaForCausalLM.from_pretrained("pretrained"))
print(json.dumps({"rank": rank, "grown": grown, "allowed": weights_mb}), flush=True)
