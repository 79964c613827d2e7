"""A small GPT trained with fewer bytes for each parameter, beside float32 masters and states.

    python benchmarks/bench_narrow_states.py [--short] [--publish]

A model of characters learns the documentation of this checkout in bf16 with AdamW, on one rank, from three
seeds with each choice of masters and states: the seed chooses the first weights and the order of the samples.
Two numbers are kept of each run: the mean loss of the last 100 steps, and the loss of text that training has
not seen. A choice is as good as float32 if its losses differ less from those of the same seed than the seeds
do.
--short trains for 20 steps, to see that the command works. --publish writes the table into
docs/reference/benchmarks.md. Nothing here fails on a loss.
"""

from __future__ import annotations

import logging
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import dslaunch
from benchmarks.guide_section import CHECKOUT, arguments, conditions, goal, paragraphs, publish, table

COMMAND = "make bench-narrow-states"
NUM_STEPS, SHORT_STEPS, NUM_LAST = 1000, 20, 100
SEEDS = (0, 1, 2)
SIZE, LENGTH, WIDTH, NUM_HEADS, NUM_LAYERS = 8, 64, 64, 4, 2
NUM_SYMBOLS = 128
HELD_OUT = 64  # samples
CHOICES: dict[str, dict[str, str]] = {
    "16: float32 masters and states": {},
    "12: bf16 states": {"optimizer_state_dtype": "bf16"},
    "10: 8-bit states": {"optimizer_state_dtype": "8bit"},
    "8: bf16 masters and states": {"master_dtype": "bf16", "optimizer_state_dtype": "bf16"},
    "6: bf16 masters, 8-bit states": {"master_dtype": "bf16", "optimizer_state_dtype": "8bit"},
}


class Losses(NamedTuple):
    """The losses of one run."""

    trained: float
    held_out: float


class Block(nn.Module):
    """A pre-norm block of a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.before_attention(x)).unflatten(-1, (3, NUM_HEADS, -1)).permute(2, 0, 3, 1, 4)
        found = nn.functional.scaled_dot_product_attention(*heads.unbind(), is_causal=True)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        result: Tensor = x + self.mlp(self.before_mlp(x))
        return result


class SmallGpt(nn.Module):
    """A GPT of characters."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(NUM_SYMBOLS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, NUM_SYMBOLS)

    def forward(self, text: Tensor) -> Tensor:
        """Return the mean loss of each next character.

        Shapes: text [samples, LENGTH + 1] int64
        """
        x = self.symbols(text[:, :-1]) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), text[:, 1:].flatten())


def read_text() -> Tensor:
    """Return all pages of the documentation as numbers below NUM_SYMBOLS."""
    pages = sorted((CHECKOUT / "docs").rglob("*.md"))
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    return torch.frombuffer(bytearray(text.encode("ascii", "replace")), dtype=torch.uint8).long()


def samples_of(text: Tensor, starts: Tensor) -> Tensor:
    return text[starts[:, None] + torch.arange(LENGTH + 1)]


def train(choice: dict[str, str], seed: int, num_steps: int, text: Tensor) -> Losses:
    """Return the losses of one run."""
    torch.manual_seed(seed)
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}}
    config: dict[str, Any] = {
        "train_batch_size": SIZE,
        "bf16": {"enabled": True},
        "optimizer": optimizer,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1},
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"total_num_steps": num_steps, "warmup_num_steps": num_steps // 20},
        },
        "data_types": choice,
    }
    engine = dslaunch.initialize(model=SmallGpt(), config=config)[0]
    order = torch.Generator().manual_seed(seed)
    last = len(text) * 9 // 10
    losses = []
    for _ in range(num_steps):
        loss = engine(samples_of(text, torch.randint(last - LENGTH - 1, (SIZE,), generator=order)))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    unseen = torch.linspace(last, len(text) - LENGTH - 2, HELD_OUT).long()
    with torch.no_grad():
        held_out = engine(samples_of(text, unseen)).item()
    engine.destroy()
    return Losses(statistics.fmean(losses[-NUM_LAST:]), held_out)


def measure(num_steps: int) -> str:
    """Return the table as Markdown."""
    text = read_text()
    began = time.monotonic()
    found: dict[str, list[Losses]] = {}
    for seed in SEEDS:
        for name, choice in CHOICES.items():
            found.setdefault(name, []).append(train(choice, seed, num_steps, text))
            print(f"{time.monotonic() - began:6.0f} s  seed {seed}  {name}  {found[name][-1]}", flush=True)
    wide = found[next(iter(CHOICES))]
    spreads = Losses(*(max(of_seeds) - min(of_seeds) for of_seeds in zip(*wide, strict=True)))
    rows = []
    for name, runs in found.items():
        differences = Losses(
            *(
                max(abs(a - b) for a, b in zip(one, other, strict=True))
                for one, other in zip(zip(*runs, strict=True), zip(*wide, strict=True), strict=True)
            )
        )
        is_wide = runs is wide
        rows.append(
            [
                name,
                " ".join(f"{run.trained:.4f}" for run in runs),
                "" if is_wide else f"{differences.trained:.4f}",
                " ".join(f"{run.held_out:.4f}" for run in runs),
                "" if is_wide else f"{differences.held_out:.4f}",
                "" if is_wide else goal(differences.held_out, round(spreads.held_out, 4)),
            ]
        )
    head = [
        "bytes a parameter",
        f"loss, last {NUM_LAST} steps, by seed",
        "largest difference",
        "loss of unseen text, by seed",
        "largest difference",
        "goal: the spread of seeds",
    ]
    num_params = sum(param.numel() for param in SmallGpt().parameters())
    about = (
        f"{conditions()}, torch {torch.__version__}; {num_params:,} parameters, {num_steps:,} steps of "
        f"{SIZE} samples of {LENGTH} characters. The losses of float32's seeds differ by up to "
        f"{spreads.trained:.4f}, and by {spreads.held_out:.4f} on unseen text."
    )
    return paragraphs(about, table(head, rows))


def main() -> None:
    parser = arguments(__doc__, short=f"{SHORT_STEPS} steps: does it work?")
    options = parser.parse_args()
    if options.short and options.publish:
        parser.error("--short --publish: a short training is not worth publishing; leave one of them out")
    logging.getLogger("dslaunch").setLevel(logging.ERROR)
    publish(COMMAND, measure(SHORT_STEPS if options.short else NUM_STEPS), is_wanted=options.publish)


if __name__ == "__main__":
    main()
