"""Train an image classifier as the CIFAR tutorials for DeepSpeed do, on scikit-learn's handwritten digits.

    dslaunch --num_gpus 2 docs/examples/deepspeed/classify_digits.py --deepspeed --stage 2 --dtype bf16

The engine makes the data loader, casts the model, and steps the optimizer and the schedule that
the ds_config names.
"""

import argparse
import os

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

NUM_TRAIN = 1536  # of 1797 images: 16 batches an epoch


def parse_args():
    parser = argparse.ArgumentParser(description="Classify handwritten digits.")
    parser.add_argument("--local_rank", type=int, default=-1, help="given by the launcher")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--stage", type=int, default=0, choices=[0, 1, 2, 3], help="of ZeRO")
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16", "fp16"])
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


def make_config(args):
    return {
        "train_batch_size": 96,
        "steps_per_print": 1000,
        "optimizer": {
            "type": "Adam",
            "params": {"lr": 0.01, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.01, "warmup_num_steps": 10},
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
            "allgather_bucket_size": 50000000,
            "reduce_bucket_size": 50000000,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "cpu_offload": False,  # the old name of offload_optimizer
        },
    }


def load_data():
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.from_numpy(digits.images).float().unsqueeze(1)[order] / 16
    labels = torch.from_numpy(digits.target).long()[order]
    train = TensorDataset(images[:NUM_TRAIN], labels[:NUM_TRAIN])
    return train, images[NUM_TRAIN:], labels[NUM_TRAIN:]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.fc1 = nn.Linear(16 * 4 * 4, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, images):
        x = functional.relu(self.conv1(images))
        x = self.pool(functional.relu(self.conv2(x)))
        x = functional.relu(self.fc1(x.flatten(1)))
        return self.fc2(x)


def main():
    args = parse_args()
    deepspeed.init_distributed()
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(0)
    trainset, test_images, test_labels = load_data()
    net = Net()
    model_engine, optimizer, trainloader, _ = deepspeed.initialize(
        args=args,
        model=net,
        model_parameters=filter(lambda p: p.requires_grad, net.parameters()),
        training_data=trainset,
        config=make_config(args),
    )
    device = get_accelerator().device_name(model_engine.local_rank)
    dtype = None
    if model_engine.bfloat16_enabled():
        dtype = torch.bfloat16
    elif model_engine.fp16_enabled():
        dtype = torch.half

    step = 0
    for epoch in range(args.epochs):
        for images, labels in trainloader:
            images, labels = images.to(device), labels.to(device)
            if dtype is not None:
                images = images.to(dtype)
            loss = functional.cross_entropy(model_engine(images).float(), labels)
            model_engine.backward(loss)
            model_engine.step()
            step += 1
            mean = loss.detach().clone()
            torch.distributed.all_reduce(mean)
            if torch.distributed.get_rank() == 0:
                lr = optimizer.param_groups[0]["lr"]
                mean = mean.item() / torch.distributed.get_world_size()
                print(f"step {step:4d}  loss {mean:.7f}  lr {lr:.6f}  epoch {epoch + 1}", flush=True)

    model_engine.eval()
    with torch.no_grad():
        scores = model_engine(test_images.to(device, dtype or torch.float32))
    accuracy = (scores.argmax(1) == test_labels.to(device)).float().mean().item()
    if model_engine.local_rank == 0:
        print(f"test after   accuracy {accuracy:.4f}  of {len(test_labels)} images", flush=True)


if __name__ == "__main__":
    main()
