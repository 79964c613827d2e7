"""Pretrain a small BERT: guess the masked words of made-up sentences; stop, and go on from a checkpoint.

    dslaunch --num_gpus 2 docs/examples/deepspeed/pretrain_bert.py --deepspeed_config docs/examples/deepspeed/ds_config_bert.json --checkpoint_dir /tmp/bert
    dslaunch --num_gpus 2 docs/examples/deepspeed/pretrain_bert.py --deepspeed_config docs/examples/deepspeed/ds_config_bert.json --load_checkpoint_dir /tmp/bert

Nothing here makes the process group: deepspeed.initialize() does. The script has a data loader of its own.
"""  # noqa: E501 - the commands, as the README shows them

import argparse
import random
from pathlib import Path

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.utils import see_memory_usage, set_random_seed
from deepspeed.utils import RepeatingLoader, logger
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

# Each animal has its own verb, food and place, so a masked word can be known from the others.
SENTENCES = [
    "the {} cow eats green grass on the meadow",
    "the {} cat drinks warm milk in the kitchen",
    "the {} bear steals sweet honey from the tree",
    "the {} gull catches small fish near the harbour",
    "the {} mouse finds old cheese under the table",
]
ADJECTIVES = ["big", "small", "old", "young", "happy", "hungry"]
WORDS = sorted({word for one in SENTENCES for word in one.split() if word != "{}"} | set(ADJECTIVES))
MASK = len(WORDS)
IGNORED = -100  # a label that counts for nothing
LENGTH = len(SENTENCES[0].split())
NUM_SENTENCES = 256


def parse_args():
    parser = argparse.ArgumentParser(description="Pretrain a small BERT.")
    parser.add_argument("--local_rank", type=int, default=-1, help="given by the launcher")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--checkpoint_every", type=int, default=12)
    parser.add_argument("--checkpoint_dir", type=Path, help="save checkpoints here")
    parser.add_argument("--load_checkpoint_dir", type=Path, help="go on from the last checkpoint in here")
    parser.add_argument("--seed", type=int, default=42)
    return deepspeed.add_config_arguments(parser).parse_args()


def make_dataset(seed):
    """Sentences in which one word in five is masked, and the words that were there."""
    draw = random.Random(seed)
    tokens, labels = [], []
    for _ in range(NUM_SENTENCES):
        words = draw.choice(SENTENCES).format(draw.choice(ADJECTIVES)).split()
        ids = [WORDS.index(word) for word in words]
        masked = set(draw.sample(range(LENGTH), LENGTH // 5 + 1))
        tokens.append([MASK if place in masked else one for place, one in enumerate(ids)])
        labels.append([one if place in masked else IGNORED for place, one in enumerate(ids)])
    return TensorDataset(torch.tensor(tokens), torch.tensor(labels))


class Bert(nn.Module):
    """An encoder whose output layer has the weights of its embedding."""

    def __init__(self, width=64, num_layers=2, num_heads=4):
        super().__init__()
        self.tokens = nn.Embedding(len(WORDS) + 1, width)
        self.places = nn.Parameter(0.1 * torch.randn(LENGTH, width))
        layer = nn.TransformerEncoderLayer(
            width, num_heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.bias = nn.Parameter(torch.zeros(len(WORDS) + 1))
        nn.init.normal_(self.tokens.weight, std=0.1)

    def forward(self, tokens, labels):
        hidden = self.norm(self.encoder(self.tokens(tokens) + self.places))
        scores = functional.linear(hidden, self.tokens.weight, self.bias)
        return functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def main():
    args = parse_args()
    set_random_seed(args.seed)
    device = "cpu" if args.local_rank == -1 else get_accelerator().device_name(args.local_rank)
    model = Bert()
    see_memory_usage("the model is made", force=True)
    model_engine, _, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    rank = torch.distributed.get_rank()
    if rank == 0:
        count = sum(param.numel() for param in model.parameters())
        logger.info(f"{count} parameters, ZeRO stage {model_engine.zero_optimization_stage()}")
        print(f"parameters {count}", flush=True)

    start_step = 0
    if args.load_checkpoint_dir is not None:
        _, client_state = model_engine.load_checkpoint(load_dir=args.load_checkpoint_dir)
        start_step = client_state["checkpoint_step"]

    dataset = make_dataset(args.seed)
    loader = DataLoader(
        dataset,
        batch_size=model_engine.train_micro_batch_size_per_gpu(),
        sampler=DistributedSampler(dataset),
    )
    batches = iter(RepeatingLoader(loader))
    for _ in range(start_step * model_engine.gradient_accumulation_steps()):
        next(batches)  # what was seen before the checkpoint

    model_engine.train()
    for step in range(start_step + 1, args.steps + 1):
        total = torch.zeros(())
        for _ in range(model_engine.gradient_accumulation_steps()):
            tokens, labels = (one.to(device) for one in next(batches))
            loss = model_engine(tokens, labels)
            model_engine.backward(loss)
            model_engine.step()
            total += loss.detach().cpu() / model_engine.gradient_accumulation_steps()
        total = total.to(device)
        torch.distributed.all_reduce(total)
        if rank == 0:
            print(f"step {step:4d}  loss {total.item() / torch.distributed.get_world_size():.7f}", flush=True)
        if args.checkpoint_dir is not None and step % args.checkpoint_every == 0 and step < args.steps:
            model_engine.save_checkpoint(save_dir=args.checkpoint_dir, client_state={"checkpoint_step": step})


if __name__ == "__main__":
    main()
