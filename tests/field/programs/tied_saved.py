"""Save whole weights of a model with tied layers at ZeRO-3, and load them into a new model."""

import json

import deepspeed
import torch
from torch import nn


class Tied(nn.Module):
    """An embedding whose weights are those of the head, with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.middle = nn.Linear(8, 8)
        self.register_buffer("scale", torch.full((1,), 0.5))
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.scale * self.middle(self.embedding(tokens)))


torch.manual_seed(0)
model = Tied()
config = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
tokens = torch.arange(12).view(1, 12) % 16
engine.backward(engine(tokens).square().mean())
engine.step()
engine.save_16bit_model("weights")
deepspeed.comm.barrier()
saved = torch.load("weights/pytorch_model.bin")
fresh = Tied()
answer = fresh.load_state_dict(saved, strict=False)
with torch.no_grad():
    off = (fresh(tokens) - engine(tokens)).abs().max().item()
facts = {"missing": answer.missing_keys, "off": off, "allowed": 1e-6}
print(json.dumps({"rank": engine.global_rank, **facts}), flush=True)
