"""The rows that are compared."""

from __future__ import annotations

from tests.runtime.plan.beside import Row
from tests.runtime.plan.layouts import layout


def _rows(program: str, *layouts: tuple[str, ...], world_size: int = 2, rank: int = 0) -> list[Row]:
    rows = []
    for words in layouts:
        name, config = layout(*words)
        rows.append(Row(program=program, layout=name, config=config, world_size=world_size, rank=rank))
    return rows


def _stages(
    program: str, *, zero: str = "stage 1", world_size: int = 2, ranks: tuple[int, ...] = (0, 1)
) -> list[Row]:
    words = (zero, "bf16, 4 micro batches")
    return [row for rank in ranks for row in _rows(program, words, world_size=world_size, rank=rank)]


_SCHEDULES = ("gpipe", "interleaved", "zero bubble", "zbv", "dualpipev")
_ZEROS = (
    "stage 0", "stage 1", "stage 2", "stage 3", "stage 3, small parameters kept",
    "stage 1, optimizer on cpu", "stage 2, optimizer on cpu", "stage 2, optimizer on nvme",
    "stage 3, optimizer on cpu",
    "stage 3, optimizer on nvme", "stage 3, parameters on cpu", "stage 3, both on cpu",
    "stage 3, both on nvme", "stage 2, large buckets",
)  # fmt: skip
_MODELS = (
    "blocks, tied", "blocks, dropout", "blocks, half frozen", "blocks, zero.Init",
    "blocks, torch.optim.AdamW", "blocks, torch.optim.SGD", "blocks, torch.optim.Adafactor",
    "blocks, autocast", "blocks, checkpointed",
    "blocks, checkpointed, reentrant",
    "Llama", "GPT2", "Mixtral", "Qwen3Moe", "Llama, eager attention",
    "Llama, checkpointed", "Llama, LoRA", "packed, adapters", "Llama, Trainer", "Bert", "T5", "ViT",
    "train_chars.py",
)  # fmt: skip
ROWS = [
    *_rows("blocks", *((zero,) for zero in _ZEROS)),
    *_rows("blocks", ("stage 3, hpZ",), ("stage 3",), world_size=4),
    *(
        row
        for rest in (
            *("fp32", "fp16", "torch_autocast", "bf16, 2 micro batches", "fp32, 2 micro batches"),
            *("bf16, states too", "bf16, masters too"),
        )
        for row in _rows("blocks", ("stage 1", rest), ("stage 3", rest), ("stage 2, optimizer on cpu", rest))
    ),
    *_rows(
        "blocks",
        *((zero, "bf16, Muon") for zero in ("stage 1", "stage 2, optimizer on cpu", "stage 3, both on nvme")),
    ),
    *(row for model in _MODELS for row in _rows(model, ("stage 2",), ("stage 3",))),
    *_stages("pipeline"),
    *_stages("pipeline", world_size=4, ranks=(0, 2)),
    *_stages("pipeline", zero="stage 3", world_size=4, ranks=(0, 2)),
    *_stages("pipeline, 4 stages", world_size=4, ranks=(0, 1, 2, 3)),
    *_stages("pipeline, two lengths"),
    *_stages("pipeline, checkpointed"),
    *_stages("pipeline, tied"),
    *(row for schedule in _SCHEDULES for row in _stages(f"pipeline, {schedule}")),
    *_rows("Llama", ("stage 1", "bf16, layers over 2 ranks"), ("stage 3", "bf16, layers over 2 ranks")),
    *_rows("Llama", ("stage 3", "bf16, layers over 2 ranks"), world_size=4),
    *_rows("Llama, sequences over ranks", ("stage 2",), ("stage 3",)),
    *_rows("experts", ("stage 2",)),
    *_rows("experts over ranks", ("stage 2",)),
    *_rows("Mixtral", ("stage 2", "bf16, experts over 2 ranks")),
    *_rows("convolutions", ("stage 2", "fp32"), ("stage 3", "fp32")),
    *_rows("Llama", ("stage 3, both on cpu",), ("stage 1", "fp32"), ("stage 0", "torch_autocast")),
]
FEW = (
    "blocks, stage 1, bf16",
    "blocks, stage 3, bf16",
    "blocks, stage 2, optimizer on cpu, bf16",
    "blocks, stage 3, both on cpu, bf16",
    "blocks, stage 3, bf16, masters too",
    "pipeline, interleaved, stage 1, bf16, 4 micro batches, rank 1",
)  # in every run of the tests
