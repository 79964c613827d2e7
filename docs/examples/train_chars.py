"""Train a small GPT, byte by byte, on the source text of Python's own standard library: no download needed.

    dslaunch docs/examples/train_chars.py --deepspeed --deepspeed_config docs/examples/ds_config_chars.json

Precision, batch size, optimizer, warm-up and ZeRO stage are the ds_config's. With --out DIR rank 0 leaves two
files there: metrics.jsonl, one line per step, and memory.json, the peak memory of every rank.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import socket
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

import dslaunch

NUM_BYTES = 256  # the vocabulary: every value of a byte
INIT_STD = 0.05

# Letters in shapes: B sequences of a batch, T bytes of a sequence, W width of the model, H heads.


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    width: int = 96
    depth: int = 3
    num_heads: int = 4
    context: int = 64


class Block(nn.Module):
    """Attention, then a feed-forward layer, each added to its input after a norm."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.num_heads = size.num_heads
        self.attention_norm = nn.LayerNorm(size.width)
        self.query_key_value = nn.Linear(size.width, 3 * size.width)
        self.attention_out = nn.Linear(size.width, size.width)
        self.feed_norm = nn.LayerNorm(size.width)
        self.feed_in = nn.Linear(size.width, 4 * size.width)
        self.feed_out = nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, W] to the same shape."""
        x = x + self.attention_out(self.attend(self.attention_norm(x)))
        x = x + self.feed_out(functional.gelu(self.feed_in(self.feed_norm(x))))
        return x

    def attend(self, x: Tensor) -> Tensor:
        num_sequences, length, width = x.shape
        heads = self.query_key_value(x).view(
            num_sequences, length, 3, self.num_heads, width // self.num_heads
        )
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each [B, H, T, W / H]
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).reshape(num_sequences, length, width)


class CharGPT(nn.Module):
    """From the bytes so far to scores for the next one. The head shares the embedding's weights."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_BYTES, size.width)
        self.position = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.depth))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, NUM_BYTES, bias=False)
        self.apply(self.init_weights)
        self.head.weight = self.embedding.weight

    @staticmethod
    def init_weights(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=INIT_STD)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, text: Tensor) -> Tensor:
        """[B, T] int64 to [B, T, 256]."""
        x = self.embedding(text) + self.position(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x))
        return scores


class Windows(Dataset[Tensor]):
    """Stretches of `length` + 1 bytes of a text, each beginning where the one before ends."""

    def __init__(self, text: bytes, length: int) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.length = length

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length

    def __getitem__(self, index: int) -> Tensor:
        first = index * self.length
        return self.text[first : first + self.length + 1]


def main() -> None:
    args = parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.cpu:
        dslaunch.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)  # rank 0's weights go to all ranks
    size = ModelSize()
    model = CharGPT(size)
    engine, _, loader, _ = dslaunch.initialize(
        model=model,
        model_parameters=model.parameters(),
        training_data=Windows(read_standard_library(), size.context),
        **config_arguments(args),
    )
    if engine.global_rank == 0:
        print(describe(model, engine), flush=True)
    train(engine, loader, args)
    write_memory(args.out, engine)
    dist.destroy_process_group()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small GPT on Python's standard library.")
    parser.add_argument("--local_rank", type=int, help="given by the launcher")
    parser.add_argument("--steps", type=int, default=300, help="[default: 300]")
    parser.add_argument(
        "--log_every", type=int, default=10, help="steps between progress lines  [default: 10]"
    )
    parser.add_argument("--stage", type=int, help="ZeRO stage  [default: as the ds_config says]")
    parser.add_argument("--cpu", action="store_true", help="train on the CPU even where there is a GPU")
    parser.add_argument("--threads", type=int, help="of each worker on the CPU  [default: as torch decides]")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for metrics.jsonl and memory.json")
    parser = dslaunch.add_config_arguments(parser)
    args = parser.parse_args()
    if not args.deepspeed_config:
        parser.error(
            "which ds_config? Give --deepspeed --deepspeed_config docs/examples/ds_config_chars.json"
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


def read_standard_library() -> bytes:
    """The modules at the top of the standard library, in the order of their names: 4 to 5 MB."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    if not text:
        raise SystemExit(
            f"train_chars: {folder} has no *.py files to train on; use a Python that comes with them"
        )
    return text


def describe(model: nn.Module, engine: Any) -> str:
    num_params = sum(param.numel() for param in model.parameters())
    dtype = "bf16" if engine.bfloat16_enabled() else "fp32"
    return (
        f"GPT of {num_params:,} parameters in {dtype}, ZeRO stage {engine.zero_optimization_stage()}, "
        f"{engine.world_size} ranks on {engine.device.type}, {engine.train_batch_size()} sequences a step"
    )


def train(engine: Any, loader: Any, args: argparse.Namespace) -> None:
    """Train for `args.steps` steps; rank 0 prints how it goes and writes metrics.jsonl."""
    batches = endless(loader)
    is_writer = engine.global_rank == 0
    with open_metrics(args.out if is_writer else None) as metrics:
        meter = Meter()
        for step in range(1, args.steps + 1):
            loss, num_tokens = train_step(engine, batches)
            meter.add(num_tokens)
            if not is_writer:
                continue
            record = {
                "step": step,
                "loss": loss,
                "tokens_per_s": meter.last_rate(),
                "seconds": meter.seconds(),
            }
            metrics.write(json.dumps(record) + "\n")
            metrics.flush()
            if step % args.log_every == 0 or step in (1, args.steps):
                print(
                    f"step {step:4d}  loss {loss:.4f}  "
                    f"{meter.rate_since_asked():7,.0f} tokens/s  {meter.seconds():5.1f} s",
                    flush=True,
                )


def train_step(engine: Any, batches: Iterator[Tensor]) -> tuple[float, int]:
    """One optimizer step: the mean loss over its global batch, and how many tokens all ranks trained on."""
    losses: list[Tensor] = []
    num_tokens = 0
    for _ in range(engine.gradient_accumulation_steps()):
        text = next(batches).to(engine.device, torch.int64)
        scores = engine(text[:, :-1])
        loss = functional.cross_entropy(scores.float().flatten(0, 1), text[:, 1:].flatten())
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
        num_tokens += text[:, 1:].numel()
    mean = torch.stack(losses).mean().double()
    dist.all_reduce(mean)
    loss_value = mean.item() / engine.world_size
    if not math.isfinite(loss_value):
        raise SystemExit(f"train_chars: the loss is {loss_value} at step {engine.global_steps}; lower the lr")
    return loss_value, num_tokens * engine.world_size


def endless(loader: Any) -> Iterator[Tensor]:
    """Full batches, epoch after epoch."""
    while True:
        yield from loader


class Meter:
    """Counts tokens against the clock."""

    def __init__(self) -> None:
        self._began = self._step_began = self._step_ended = self._asked_at = time.perf_counter()
        self._step_tokens = self._tokens_since_asked = 0

    def add(self, num_tokens: int) -> None:
        """A step with so many tokens has ended."""
        self._step_began, self._step_ended = self._step_ended, time.perf_counter()
        self._step_tokens = num_tokens
        self._tokens_since_asked += num_tokens

    def seconds(self) -> float:
        return self._step_ended - self._began

    def last_rate(self) -> float:
        """Tokens per second of the last step."""
        return self._step_tokens / (self._step_ended - self._step_began)

    def rate_since_asked(self) -> float:
        """Tokens per second since this was called last."""
        rate = self._tokens_since_asked / (self._step_ended - self._asked_at)
        self._asked_at, self._tokens_since_asked = self._step_ended, 0
        return rate


def open_metrics(folder: Path | None) -> IO[str]:
    if folder is None:
        return open(os.devnull, "w")
    folder.mkdir(parents=True, exist_ok=True)
    return open(folder / "metrics.jsonl", "w")


def write_memory(folder: Path | None, engine: Any) -> None:
    """Rank 0 writes every rank's peak memory.

    Order: a collective
    """
    is_on_gpu = engine.device.type == "cuda"
    mine = {
        "rank": engine.global_rank,
        "host": socket.gethostname(),
        "max_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "cuda_peak_bytes": torch.cuda.max_memory_allocated(engine.device) if is_on_gpu else None,
    }
    everyone: list[dict[str, Any]] = [mine] * engine.world_size
    dist.all_gather_object(everyone, mine)
    if folder is not None and engine.global_rank == 0:
        (folder / "memory.json").write_text(json.dumps(everyone, indent=2) + "\n")


if __name__ == "__main__":
    main()
