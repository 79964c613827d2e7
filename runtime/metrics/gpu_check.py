"""Check of each GPU's arithmetic: `dslaunch check --gpu` starts this program, one rank on each slot.

No rank waits for another. Each prints one line of JSON: how fast its GPU multiplies and copies, and whether
its products are right.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from ...shared import marks

ENOUGH_S = 0.5  # each operation is repeated for so long
SIZE = 8192  # side of the matrices: 128 MiB in bfloat16
TIMEOUT_S = 60.0  # a GPU that hangs does so without end


def main(size: int = SIZE) -> NoReturn:
    """Measure and tell."""
    watchdog = threading.Timer(TIMEOUT_S, _give_up)
    watchdog.daemon = True
    watchdog.start()
    try:
        result = _measured(size)
    except Exception as error:  # any error of a driver or a library goes into the answer
        result = {"problem": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
    _tell(result)
    os._exit(0)  # a context that is broken may not end


def _give_up() -> None:
    _tell({"problem": f"did not end within {TIMEOUT_S:g} s"})
    os._exit(0)


def _tell(told: dict[str, Any]) -> None:
    sys.stdout.write(marks.GPU + json.dumps({"rank": int(os.environ["RANK"]), **told}) + "\n")
    sys.stdout.flush()


def _measured(size: int) -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {"problem": "", "name": ""}
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    with torch.no_grad():
        num_wrong = _num_wrong(device, size)
        # a GPU takes more power for numbers that differ, and is slower then, as in a training
        left, right = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
        product = torch.empty_like(left)
        multiply_s = _seconds(lambda: torch.mm(left, right, out=product))
        copy_s = _seconds(lambda: product.copy_(left))
        pinned = torch.empty(left.shape, dtype=left.dtype, device="cpu", pin_memory=True)
        load_s = _seconds(lambda: left.copy_(pinned, non_blocking=True))
    num_bytes = left.numel() * left.element_size()
    return {
        "problem": "",
        "name": torch.cuda.get_device_name(device),
        "num_wrong": num_wrong,
        "flops_per_s": 2 * size**3 / multiply_s,
        "copied_bytes_per_s": 2 * num_bytes / copy_s,
        "loaded_bytes_per_s": num_bytes / load_s,
    }


def _num_wrong(device: torch.device, size: int) -> int:
    """Return how many rows and columns of a product are wrong.

    The matrices hold small whole numbers, so every sum is exact in float32, in whatever order it is made; and
    the sums of the product's rows and columns are known without the product.
    Source: R. Freivalds, Probabilistic machines can use less running time, 1977
    """
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False  # a sum is rounded once
    rows, columns = size // 2, size // 8
    left = (torch.arange(rows * rows, device="cpu") * 5 % 7 - 3).view(rows, rows)
    right = (torch.arange(rows * columns, device="cpu") * 3 % 7 - 3).view(rows, columns)
    exact, rounded = (
        (left.to(device, dtype) @ right.to(device, dtype)).cpu() for dtype in (torch.float32, torch.bfloat16)
    )
    left, right, sums = left.double(), right.double(), exact.double()
    wrong_rows = (sums.sum(1) != left @ right.sum(1)) | (rounded != exact.to(torch.bfloat16)).any(1)
    wrong_columns = sums.sum(0) != left.sum(0) @ right
    return int(wrong_rows.sum() + wrong_columns.sum())


def _seconds(work: Callable[[], object]) -> float:
    """Return the seconds of one call, as the GPU repeats it."""
    num_calls = 1
    while True:
        work()  # the first one of all may be slow
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(num_calls):
            work()
        torch.cuda.synchronize()
        took_s = time.perf_counter() - began
        if took_s >= ENOUGH_S:
            return took_s / num_calls
        num_calls *= 2


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
