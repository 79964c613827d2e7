"""A program as the CIFAR tutorial of DeepSpeed is: convolutions, a loader made by initialize(),
its own argument parser.
"""

from __future__ import annotations

import argparse
import os

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import nn


def add_argument() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--dtype", default="fp32", choices=["bf16", "fp16", "fp32"])
    parser.add_argument("--stage", type=int, default=0)
    parser.add_argument("--moe", action="store_true")
    parser.add_argument("--ep-world-size", type=int, default=1)
    parser.add_argument("--num-experts", type=int, nargs="+", default=[1])
    parser.add_argument("--mlp-type", default="standard", choices=["standard", "residual"])
    parser.add_argument("--top-k", type=int, default=1)
    parser.add_argument("--min-capacity", type=int, default=0)
    parser.add_argument("--noisy-gate-policy", default=None)
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


def ds_config(args: argparse.Namespace) -> dict[str, object]:
    return {
        "train_batch_size": 16,
        "steps_per_print": 2000,
        "optimizer": {
            "type": "Adam",
            "params": {"lr": 0.005, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.005, "warmup_num_steps": 2},
        },
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "bf16": {"enabled": args.dtype == "bf16"},
        "fp16": {
            "enabled": args.dtype == "fp16",
            "fp16_master_weights_and_grads": False,
            "loss_scale": 0,
            "loss_scale_window": 500,
            "hysteresis": 2,
            "min_loss_scale": 1,
            "initial_scale_power": 15,
        },
        "wall_clock_breakdown": False,
        "zero_optimization": {
            "stage": args.stage,
            "allgather_partitions": True,
            "reduce_scatter": True,
            "allgather_bucket_size": 50,
            "reduce_bucket_size": 50,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "cpu_offload": False,
        },
    }


class Net(nn.Module):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 8, 3)
        self.fc1 = nn.Linear(8 * 2 * 2, 24)
        self.moe = args.moe
        if args.moe:
            fc2 = nn.Linear(24, 24)
            self.moe_layer_list = nn.ModuleList(
                deepspeed.moe.layer.MoE(
                    hidden_size=24,
                    expert=fc2,
                    num_experts=num_experts,
                    ep_size=args.ep_world_size,
                    use_residual=args.mlp_type == "residual",
                    k=args.top_k,
                    min_capacity=args.min_capacity,
                    noisy_gate_policy=args.noisy_gate_policy,
                )
                for num_experts in args.num_experts
            )
        self.fc2 = nn.Linear(24, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = F.relu(self.fc1(x.flatten(1)))
        if self.moe:
            for layer in self.moe_layer_list:
                x, _, _ = layer(x)
        return self.fc2(x)


def create_moe_param_groups(model: nn.Module) -> list[dict[str, object]]:
    parameters = {"params": list(model.parameters()), "name": "parameters"}
    return split_params_into_different_moe_groups_for_optimizer(parameters)


def main() -> None:
    args = add_argument()
    deepspeed.init_distributed()
    get_accelerator().set_device(int(os.environ.get("LOCAL_RANK", "0")))
    torch.distributed.barrier()

    torch.manual_seed(7)
    labels = torch.arange(64) % 10
    images = torch.randn(64, 3, 14, 14) * 0.1 + labels.view(-1, 1, 1, 1) / 5
    trainset = torch.utils.data.TensorDataset(images, labels)
    net = Net(args)
    parameters = filter(lambda p: p.requires_grad, net.parameters())
    if args.moe:
        parameters = create_moe_param_groups(net)
    model_engine, _, trainloader, _ = deepspeed.initialize(
        args=args, model=net, model_parameters=parameters, training_data=trainset, config=ds_config(args)
    )
    local_device = get_accelerator().device_name(model_engine.local_rank)
    target_dtype = None
    if model_engine.bfloat16_enabled():
        target_dtype = torch.bfloat16
    elif model_engine.fp16_enabled():
        target_dtype = torch.half

    criterion = nn.CrossEntropyLoss()
    losses = []
    for _ in range(args.epochs):
        for data in trainloader:
            inputs, classes = data[0].to(local_device), data[1].to(local_device)
            if target_dtype is not None:
                inputs = inputs.to(target_dtype)
            loss = criterion(model_engine(inputs), classes)
            model_engine.backward(loss)
            model_engine.step()
            losses.append(loss.item())
    net.eval()
    with torch.no_grad():
        outputs = net(images.to(local_device, target_dtype or torch.float32))
    print("RESULT", model_engine.global_rank, *losses, criterion(outputs.float(), labels).item(), flush=True)


if __name__ == "__main__":
    main()
