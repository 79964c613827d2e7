"""Where the host waits for the GPU within a step, by lines of the runtime: torch's own report of such waits.

Of what happens in autograd's threads, as in a hook, torch reports when the backward has ended: it counts, and
its line is that of the backward. Waits for events are not reported.

python -m tests.gpu.host_waits
"""

from __future__ import annotations

import argparse
import collections
import json
import traceback
import warnings
from typing import Any

import torch

import dslaunch

from ..fake_cuda.features import EVENT, FEATURES, NUM_BEFORE
from .model import GPT, MIDDLE, SMALL, config, tokens

PINNED = {"device": "cpu", "pin_memory": True}
STEPS = 4
BACKWARD = " (this line, or a hook that autograd calls in it)"
ALONE = (
    "events of a monitor", "cpu_checkpointing", "evaluation, stage 0", "MoE", "MoE, no drop_tokens",
    "Hugging Face experts",
)  # fmt: skip
CASES: list[tuple[str, dict[str, Any]]] = [
    ("stage 0", {"stage": 0}),
    ("stage 3", {"stage": 3}),
    ("stage 2, optimizer in pinned memory", {"stage": 2, "offload_optimizer": PINNED}),
    ("stage 3, both in pinned memory", {"stage": 3, "offload_optimizer": PINNED, "offload_param": PINNED}),
]


def main() -> None:
    """One line of JSON for each placement."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--first", action="store_true", help="the first two alone")
    given = parser.parse_args()
    size = SMALL if given.small else MIDDLE
    for name, zero in CASES[:2] if given.first else CASES:
        engine, *_ = dslaunch.initialize(model=GPT(size), config=config(size, **zero))
        ids = tokens(size, 0)
        lines: dict[str, int] = {}
        for number in range(STEPS):
            if number == STEPS - 1:
                lines = waits_of(lambda engine=engine, ids=ids: _step(engine, ids))  # type: ignore[misc]
            else:
                _step(engine, ids)
        _tell(name, lines)
        engine.destroy()
    if not given.first:
        _tell_features()


def _tell(name: str, lines: dict[str, int], **more: int) -> None:
    print(json.dumps({"name": name, "host_waits": sum(lines.values()), **more, "lines": lines}), flush=True)


def _tell_features() -> None:
    """Those that one rank has, beside what the fake device counts of them."""
    for feature in FEATURES:
        if feature.name not in ALONE and feature.num_ranks > 1:
            continue
        try:
            with feature.steps() as step:
                for _ in range(NUM_BEFORE):
                    step()
                lines = waits_of(step)
        except ImportError as error:  # of transformers
            print(json.dumps({"name": feature.name, "left out": str(error)}), flush=True)
            continue
        expected = sum(number for what, number in feature.waits.items() if what != EVENT)
        _tell(feature.name, lines, expected=expected)


def _step(engine: dslaunch.Engine, ids: torch.Tensor) -> None:
    engine.backward(engine(ids))
    engine.step()


def waits_of(work: Any) -> dict[str, int]:
    """Call `work`; return how often the host waited, by the line of the runtime that it was in."""
    seen: collections.Counter[str] = collections.Counter()

    def note(*_: Any, **__: Any) -> None:
        ours = [
            frame
            for frame in traceback.extract_stack()
            if any(folder in frame.filename for folder in ("/runtime/", "/kernels/"))
            and "/torch/" not in frame.filename
            and "/tests/" not in frame.filename
        ]
        if not ours:
            seen["not ours"] += 1
            return
        last = ours[-1]
        place = f"{'/'.join(last.filename.split('/')[-3:])}:{last.lineno}"
        seen[place + BACKWARD * (".backward(" in (last.line or ""))] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return dict(seen)


if __name__ == "__main__":
    main()
