"""The attributes by which DeepSpeed's callers know a sharded parameter, and read it: `p.ds_id`,
`p.ds_shape` and so on.

Nothing else is attached to parameters: plain attributes, there from the moment a parameter
is sharded until `destroy()`, and not in a pickle or a copy. Properties of a subclass would attach
nothing, but while a parameter is here it must be an nn.Parameter exactly: torch.compile of torch 2.6
traces no other class.
Source: DeepSpeed 0.19.8 runtime/zero/partition_parameters.py, `_convert_to_deepspeed_param`
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from ..comm.mesh import Axis
from ..errors import ConfigError
from ..placement.stage_policy import Placement
from .gathered_parameters import GatheredParameters
from .model.sharded_model import ShardedModel
from .parameters.param_status import NAMES, ZeroParamStatus

_IDS = count()  # counts in the order in which parameters are sharded, the same on every rank
_ID_OF: Any = WeakTensorKeyDictionary()  # parameter -> its id, which zero.Init and initialize() agree on


def attach(
    param: nn.Parameter,
    *,
    shard: Tensor,
    is_sharded: bool,
    axis: Axis,
    shape: tuple[int, ...] | None = None,
) -> None:
    """Describe a parameter of which this rank keeps `shard`, 1-D; without elements where
    others have them all.

    `axis` has the ranks that share it; `shape` is that of the whole, where this rank has a part.

    Order: every rank must attach to the same parameters in the same order
    """
    handle = _Handle(param)
    if param not in _ID_OF:
        _ID_OF[param] = next(_IDS)
    vars(param).update(
        ds_id=_ID_OF[param],
        ds_shape=param.shape if shape is None else torch.Size(shape),
        ds_numel=param.numel() if shape is None else prod(shape),
        ds_tensor=shard,
        ds_persist=not is_sharded,  # whole on every rank at any time
        ds_process_group=axis.group,  # None: the default group, which may not be held (see mesh.py)
        ds_zero_partition_rank=axis.index,
        ds_zero_partition_world_size=axis.size,
        # DeepSpeed's hooks note users in this set; ours have other ways, see access.py
        ds_active_sub_modules=set(),
        all_gather=handle.all_gather,
        partition=handle.partition,
        partition_numel=handle.partition_numel,
        ds_summary=handle.summary,
        __getstate__=handle.state_of_others,
    )
    vars(param).setdefault("ds_status", ZeroParamStatus.AVAILABLE)


def describe(model: ShardedModel) -> None:
    """Attach DeepSpeed's attributes to every parameter of a model, if its stage shards parameters.

    Order: as attach
    """
    if model.policy.parameters is not Placement.SHARDED:
        return
    for sub_buffer in (sub_buffer for unit in model.units for sub_buffer in unit.sub_buffers):
        axis = sub_buffer.comm.mesh.shard
        members = zip(sub_buffer.members, sub_buffer.layout.slots, strict=True)
        for index, (member, slot) in enumerate(members):
            own = sub_buffer.layout.fragment(slot, axis.index, num_shards=axis.size)
            start, numel = (own.offset_in_shard, own.numel) if own else (0, 0)
            shard = sub_buffer.param_shard.own[start : start + numel]
            attach(
                member.param,
                shard=shard,
                is_sharded=sub_buffer.is_sharded,
                axis=axis,
                shape=sub_buffer.whole_shape(index),
            )


class _Handle:
    """DeepSpeed's methods of a parameter. The handle does not keep the parameter alive."""

    def __init__(self, param: nn.Parameter) -> None:
        self._param = TensorWeakRef(param)
        self._open: GatheredParameters | None = None

    def all_gather(self, param_list: Iterable[Any] | None = None) -> None:
        """Have the values of this parameter, or of those given, here until `partition()`.

        Order: a collective
        """
        if param_list is not None:
            for param in param_list:
                param.all_gather()
        elif self._open is None:
            self._open = GatheredParameters(self._owner())
            self._open.open()

    def partition(
        self,
        param_list: Iterable[Any] | None = None,
        hierarchy: int = 0,
        has_been_updated: bool = False,
        free_data: bool = True,
    ) -> None:
        """End what `all_gather()` has begun; `has_been_updated` takes over what rank 0 has written meanwhile.

        Order:  a collective
        Errors: ConfigError for values that were written without saying so, and for `free_data` False
        """
        if not free_data:
            raise ConfigError(
                "partition(free_data=False) would leave the parameter's values here while it counts as "
                "sharded; leave it out, and call partition() when the values are no longer needed"
            )
        if param_list is not None:
            for param in param_list:
                param.partition(has_been_updated=has_been_updated)
        elif self._open is not None:
            gathered, self._open = self._open, None
            gathered.close(modifier_rank=0 if has_been_updated else None)

    def partition_numel(self) -> int:
        """Number of the parameter's elements that this rank keeps, the size of `ds_tensor`."""
        numel: int = vars(self._owner())["ds_tensor"].numel()
        return numel

    def summary(self) -> dict[str, Any]:
        """State of the parameter at the moment, for printing."""
        param = self._owner()
        known = vars(param)
        return {
            "id": known["ds_id"],
            "status": known["ds_status"].name,
            "numel": param.numel(),
            "ds_numel": known["ds_numel"],
            "shape": tuple(param.shape),
            "ds_shape": tuple(known["ds_shape"]),
            "requires_grad": param.requires_grad,
            "grad_shape": None if param.grad is None else tuple(param.grad.shape),
            "persist": known["ds_persist"],
            "active_sub_modules": known["ds_active_sub_modules"],
            "ds_tensor.shape": known["ds_tensor"].shape,
        }

    def state_of_others(self) -> dict[str, Any]:
        """Attributes of the parameter that are not ours."""
        return {name: value for name, value in vars(self._owner()).items() if name not in NAMES}

    def _owner(self) -> nn.Parameter:
        param = self._param()
        if not isinstance(param, nn.Parameter):
            raise AssertionError("a parameter's method outlived it")
        return param
