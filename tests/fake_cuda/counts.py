"""What a step asks of a GPU: `python -m tests.fake_cuda.counts` prints a table, counted on the fake device.

24 blocks of one linear layer, bf16, AdamW, clipping; rank 0 of 2, in the fourth step.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from typing import Any

import torch

import dslaunch
from tests.fake_cuda.ranks import Parent
from tests.fake_cuda.torch_cuda import device
from tests.runtime.models import Blocks
from tests.runtime.ranks import Ranks

DEPTH, WIDTH, STEPS = 24, 64, 4
PINNED, PLAIN = {"device": "cpu", "pin_memory": True}, {"device": "cpu", "pin_memory": False}
DISK = {"device": "nvme", "nvme_path": tempfile.gettempdir()}
ROWS: list[tuple[str, int, dict[str, Any]]] = [
    *((f"stage {stage}", stage, {}) for stage in (0, 1, 2, 3)),
    ("stage 1, optimizer in pinned memory", 1, {"offload_optimizer": PINNED}),
    ("stage 2, optimizer in pinned memory", 2, {"offload_optimizer": PINNED}),
    ("stage 2, optimizer in host memory", 2, {"offload_optimizer": PLAIN}),
    ("stage 2, the same with super_offload", 2, {"offload_optimizer": {**PINNED, "super_offload": True}}),
    (
        *("stage 2, the same with delayed_update", 2),
        {"offload_optimizer": {**PINNED, "delayed_update": {"enabled": True, "warmup_steps": 1}}},
    ),
    ("stage 2, optimizer on a disk", 2, {"offload_optimizer": DISK}),
    ("stage 3, optimizer in pinned memory", 3, {"offload_optimizer": PINNED}),
    ("stage 3, parameters in pinned memory", 3, {"offload_param": PINNED}),
    ("stage 3, both in pinned memory", 3, {"offload_param": PINNED, "offload_optimizer": PINNED}),
    ("stage 3, both in host memory", 3, {"offload_param": PLAIN, "offload_optimizer": PLAIN}),
    ("stage 3, half of the optimizer in pinned memory", 3, {"offload_optimizer": {**PINNED, "ratio": 0.5}}),
    ("stage 3, parameters on a disk", 3, {"offload_param": DISK}),
    ("stage 3, both on a disk", 3, {"offload_param": DISK, "offload_optimizer": DISK}),
]


def count(rank: int, stage: int, zero: dict[str, Any]) -> list[int]:
    """Return host waits, launches, and bytes copied to the host and to the device."""
    torch.manual_seed(0)
    config = {
        "train_batch_size": 4,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "reduce_bucket_size": WIDTH,
            **zero,
        },
    }
    engine, *_ = dslaunch.initialize(model=Blocks(WIDTH, DEPTH), config=config)
    own = torch.ones(2, WIDTH, dtype=torch.bfloat16, device=engine.device)
    for number in range(STEPS):
        if number == STEPS - 1:
            torch.cuda.synchronize()
            device().clear_counters()
        engine.backward(engine(own).float().pow(2).mean())
        engine.step()
    copies = device().copies()
    found = [
        sum(device().host_waits().values()),
        sum(device().launches().values()) + copies.get("device to device", (0, 0))[0],
        copies.get("device to host", (0, 0))[1],
        copies.get("host to device", (0, 0))[1],
    ]
    engine.destroy()
    return found


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    parent = Parent()
    ranks = Ranks(parent.fork)
    print("| placement | host waits | launches | bytes to the host | bytes to the device |")
    print("|---|---|---|---|---|")
    for name, stage, zero in ROWS:
        found = ranks(count, stage, zero, world_size=2)[0]
        print(f"| {name} | {' | '.join(f'{one:,}' for one in found)} |", flush=True)
    ranks.stop()
    parent.stop()


if __name__ == "__main__":
    from tests.fake_cuda import counts  # not __main__, which ranks cannot import

    sys.exit(counts.main())
