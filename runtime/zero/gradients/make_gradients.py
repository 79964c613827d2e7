"""The choice of a sub-buffer's kind of gradients."""

from __future__ import annotations

from functools import partial

import torch

from ...errors import ConfigError
from ...offload.offload import Offload
from ...placement.stage_policy import Placement
from ..parameters.flat_buffer import FlatBuffer
from ..parameters.sub_buffer_plan import SubBufferPlan
from .disk_gradients import DiskGradients, DiskPlace
from .gradients import Gradients, OwnGradients
from .replicated_gradients import AccumulatedGradients, ReplicatedGradients
from .sharded_gradients import HostGradients, ShardedGradients, SumPlace


def make_gradients(plan: SubBufferPlan, offload: Offload) -> Gradients:
    """Return the gradients of a sub-buffer's trained parameters.

    They leave the device in a backward for the place in `plan.residence`, if `offload` takes any.
    """
    names, params, layout, residence = plan.names, plan.params, plan.layout, plan.residence
    dtype, device, precision = plan.dtype, plan.device, plan.precision
    index, num_shards, is_alone = plan.shard_index, plan.num_shards, not plan.mesh.has_average
    placement = plan.policy.gradients
    is_sharded = placement is Placement.SHARDED and (
        num_shards > 1 or plan.mesh.rescale != 1.0 or offload.frees_gradients
    )
    is_wider = dtype != torch.float32 and precision.sums == torch.float32
    is_added_up_wider = is_wider and not is_sharded
    if is_alone and not is_added_up_wider and not is_sharded:
        return OwnGradients(names, params, layout)
    sent = torch.float32 if is_added_up_wider else (precision.sent or dtype)
    if sent.itemsize < dtype.itemsize and not is_sharded:
        raise ConfigError(
            f"communication_data_type is narrower than parameter '{names[0]}', which is {dtype}: micro "
            "batches would be added up in it, too; write stage 2 or 3, where they are not, or leave it out"
        )
    whole = FlatBuffer(layout, dtype=sent, device=device)
    if is_sharded:
        place = SumPlace(
            dtype=precision.sums or torch.float32,
            device=torch.device("cpu") if residence.steps_on_host else device,
            pin_memory=residence.pins_states,
        )
        if residence.has_grads_on_disk:
            # A rank without peers takes the norm parameter by parameter, wherever it has gradients as
            # autograd made them.
            by_slot = sorted((slot.offset, slot.offset + slot.numel) for slot in layout.slots)
            disk = DiskPlace(
                partial(offload.make_disk_spill, residence.states, what=f"gradients of {plan.label}"),
                offload.outbox,
                tuple(by_slot)
                if is_alone and not is_wider
                else (plan.own_run(plan.mesh.chunk_index, num_chunks=plan.mesh.sharers.size),),
            )
            return DiskGradients(
                names, params, whole, sums=place, index=index, num_shards=num_shards, place=disk
            )
        sharded = HostGradients if residence.steps_on_host else ShardedGradients
        return sharded(names, params, whole, sums=place, index=index, num_shards=num_shards)
    kind = AccumulatedGradients if sent != dtype else ReplicatedGradients
    return kind(names, params, whole, shard=whole.shard(index, num_shards=num_shards))
