"""Models of public repositories trained by torch's FSDP2: its MemTracker's estimate beside what the fake
device's allocator counts.

`PUBLIC_SOURCES=FOLDER python -m tests.runtime.plan.fsdp2` prints the rows; with --publish they are a table of
docs/reference/plan-accuracy.md.
"""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.guide_section import replace_section, table
from tests.fake_cuda.ranks import Parent
from tests.runtime.plan.beside import PLANNED_STEPS, Row, measure, predict
from tests.runtime.plan.layouts import layout
from tests.runtime.plan.programs import LENGTH, SAMPLES, VOCAB
from tests.runtime.plan.public_models import PUBLIC_SOURCES, PublicModel, public_models
from tests.runtime.plan.table import PAGE
from tests.runtime.ranks import Ranks

COMMAND = "python -m tests.runtime.plan.fsdp2"


def compare_fsdp2(rank: int, name: str) -> tuple[int | str, int]:
    """Return the peak of two steps by MemTracker, without values, and by the device's allocator.

    In place of the first stands the error of torch's tensors without values where a model cannot be made of
    them.
    """
    from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 - it registers the back end

    from tests.fake_cuda.torch_cuda import device

    model = public_models()[name]
    without_values = DeviceMesh.from_group(torch.distributed.new_group(backend="fake"), "cuda")
    tracker = MemTracker()
    try:
        with FakeTensorMode():
            _train(model, rank, without_values, watch=lambda *parts: _track(tracker, parts))
        estimate: int | str = int(tracker.get_tracker_snapshot("peak")[torch.device("cuda", rank)]["Total"])
    except DataDependentOutputException as error:
        estimate = type(error).__name__
    native = device()
    native.reset_peaks(rank)
    _train(model, rank, init_device_mesh("cuda", (torch.distributed.get_world_size(),)))
    return estimate, int(native.memory(rank)["peak"])


def _track(tracker: Any, parts: tuple[Any, ...]) -> Any:
    tracker.track_external(*parts)
    return tracker


def _train(public: PublicModel, rank: int, mesh: Any, watch: Callable[..., Any] | None = None) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    place = torch.device("cuda", rank)
    rounded = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    with torch.device(place):
        model: nn.Module = public.made()
    blocks: Any = model.get_submodule(public.blocks)
    for module in (*blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=rounded)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, foreach=True)
    with nullcontext() if watch is None else watch(model, optimizer) as tracker:
        for _ in range(PLANNED_STEPS):
            tokens: Tensor = torch.randint(0, VOCAB, (SAMPLES, LENGTH), device=place)
            public.loss_of(model, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
            if tracker is not None:
                tracker.reset_mod_stats()  # it counts a module's calls once


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--publish", action="store_true", help=f"write the table into {PAGE.name}")
    given = parser.parse_args()
    if not public_models():
        raise SystemExit(f"{PUBLIC_SOURCES} names no folder with checkouts as karpathy/nanoGPT")
    parent, rows = Parent(), []
    for name in public_models():
        ranks = Ranks(parent.fork)
        try:
            rows.append(_cells(name, ranks))
        finally:
            ranks.stop()
        print(rows[-1], flush=True)
    parent.stop()
    day = datetime.datetime.now(tz=datetime.timezone.utc).date()
    head = ["model", "FSDP2: MemTracker", "measured", "difference", "stage 3: `dslaunch plan`", "measured",
            "difference"]  # fmt: skip
    text = (
        f"Run on {day} with torch {torch.__version__}, on 2 ranks. Sizes are in KiB.\n\n{table(head, rows)}"
    )
    if given.publish:
        replace_section(PAGE, COMMAND, text)


def _cells(name: str, ranks: Ranks) -> list[str]:
    estimate, peak = ranks(compare_fsdp2, name, world_size=2, deadline_s=120.0)[0]
    ranks.stop()
    layout_name, config = layout("stage 3")
    row = Row(program=name, layout=layout_name, config=config)
    planned = max(predict(row).peaks)
    real = max(ranks(measure, row, world_size=2, deadline_s=120.0)[0].peaks)
    return [name, *_pair(estimate, peak), *_pair(planned, real)]


def _pair(told: int | str, real: int) -> tuple[str, str, str]:
    if isinstance(told, str):
        return told, f"{real / 2**10:,.0f}", ""
    return f"{told / 2**10:,.0f}", f"{real / 2**10:,.0f}", f"{100 * (told / real - 1):+.1f} %"


if __name__ == "__main__":
    from tests.runtime.plan import fsdp2  # not __main__, which ranks cannot import

    fsdp2.main()
