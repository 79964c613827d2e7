"""A model with something of everything that a checkpoint keeps, and all of an engine's state by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import dslaunch
from tests.runtime.models import make_config, make_model, snapshot, train_engine

WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 6, "warmup_max_lr": 0.02}}


class WithCounter(nn.Module):
    """A buffer that training changes, a frozen layer, and two groups of shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(7, 15), nn.Linear(15, 17))
        self.frozen = nn.Linear(17, 15)
        self.frozen.requires_grad_(False)
        self.last = nn.Linear(15, 1)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.codes = nn.Parameter(torch.randint(0, 9, (3,)), requires_grad=False)
        self.note = "none"

    def get_extra_state(self) -> dict[str, str]:
        return {"note": self.note}

    def set_extra_state(self, state: dict[str, str]) -> None:
        self.note = state["note"]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.last(self.frozen(self.blocks(x)))
        return y


def make(
    stage: int, bf16: bool, *, seed: int = 0, kind: type[nn.Module] = WithCounter, **changes: Any
) -> Any:
    config = make_config(
        stage=stage, bf16={"enabled": bf16}, scheduler=WARMUP, reduce_bucket_size=1, **changes
    )
    engine, *_ = dslaunch.initialize(model=make_model(kind, seed=seed), config=config)
    return engine


def run(engine: Any, *, first: int, steps: int) -> None:
    dtype = torch.bfloat16 if engine.bfloat16_enabled() else torch.float32
    train_engine(engine, steps=steps, first=first, dtype=dtype)


def tensors(engine: Any) -> dict[str, Tensor]:
    return snapshot({name: value for name, value in engine.state_dict().items() if torch.is_tensor(value)})


def whole_state(engine: Any) -> dict[str, Tensor]:
    """Every parameter, buffer, master and optimizer state by name, unsharded, on every rank."""
    state = tensors(engine)
    for sub_buffer in engine.optimizer.sub_buffers:
        whole_of: dict[str, Tensor] = {}
        with sub_buffer.here():
            for kind, shard in {
                "master": sub_buffer.optimizer_shard.master,
                **sub_buffer.optimizer_shard.states,
            }.items():
                whole = whole_of[kind] = torch.zeros(sub_buffer.layout.numel)
                start, stop = sub_buffer.layout.shard_range(
                    sub_buffer.plan.shard_index, num_shards=sub_buffer.plan.num_shards
                )
                whole[start:stop] = shard
        for kind, whole in whole_of.items():
            if sub_buffer.plan.num_shards > 1:
                torch.distributed.all_reduce(whole)
            for member, slot in zip(sub_buffer.members, sub_buffer.layout.slots, strict=True):
                state[f"{member.name} {kind}"] = whole[slot.offset : slot.offset + slot.numel].view(
                    slot.shape
                )
    return state
