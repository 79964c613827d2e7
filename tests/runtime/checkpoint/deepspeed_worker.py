"""One rank of DeepSpeed: trains and saves every case, and writes down what its process then held.

python deepspeed_worker.py FOLDER      with RANK, LOCAL_RANK, WORLD_SIZE set

Beside each checkpoint, <case>/truth.pt: parameters and buffers, masters, states, lr, scale and counters
when it was saved, and the losses of the next steps on both ranks; and what DeepSpeed's own zero_to_fp32
makes of the checkpoint.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import deepspeed  # type: ignore[import-not-found]
import torch
import torch.distributed as dist
from deepspeed.checkpoint import ds_to_universal  # type: ignore[import-not-found]
from deepspeed.utils import (  # type: ignore[import-not-found]
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
)
from deepspeed.utils.zero_to_fp32 import (  # type: ignore[import-not-found]
    get_fp32_state_dict_from_zero_checkpoint,
)
from torch import Tensor

from tests.runtime.checkpoint.deepspeed_cases import AFTER, BEFORE, CASES, CLIENT_STATE, TAG, Case, make_tied
from tests.runtime.models import train_engine

STATES = ("exp_avg", "exp_avg_sq", "momentum_buffer")


def _whole(param: Any, stage: int) -> Tensor:
    if stage == 3:
        with deepspeed.zero.GatheredParameters([param]):
            found: Tensor = param.detach().clone()
            return found
    copy: Tensor = param.detach().clone()
    return copy


def _own_states(engine: Any, param: Any) -> dict[str, Tensor]:
    """At stage 0, where states are whole: of the parameter, or of the float32 copy in its place."""
    optimizer = engine.optimizer
    for low, high in zip(
        getattr(optimizer, "fp16_groups", []), getattr(optimizer, "fp32_groups", []), strict=True
    ):
        for own, master in zip(low, high, strict=True):
            if own is param:
                return {"master": master, **optimizer.optimizer.state[master]}
    return {"master": param, **optimizer.state[param]}


def _from_shards(optimizer: Any, param: Any, kind: str) -> Tensor:
    """At stages 1 and 2. (DeepSpeed's safe_get_full_optimizer_state fails there on a rank that has nothing
    of the parameter.)
    """
    shards = (
        getattr(optimizer, "single_partition_of_fp32_groups", None) or optimizer.fp32_groups_flat_partition
    )
    whole = torch.zeros(param.numel())
    mapping = param._hp_mapping
    if mapping is not None:
        groups = getattr(optimizer, "bit16_groups", None) or optimizer.bf16_groups
        number = next(i for i, group in enumerate(groups) if any(one is param for one in group))
        flat = (
            shards[number].detach() if kind == "master" else optimizer.optimizer.state[shards[number]][kind]
        )
        low, high = mapping.lp_fragment_address, mapping.hp_fragment_address
        whole[low.start : low.start + low.numel] = flat[high.start : high.start + high.numel]
    dist.all_reduce(whole)
    return whole.view(param.shape)


def _truth(engine: Any, case: Case) -> dict[str, Any]:
    tensors = {name: _whole(param, case.stage) for name, param in engine.module.named_parameters()}
    tensors |= {name: value.clone() for name, value in engine.module.named_buffers()}
    for name, param in engine.module.named_parameters():
        if not param.requires_grad:
            continue
        if case.stage == 0:
            own = _own_states(engine, param)
            values = {key: own[key].detach().float().clone() for key in ("master", *STATES) if key in own}
        elif case.stage == 3:
            values = {"master": safe_get_full_fp32_param(param)}
            values |= {kind: safe_get_full_optimizer_state(param, kind) for kind in case.kinds}
        else:
            values = {kind: _from_shards(engine.optimizer, param, kind) for kind in ("master", *case.kinds)}
        tensors |= {f"{name} {kind}": value.clone() for kind, value in values.items()}
    return {"tensors": tensors, "lr": engine.get_lr(), "scale": getattr(engine.optimizer, "cur_scale", 1.0)}


def _steps(engine: Any) -> int:
    """What the optimizer counts, or, if it counts nothing, how often it has stepped."""
    states = getattr(engine.optimizer, "optimizer", engine.optimizer).state.values()
    counts = [int(state["step"]) for state in states if "step" in state]
    return max(counts, default=engine.global_steps - engine.skipped_steps)


def make(case: Case, folder: Path) -> None:
    model, groups = make_tied(seed=3)
    client = None
    config = case.config()
    if case.sgd:
        del config["optimizer"]
        client = torch.optim.SGD(groups, lr=0.01, momentum=0.9)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, optimizer=client, config=config)
    train_engine(engine, steps=BEFORE, dtype=case.dtype)
    engine.save_checkpoint(str(folder), client_state=dict(CLIENT_STATE))
    truth = _truth(engine, case)
    truth["skipped"], truth["steps"] = engine.skipped_steps, _steps(engine)
    losses = train_engine(engine, steps=AFTER, first=BEFORE, dtype=case.dtype)
    both: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(both, losses)
    truth["losses"] = both
    if dist.get_rank() == 0:
        if case.is_exported:
            truth["exported"] = dict(get_fp32_state_dict_from_zero_checkpoint(str(folder)))
        torch.save(truth, folder / "truth.pt")
        if case.is_universal:
            _convert(folder)
    engine.destroy()


def _convert(folder: Path) -> None:
    ds_to_universal.main(
        argparse.Namespace(
            input_folder=str(folder / TAG),
            output_folder=str(folder / f"{TAG}_universal"),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
    )


def main(root: Path) -> None:
    torch.set_num_threads(1)
    for name in deepspeed.ops.__compatible_ops__:  # what needs a compiler, its own all-reduce included
        deepspeed.ops.__compatible_ops__[name] = False
    deepspeed.get_accelerator().is_fp16_supported = lambda: True  # it says no for a CPU; torch can
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{root}/store", rank=rank, world_size=world_size)
    for case in CASES:
        print(f"case {case.name}", flush=True)
        make(case, root / case.name)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
