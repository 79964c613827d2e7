"""Train an image classifier on scikit-learn's handwritten digits, in a few seconds and without a download.

    dslaunch docs/examples/train_digits.py --deepspeed --deepspeed_config docs/examples/ds_config_digits.json

The global batch of each step holds the same samples whatever the number of ranks: the loader deals the
shuffled order out in turn, so a step's micro batches on all ranks together are the next
`train_batch_size` samples of it. That is why two hosts give the losses of one process, apart from the
order in which sums are rounded.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import dslaunch

NUM_TRAIN = 1536  # of 1797 images; a multiple of train_batch_size, so every batch of an epoch is full
MAX_PIXEL = 16.0
SPLIT_SEED = 0


def main() -> None:
    args = parse_args()
    torch.manual_seed(args.seed)  # rank 0's weights go to all ranks
    train_set, test_images, test_labels = load_data()
    model = make_model()
    engine, _, loader, _ = dslaunch.initialize(
        model=model,
        model_parameters=model.parameters(),
        training_data=train_set,
        **config_arguments(args),
    )
    losses = train(engine, loader, num_epochs=args.epochs)
    accuracy = measure_accuracy(engine, test_images, test_labels)
    if engine.global_rank == 0:
        if args.log_losses:
            args.log_losses.write_text("".join(f"{loss!r}\n" for loss in losses))
        print(f"test after   accuracy {accuracy:.4f}", flush=True)
    dist.destroy_process_group()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a classifier of handwritten digits.")
    parser.add_argument("--local_rank", type=int, help="given by the launcher")
    parser.add_argument("--epochs", type=int, default=8, help="[default: 8]")
    parser.add_argument("--seed", type=int, default=0, help="of the first weights  [default: 0]")
    parser.add_argument("--stage", type=int, help="ZeRO stage  [default: as the ds_config says]")
    parser.add_argument("--log_losses", type=Path, metavar="FILE", help="write every step's loss to FILE")
    parser = dslaunch.add_config_arguments(parser)
    args = parser.parse_args()
    if not args.deepspeed_config:
        parser.error(
            "which ds_config? Give --deepspeed --deepspeed_config docs/examples/ds_config_digits.json"
        )
    return args


def config_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """What initialize() is to read: the ds_config that the arguments name,
    or a copy of it with another stage.
    """
    if args.stage is None:
        return {"args": args}
    config = json.loads(Path(args.deepspeed_config).read_text())
    config.setdefault("zero_optimization", {})["stage"] = args.stage
    return {"config": config}


def load_data() -> tuple[TensorDataset, Tensor, Tensor]:
    """The training set, then images [n, 1, 8, 8] in 0..1 and labels [n] for the test."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(SPLIT_SEED))
    images = torch.from_numpy(digits.images).float().unsqueeze(1)[order] / MAX_PIXEL
    labels = torch.from_numpy(digits.target).long()[order]
    train_set = TensorDataset(images[:NUM_TRAIN], labels[:NUM_TRAIN])
    return train_set, images[NUM_TRAIN:], labels[NUM_TRAIN:]


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def train(engine: Any, loader: Any, *, num_epochs: int) -> list[float]:
    """Train, and return every step's loss: the mean over its global batch."""
    losses: list[float] = []
    micro_losses: list[Tensor] = []
    for epoch in range(num_epochs):
        for images, labels in loader:
            loss = functional.cross_entropy(predict(engine, images), labels.to(engine.device))
            engine.backward(loss)
            micro_losses.append(loss.detach())
            if engine.is_gradient_accumulation_boundary():
                losses.append(mean_over_ranks(torch.stack(micro_losses).mean()))
                micro_losses = []
                if engine.global_rank == 0:
                    print(f"step {len(losses):4d}  loss {losses[-1]:.4f}  epoch {epoch + 1}", flush=True)
            engine.step()
    return losses


def predict(engine: Any, images: Tensor) -> Tensor:
    """Scores [n, 10] in float32, whatever dtype the engine's parameters have."""
    dtype = torch.bfloat16 if engine.bfloat16_enabled() else torch.float32
    scores: Tensor = engine(images.to(engine.device, dtype))
    return scores.float()


def mean_over_ranks(value: Tensor) -> float:
    total = value.double()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def measure_accuracy(engine: Any, images: Tensor, labels: Tensor) -> float:
    """The part of the images that is recognised; every rank looks at its share."""
    mine = slice(engine.global_rank, None, engine.world_size)
    engine.eval()
    with torch.no_grad():
        hits = predict(engine, images[mine]).argmax(dim=1) == labels[mine].to(engine.device)
    num_hits = hits.sum()
    dist.all_reduce(num_hits)
    return num_hits.item() / len(labels)


if __name__ == "__main__":
    main()
