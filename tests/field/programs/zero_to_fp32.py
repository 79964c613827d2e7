"""Put the files of a ZeRO-3 checkpoint together to whole weights, frozen ones too."""

import json

import deepspeed
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 15), nn.Linear(15, 1))
model[2].requires_grad_(False)
config = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}
engine, *_ = deepspeed.initialize(
    model=model, model_parameters=[one for one in model.parameters() if one.requires_grad], config=config
)
engine.backward(engine(torch.ones(4, 7)).square().mean())
engine.step()
engine.save_checkpoint("checkpoints")
deepspeed.comm.barrier()
with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
    wanted = {name: value.detach().clone() for name, value in engine.module.named_parameters()}
found = get_fp32_state_dict_from_zero_checkpoint("checkpoints")
lost = [name for name in wanted if name not in found or not torch.equal(found[name], wanted[name])]
print(json.dumps({"rank": engine.global_rank, "lost": lost}), flush=True)
