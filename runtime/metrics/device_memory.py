"""Uses of a GPU's memory, printed when a rank runs out of it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ...shared.table import table
from ..errors import explain
from ..placement.stage_policy import Placement
from ..zero.model.sharded_model import ShardedModel

_GIB = 2**30
_CACHE_SHARE = 0.1  # part of the GPU in free pieces that fit no request
_ALLOC_CONF = "PYTORCH_CUDA_ALLOC_CONF" if torch.__version__ < "2.9" else "PYTORCH_ALLOC_CONF"
_MODELS: weakref.WeakSet[ShardedModel] = weakref.WeakSet()


class Use(NamedTuple):
    """One kind of memory on a GPU, in bytes, and the way to make it smaller."""

    kind: str
    num_bytes: int
    advice: str


def watch_memory(model: ShardedModel) -> None:
    """Have an uncaught torch.OutOfMemoryError told with what this model holds."""
    _MODELS.add(model)
    explain(torch.OutOfMemoryError, describe_memory)


def describe_memory() -> str:
    """Return the table of the current GPU, and what to change first, as lines."""
    device = torch.cuda.current_device()
    free, total = torch.cuda.mem_get_info(device)
    uses = list_uses(torch.device("cuda", device), tuple(_MODELS))
    allocated = torch.cuda.memory_allocated(device)
    reserved = torch.cuda.memory_reserved(device)
    rest = max(0, allocated - sum(use.num_bytes for use in uses))
    uses += [
        Use(
            "activations and the rest",
            rest,
            "a smaller train_micro_batch_size_per_gpu with more gradient_accumulation_steps, or activation "
            "checkpointing",
        ),
        Use(
            "free, in pieces that torch keeps",
            reserved - allocated,
            f"{_ALLOC_CONF}=expandable_segments:True in the environment",
        ),
        Use(
            "outside of torch",
            max(0, total - free - reserved),
            "CUDA's own context and NCCL's buffers, half a GiB to two, and other programs on this GPU "
            "(nvidia-smi lists them)",
        ),
    ]
    rank = os.environ.get("RANK", "0")
    lines = [f"rank {rank} ran out of memory on GPU {device}, which has {_size(total)}; in use there:"]
    cells = [(use.kind, _size(use.num_bytes)) for use in uses]
    lines += [f"  {line}" for line in table(cells, numbers=(1,))]
    lines.append(f"what to change first: {_first(uses, total).advice} (docs/train/out-of-memory.md)")
    return "\n".join(lines)


class Kinds(NamedTuple):
    """Memory that models hold on a device, in bytes."""

    parameters: int
    gathered: int  # parameters, for their uses
    gradients: int
    optimizer: int  # masters and states


def bytes_by_kind(device: torch.device, models: Iterable[ShardedModel]) -> Kinds:
    """Return what models hold on a device. Memory that several tensors share counts once."""
    sub_buffers = [one for model in models for unit in model.units for one in unit.sub_buffers]
    seen: set[int] = set()

    def total(tensors: Iterable[Tensor]) -> int:
        num_bytes = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.device == device and storage.nbytes() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                num_bytes += storage.nbytes()
        return num_bytes

    params = total(one.param_shard.kept for one in sub_buffers)
    gathered = total(one.param_shard.values.flat for one in sub_buffers)
    optimizer = total(tensor for one in sub_buffers for tensor in one.optimizer_shard.held())
    grads = total(tensor for one in sub_buffers if one.is_trained for tensor in one.gradients.held())
    return Kinds(params, gathered, grads, optimizer)


def list_uses(device: torch.device, models: Iterable[ShardedModel]) -> list[Use]:
    """Return what models hold on a GPU, by kind, and what makes that smaller."""
    models = tuple(models)
    params, gathered, grads, optimizer = bytes_by_kind(device, models)
    sub_buffers = [one for model in models for unit in model.units for one in unit.sub_buffers]
    plans = [one.plan for one in sub_buffers]
    has_params_in_shards = any(plan.is_sharded for plan in plans)
    has_states_in_shards = any(plan.policy.optimizer is Placement.SHARDED for plan in plans)
    return [
        Use(
            "parameters",
            params,
            "zero_optimization.offload_param" if has_params_in_shards else "zero_optimization.stage 3",
        ),
        Use(
            "gathered parameters",
            gathered,
            "a smaller zero_optimization.reduce_bucket_size, which cuts the model into smaller units",
        ),
        Use(
            "gradients",
            grads,
            "zero_optimization.offload_optimizer, which takes them along"
            if any(one.is_trained and one.gradients.is_reduced_in_backward for one in sub_buffers)
            else "zero_optimization.stage 2",
        ),
        Use(
            "masters and optimizer states",
            optimizer,
            "zero_optimization.offload_optimizer" if has_states_in_shards else "zero_optimization.stage 1",
        ),
    ]


def _first(uses: Iterable[Use], total: int) -> Use:
    """Return the largest; what torch keeps in pieces only if it is much."""
    return max(
        (use for use in uses if "pieces" not in use.kind or use.num_bytes > total * _CACHE_SHARE),
        key=lambda use: use.num_bytes,
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f} GiB" if num_bytes >= _GIB / 100 else f"{num_bytes / 2**20:.2f} MiB"
