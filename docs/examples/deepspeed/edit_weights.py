"""Make a model in shards, look at it, change its weights, and train it.

    dslaunch --num_gpus 2 docs/examples/deepspeed/edit_weights.py --stage 3

At stage 3 a parameter is present only inside `GatheredParameters`. At other stages the same lines
do nothing special.
"""

import argparse

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.utils import set_random_seed
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from torch import nn
from torch.nn import functional

VOCABULARY, WIDTH = 12, 16


class Reader(nn.Module):
    """Guesses the next number; its last layer borrows the weights of its first."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.head = Head(self.words)

    def forward(self, numbers):
        return self.head(torch.tanh(self.hidden(self.words(numbers))))


class Head(nn.Module):
    def __init__(self, words):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(VOCABULARY))
        self.borrowed = [words]  # in a list, so that it is no part of this module
        deepspeed.zero.register_external_parameter(self, words.weight)

    def forward(self, hidden):
        return functional.linear(hidden, self.borrowed[0].weight, self.bias)


def parse_args():
    parser = argparse.ArgumentParser(description="Look into a model that is made in shards.")
    parser.add_argument("--local_rank", type=int, default=-1, help="given by the launcher")
    parser.add_argument("--stage", type=int, default=3, choices=[0, 1, 2, 3], help="of ZeRO")
    parser.add_argument("--steps", type=int, default=12)
    return parser.parse_args()


def make_config(args):
    return {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.0}},
        "zero_optimization": {
            "stage": args.stage,
            "stage3_param_persistence_threshold": 0,
            "offload_param": {"device": "none"},
            "offload_optimizer": {"device": "none"},
        },
    }


def describe(name, param):
    """What ZeRO says of a parameter."""
    status = getattr(param, "ds_status", None)
    if status is None:
        return f"{name} {tuple(param.shape)} is whole"
    present = "is absent" if status == ZeroParamStatus.NOT_AVAILABLE else "is present"
    return f"{name} {tuple(param.ds_shape)} id {param.ds_id} numel {param.ds_numel} {present}"


def show(model, when):
    if dist.get_rank() == 0:
        for name, param in model.named_parameters():
            print(f"{when}: {describe(name, param)}", flush=True)


def edit(model, is_sharded):
    """Give the layers weights that are known."""
    with deepspeed.zero.GatheredParameters(model.words.weight, modifier_rank=0, enabled=is_sharded):
        if not is_sharded or dist.get_rank() == 0:
            model.words.weight.data.copy_(torch.eye(VOCABULARY, WIDTH))
    layer = [model.hidden.weight, model.hidden.bias]
    with deepspeed.zero.GatheredParameters(layer, modifier_rank=0, enabled=is_sharded), torch.no_grad():
        if not is_sharded or dist.get_rank() == 0:
            model.hidden.weight.fill_(0.125)
            model.hidden.bias.zero_()
    with deepspeed.zero.GatheredParameters(model.parameters(), enabled=is_sharded):  # a generator, to read
        show(model, "gathered")
        sums = [round(param.data.sum().item(), 4) for param in model.parameters()]
    if dist.get_rank() == 0:
        print(f"sums {sums}", flush=True)


def train(engine, steps):
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(1, steps + 1):
        numbers = torch.randint(VOCABULARY, (8,), generator=generator).to(engine.device)
        loss = functional.cross_entropy(engine(numbers), (numbers * 5 + 1) % VOCABULARY)
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"step {step:4d}  loss {mean.item() / dist.get_world_size():.7f}", flush=True)


def main():
    args = parse_args()
    deepspeed.init_distributed()
    get_accelerator().set_device(args.local_rank)
    set_random_seed(7)
    config = make_config(args)
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=args.stage == 3):
        model = Reader()
    show(model, "made")
    edit(model, is_sharded=args.stage == 3)
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config_params=config
    )
    train(engine, args.steps)
    # The copy in float32 that the optimizer steps, in any precision. At stage 0 DeepSpeed gives None,
    # dslaunch has it there, too.
    bias = safe_get_full_fp32_param(model.hidden.bias)
    if bias is not None:
        safe_set_full_fp32_param(model.hidden.bias, torch.full_like(bias, 0.5))
        bias = safe_get_full_fp32_param(model.hidden.bias)
        if dist.get_rank() == 0:
            print(f"the bias of {bias.numel()} is {bias.min().item()} to {bias.max().item()} now", flush=True)


if __name__ == "__main__":
    main()
