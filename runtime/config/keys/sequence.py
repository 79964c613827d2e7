"""Sequences that are divided over ranks."""

from __future__ import annotations

from .key import used

SEQUENCE = (
    used(
        "sequence_parallel_size",
        "so many neighbours have the same samples, each another part of their sequences; 1 if left out",
    ),
    used("data_parallel_size", "must be the number of ranks without those neighbours; DeepSpeed needs both"),
    used(
        "sequence.gradient",
        '"mean": gradients are averaged over all ranks; "sum": added over ranks that share samples, and '
        'averaged over the others; "mean" if left out, but "sum" at stages 0 to 2 for programs that import '
        "deepspeed; ours, not DeepSpeed's",
    ),
)
