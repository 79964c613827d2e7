"""Several engines in one process: one trains a teacher, one only asks it,
and one trains a student on its answers.

    dslaunch --num_gpus 2 docs/examples/deepspeed/distill.py --stage 2

The student's optimizer and schedule are made by the script and passed to the engine.
"""

import argparse
import math

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import FusedAdam
from deepspeed.runtime.utils import set_random_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

BATCH = 64


def parse_args():
    parser = argparse.ArgumentParser(description="Distil a large classifier of digits into a small one.")
    parser.add_argument("--local_rank", type=int, default=-1, help="given by the launcher")
    parser.add_argument("--stage", type=int, default=2, choices=[0, 1, 2, 3], help="of ZeRO, for who learns")
    parser.add_argument("--frozen_stage", type=int, default=3, choices=[0, 3], help="for who is asked")
    return parser.parse_args()


def make_config(stage, **more):
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    return {"train_batch_size": BATCH, "gradient_clipping": 1.0, "zero_optimization": zero, **more}


def make_classifier(width):
    return nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, 10))


def load_data():
    digits = load_digits()
    images = torch.from_numpy(digits.data).float() / 16
    return TensorDataset(images[:1536], torch.from_numpy(digits.target).long()[:1536])


def report(name, step, loss):
    mean = loss.detach().clone()
    torch.distributed.all_reduce(mean)
    if torch.distributed.get_rank() == 0:
        print(
            f"step {step:4d}  loss {mean.item() / torch.distributed.get_world_size():.7f}  {name}", flush=True
        )


def train_teacher(stage, data):
    model = make_classifier(128)
    adam = {"type": "Adam", "params": {"lr": 0.01}}
    engine, _, loader, _ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        training_data=data,
        config=make_config(stage, optimizer=adam),
    )
    for step, (images, labels) in enumerate(loader, start=1):
        loss = functional.cross_entropy(engine(images.to(engine.device)), labels.to(engine.device))
        engine.backward(loss)
        engine.step()
        report("teacher", step, loss)
    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
        learned = {name: param.detach().clone() for name, param in model.named_parameters()}
    engine.destroy()
    return learned


def freeze(stage, learned):
    """An engine without an optimizer, which at stage 3 has the weights in shards."""
    model = make_classifier(128)
    model.load_state_dict(learned)
    model.requires_grad_(False)
    engine, *_ = deepspeed.initialize(model=model, config=make_config(stage))
    engine.eval()
    return engine


def make_student(stage, num_steps):
    set_random_seed(4)  # whatever the data loader has drawn
    model = make_classifier(24)
    optimizer = FusedAdam(model.parameters(), lr=0.02, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = LambdaLR(optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / num_steps)))
    engine, _, _, schedule = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=schedule,
        config=make_config(stage),
        dist_init_required=True,
    )
    return engine, schedule


def main():
    args = parse_args()
    deepspeed.init_distributed()
    get_accelerator().set_device(args.local_rank)
    set_random_seed(3)
    data = load_data()
    teacher = freeze(args.frozen_stage, train_teacher(args.stage, data))
    student, schedule = make_student(args.stage, num_steps=len(data) // BATCH)
    loader = student.deepspeed_io(data)
    for step, (images, _) in enumerate(loader, start=1):
        images = images.to(student.device)
        with torch.no_grad():
            answers = teacher(images).softmax(dim=1)
        loss = functional.cross_entropy(student(images), answers)
        student.backward(loss)
        student.step()
        report("student", step, loss)
    images, labels = (one.to(student.device) for one in data.tensors)
    with torch.no_grad():
        right = [(engine(images).argmax(1) == labels).float().mean().item() for engine in (teacher, student)]
    if torch.distributed.get_rank() == 0:
        print(
            f"accuracy teacher {right[0]:.3f} student {right[1]:.3f} lr {schedule.get_last_lr()[0]:.6f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
