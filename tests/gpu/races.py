"""The offload paths under torch's own detector of races: TORCH_CUDA_SANITIZER=1 python -m tests.gpu.races

It knows one address for each tensor, so it does not see a race of views that begin at different ones. It
knows nothing of host memory, and of a collective only that it was asked for. First a race is planted: it
must see that one.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch.cuda._sanitizer import CUDASanitizerErrors

import dslaunch
from tests.runtime.models import batch, loss_of, make_config, make_model

from .line import tell

PINNED = {"device": "cpu", "pin_memory": True}
CASES: list[tuple[int, dict[str, Any]]] = [
    (0, {}),
    (1, {"offload_optimizer": PINNED}),
    (2, {"offload_optimizer": PINNED}),
    (3, {"offload_optimizer": PINNED, "offload_param": PINNED}),
    (2, {"offload_optimizer": {**PINNED, "super_offload": True}}),
]


def is_planted_race_seen() -> bool:
    """Whether the detector looks at all: nothing puts in order what one stream writes and another reads."""
    values, side = torch.ones(1000, device="cuda"), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        values.add_(1)
    try:
        values.clone()
    except CUDASanitizerErrors:
        torch.cuda.synchronize()
        return True
    return False


def main() -> None:
    """The detector ends the process at the first race."""
    if os.environ.get("TORCH_CUDA_SANITIZER") != "1":
        sys.exit("set TORCH_CUDA_SANITIZER=1: without it this looks for nothing")
    if "tests.fake_cuda.torch_cuda" in sys.modules:
        from tests.fake_cuda.torch_cuda import device

        device().set_finds_conflicts(False)  # it would find a race first
    tell("a race that is planted", right=is_planted_race_seen())
    for stage, zero in CASES:
        given = make_config(
            stage=stage, bf16={"enabled": True}, gradient_clipping=0.05, reduce_bucket_size=100
        )
        given["zero_optimization"].update(zero)
        engine, *_ = dslaunch.initialize(model=make_model(), config=given)
        for number in range(3):
            engine.backward(loss_of(engine, batch(number).cuda().bfloat16()))
            engine.step()
        torch.cuda.synchronize()
        tell(f"stage {stage} {', '.join(zero)}".strip(), right=True)
        engine.destroy()


if __name__ == "__main__":
    main()
