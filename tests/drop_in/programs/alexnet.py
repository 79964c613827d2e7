"""A small AlexNet on pictures made here, cut into stages: the calls of DeepSpeed's pipeline example."""

import argparse
import os

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from deepspeed.utils import RepeatingLoader
from torch import nn


class AlexNet(nn.Module):
    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, kernel_size=3, stride=2, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=2),
            nn.Conv2d(8, 16, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(16, 8, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=2),
        )
        self.avgpool = nn.AdaptiveAvgPool2d((2, 2))
        self.classifier = nn.Sequential(
            nn.Dropout(p=0.0),
            nn.Linear(8 * 2 * 2, 32),
            nn.ReLU(inplace=True),
            nn.Dropout(p=0.0),
            nn.Linear(32, num_classes),
        )


class Pictures(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, 32, 32, generator=generator) + index % 10 / 10, index % 10


def get_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="pictures")
    parser.add_argument("--local_rank", type=int, default=None)
    parser.add_argument("-s", "--steps", type=int, default=6)
    parser.add_argument("-p", "--pipeline-parallel-size", type=int, default=2)
    parser.add_argument("--backend", type=str, default="gloo")
    parser.add_argument("--seed", type=int, default=1138)
    parser.add_argument("--save", type=str, default=None)
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


def join_layers(vision_model: AlexNet) -> list:
    return [
        *vision_model.features,
        vision_model.avgpool,
        lambda x: torch.flatten(x, 1),
        *vision_model.classifier,
    ]


def train_pipe(args: argparse.Namespace, part: str = "parameters") -> None:
    torch.manual_seed(args.seed)
    deepspeed.runtime.utils.set_random_seed(args.seed)
    net = AlexNet(num_classes=10)
    net = PipelineModule(
        layers=join_layers(net),
        loss_fn=torch.nn.CrossEntropyLoss(),
        num_stages=args.pipeline_parallel_size,
        partition_method=part,
        activation_checkpoint_interval=0,
    )
    engine, _, _, _ = deepspeed.initialize(
        args=args,
        model=net,
        model_parameters=[p for p in net.parameters() if p.requires_grad],
        training_data=Pictures(),
    )
    losses = [engine.train_batch().item() for _ in range(args.steps)]
    held_out = iter(RepeatingLoader(torch.utils.data.DataLoader(Pictures(), batch_size=8)))
    losses.append(engine.eval_batch(held_out, num_micro_batches=12).item())
    losses.append(engine.train_batch().item())
    if args.save:
        engine.save_checkpoint(args.save, tag="last")
    print("RESULT", dist.get_rank(), *losses, flush=True)


if __name__ == "__main__":
    args = get_args()
    deepspeed.init_distributed(dist_backend=args.backend)
    args.local_rank = int(os.environ["LOCAL_RANK"])
    train_pipe(args)
