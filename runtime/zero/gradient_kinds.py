"""Which kind of gradients a sub-buffer has."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ..errors import ConfigError
from ..offload.offload import PartHome
from .buffer import FlatBuffer
from .gradients import AccumulatedGradients, Gradients, OwnGradients, ReplicatedGradients
from .layout import FlatLayout
from .policy import Placement
from .precision import Precision
from .sharded_gradients import HostGradients, ShardedGradients, SumPlace


def make_gradients(  # noqa: PLR0913
    placement: Placement,
    names: Sequence[str],
    params: Sequence[nn.Parameter],
    layout: FlatLayout,
    *,
    dtype: torch.dtype,
    precision: Precision,
    device: torch.device,
    index: int,
    num_shards: int,
    is_alone: bool,
    home: PartHome,
    frees: bool,
) -> Gradients:
    """Gradients of parameters of this `dtype` and placement, for shard `index`; `is_alone`: there is no other rank.

    `frees`: gradients go to host memory during backward where the optimizer steps there, and `home` says whether these do.
    """
    is_sharded = placement is Placement.SHARDED and (num_shards > 1 or frees)
    is_added_up_wider = dtype != torch.float32 and precision.sums == torch.float32 and not is_sharded
    if is_alone and not is_added_up_wider and not is_sharded:
        return OwnGradients(names, params, layout)
    sent = torch.float32 if is_added_up_wider else (precision.sent or dtype)
    if sent.itemsize < dtype.itemsize and not is_sharded:
        raise ConfigError(
            f"communication_data_type is narrower than parameter '{names[0]}', which is {dtype}: micro batches would be added "
            "up in it, too; write stage 2 or 3, where they are not, or leave it out"
        )
    whole = FlatBuffer(layout, dtype=sent, device=device)
    if is_sharded:
        place = SumPlace(
            dtype=precision.sums or torch.float32,
            device=torch.device("cpu") if home.steps_on_host else device,
            pin_memory=home.pins_states,
        )
        sharded = HostGradients if home.steps_on_host else ShardedGradients
        return sharded(names, params, whole, sums=place, index=index, num_shards=num_shards)
    kind = AccumulatedGradients if sent != dtype else ReplicatedGradients
    return kind(names, params, whole, shard=whole.shard(index, num_shards=num_shards))
