"""Cost of the runtime's Python for each parameter in a step of stage 3.

    python benchmarks/bench_small_parameters.py

A model of 80 blocks of 25 parameters with 8 elements each, of which every one is sharded, as rank 0 of 8 in
one process: torch's back end "fake" sends nothing, so the values mean nothing. The time is that of the thread
on its processor, whatever else the machine does, and the least of many steps. A step computes next to
nothing: what it takes more than the same forward and backward in plain torch is the runtime's.

Kinds of work are timed one inside the other, each without those in it, in steps of their own; what the clock
itself takes is measured with calls of an empty function, and taken off.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import dslaunch
from dslaunch.runtime.zero.access import access
from dslaunch.runtime.zero.model import reducer
from dslaunch.runtime.zero.parameters import param_shard
from tests.gpu.one_of_eight import RANKS, pretend

BLOCKS, PER_BLOCK, WIDTH, BATCH = 80, 25, 8, 2
STEPS, WARM_UP, PROBES = 20, 4, 20_000


class Block(nn.Module):
    """A block that is a unit. Half of its parameters are saved as they are, half as another view of their
    memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names = [f"scale_{index}" for index in range(PER_BLOCK)]
        for name in self.names:
            self.register_parameter(name, nn.Parameter(torch.ones(WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        for index, name in enumerate(self.names):
            scale = getattr(self, name)
            x = x * (scale if index % 2 else scale.view(1, WIDTH))
        return x


class Clock:
    """The time of each kind of work, without what it calls of another kind."""

    def __init__(self) -> None:
        self.is_on = False
        self.spent_s: defaultdict[str, float] = defaultdict(float)
        self.num_calls: defaultdict[str, int] = defaultdict(int)
        self._kinds = ["the rest"]
        self._since = 0.0

    def start(self) -> None:
        """A step begins."""
        self.spent_s.clear()
        self.num_calls.clear()
        self.is_on, self._since = True, time.thread_time()

    def stop(self) -> None:
        """End the timing."""
        self._change()
        self.is_on = False

    def _change(self) -> None:
        now = time.thread_time()
        self.spent_s[self._kinds[-1]] += now - self._since
        self._since = now

    def timed(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, of this kind from now on."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.is_on:
                return function(*args, **kwargs)
            self._change()
            self._kinds.append(kind)
            try:
                return function(*args, **kwargs)
            finally:
                self._change()
                self._kinds.pop()
                self.num_calls[kind] += 1

        return call

    def cost_s(self) -> tuple[float, float]:
        """Return what one call costs the kind that is called, and the one that calls."""
        probe = self.timed("probe", lambda: None)
        self.start()
        for _ in range(PROBES):
            probe()
        self.stop()
        return self.spent_s["probe"] / PROBES, self.spent_s["the rest"] / PROBES


PLACES, SAVED, HANDED_IN, SENT = "change of place", "saved tensors", "gradients handed in", "collectives"


def watch(clock: Clock) -> None:
    """Time what runs for each parameter; before the engine is made, which looks some of it up."""
    for name in ("put_all", "take_away_all"):
        setattr(param_shard, name, clock.timed(PLACES, getattr(param_shard, name)))
    make_hooks, make_hook = access.Access._make_hooks, reducer.Reducer._hook

    def timed_hooks(self: access.Access) -> Any:
        pack, unpack = (clock.timed(SAVED, one) for one in make_hooks(self))
        pack._is_dslaunch = True  # type: ignore[attr-defined]
        return pack, unpack

    def timed_hook(self: reducer.Reducer, *indices: int) -> Any:
        return clock.timed(HANDED_IN, make_hook(self, *indices))

    access.Access._make_hooks = timed_hooks  # type: ignore[method-assign]
    reducer.Reducer._hook = timed_hook  # type: ignore[method-assign]
    for owner, name in (
        (reducer.BackwardReducer, "_ask_finished"),
        (param_shard.ParamShard, "start_unshard"),
    ):
        setattr(owner, name, clock.timed(SENT, getattr(owner, name)))


def least_s(step: Callable[[], object]) -> float:
    """Return the shortest time of the thread in a step."""
    times = []
    for _ in range(WARM_UP + STEPS):
        start = time.thread_time()
        step()
        times.append(time.thread_time() - start)
    return min(times[WARM_UP:])


def main() -> None:
    """Print microseconds for each parameter and step."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=0, help="train so many, for a profiler; print nothing")
    given = parser.parse_args()
    torch.set_num_threads(1)
    pretend()
    clock = Clock()
    watch(clock)
    own = torch.ones(BATCH, WIDTH)
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    num_params = sum(1 for _ in model.parameters())

    def plain() -> None:
        model(own).pow(2).mean().backward()
        for param in model.parameters():
            param.grad = None

    plain_s = least_s(plain)
    config = {
        "train_batch_size": BATCH * RANKS,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "gradient_clipping": 1.0,
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "reduce_bucket_size": PER_BLOCK * WIDTH,
        },
    }
    engine, *_ = dslaunch.initialize(model=model, config=config)

    def step() -> None:
        engine.backward(engine(own).pow(2).mean())
        engine.step()

    if given.steps:
        for _ in range(given.steps):
            step()
        return
    whole_s = least_s(step)
    inside_s, outside_s = clock.cost_s()
    spent_s: dict[str, float] = {}
    for _ in range(STEPS):
        clock.start()
        step()
        clock.stop()
        for kind in (PLACES, SAVED, HANDED_IN, SENT):
            found = clock.spent_s[kind] - clock.num_calls[kind] * inside_s
            if kind == HANDED_IN:
                found -= clock.num_calls[SENT] * outside_s
            spent_s[kind] = min(spent_s.get(kind, found), found)
    rest_s = whole_s - plain_s - sum(spent_s.values())
    print(f"{num_params} parameters in {BLOCKS} units; microseconds for each parameter and step")
    for kind, found in {"plain torch's forward and backward": plain_s, **spent_s, "the rest": rest_s}.items():
        print(f"{kind:40} {found / num_params * 1e6:6.2f}")
    print(f"{'the runtime, all of it':40} {(whole_s - plain_s) / num_params * 1e6:6.2f}")
    engine.destroy()


if __name__ == "__main__":
    main()
