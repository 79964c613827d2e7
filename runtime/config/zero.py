"""zero_optimization: what is sharded, and in which portions it travels."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from .keys.value import POSITIVE, Bool, Count, Texts
from .offload import OffloadOptimizerConfig, OffloadParamConfig
from .section import Section

STAGES = (0, 1, 2, 3)


def _read_stage(value: Any) -> int:
    if isinstance(value, bool) or value not in STAGES:
        raise ValueError("is not a ZeRO stage; there are 0, 1, 2 and 3")
    return int(value)


def _size_or_none(value: Any) -> int | None:
    if value is None or (not isinstance(value, bool) and value in (-1, 0)):
        return None
    if not POSITIVE.accepts(value):
        raise ValueError("is not a number of ranks, 1 or above; -1 or 0: off")
    return int(value)


def _hpz_or_none(value: Any) -> int | None:
    return None if value == 1 else _size_or_none(value)  # 1 is DeepSpeed's "off"


class LeafModuleConfig(Section):
    """Modules whose parameters are gathered as one at stage 3, whatever is inside; see
    `zero.set_z3_leaf_modules`.
    """

    classes: Texts = ()
    """names of classes whose modules are gathered as one at stage 3"""
    names: Texts = ()
    """full names of such modules"""
    name_suffixes: Texts = ()
    """ends of full names of such modules"""


class ZeroConfig(Section):
    """ZeRO: stage 0 shards nothing, 1 the optimizer states, 2 the gradients too, 3 the parameters too."""

    stage: Annotated[Literal[0, 1, 2, 3], BeforeValidator(_read_stage)] = 0
    """0: nothing is sharded; 1: optimizer states are; 2: gradients too; 3: parameters too"""
    reduce_bucket_numel: Count = Field(default=500_000_000, alias="reduce_bucket_size")
    """elements that are reduced together"""
    prefetch_bucket_numel: Count = Field(default=50_000_000, alias="stage3_prefetch_bucket_size")
    """at stage 3, elements that are gathered together; the next ones are under way meanwhile (also:
    prefetch_bucket_size)"""
    ignore_unused_parameters: Bool = True
    """false: a step in which a trained parameter has got no gradient ends with an error that names it; true,
    if left out: such a gradient is zero. In a program that imports `deepspeed`, false counts where it does in
    DeepSpeed: at stages 1 and 2 with offload_optimizer"""
    enable_sanity_checks: Bool = False
    """true: a program that imports `deepspeed` is stopped where it writes to gathered parameters without a
    modifier_rank; false, if left out: that is a warning. Programs of dslaunch's own are always stopped"""
    sub_group_numel: Count = Field(default=1_000_000_000, alias="sub_group_size")
    """with states on NVMe, largest number of elements that are updated together; else without effect"""
    param_persistence_numel: Count = Field(default=100_000, alias="stage3_param_persistence_threshold")
    """at stage 3, a unit stays whole on every rank, so that it is not gathered at each use, if none of its
    parameters has more elements; 0: every unit is sharded. Not with offload_param or zero_hpz_partition_size
    (also: param_persistence_threshold)"""
    model_persistence_numel: Count = Field(default=sys.maxsize, alias="stage3_model_persistence_threshold")
    """elements that may stay whole so in all; the first units do (also: model_persistence_threshold)"""
    mics_shard_size: Annotated[int | None, BeforeValidator(_size_or_none)] = None
    """what is sharded is shared by so many neighbouring ranks, and each such group has all of it; -1 or left
    out: by all"""
    hpz_partition_size: Annotated[int | None, BeforeValidator(_hpz_or_none)] = Field(
        default=None, alias="zero_hpz_partition_size"
    )
    """at stage 3, parameters are shared by so many neighbouring ranks (those of one host), all else by all; 1
    or left out: parameters, too"""
    leaf_module: LeafModuleConfig = LeafModuleConfig()
    offload_optimizer: OffloadOptimizerConfig = OffloadOptimizerConfig()
    offload_param: OffloadParamConfig = OffloadParamConfig()

    @model_validator(mode="after")
    def _one_mesh(self) -> ZeroConfig:
        if self.mics_shard_size is not None and self.hpz_partition_size is not None:
            raise ValueError(
                f"zero_optimization.mics_shard_size {self.mics_shard_size} and zero_hpz_partition_size "
                f"{self.hpz_partition_size} are two ways to share; keep one"
            )
        return self

    @model_validator(mode="after")
    def _whole_offload(self) -> ZeroConfig:
        path = "zero_optimization.offload_param"
        faults = [
            self.offload_optimizer.fault("zero_optimization.offload_optimizer"),
            self.offload_param.fault(path),
        ]
        if self.offload_param.is_on and self.hpz_partition_size is not None:
            faults.append(
                f"{path} and zero_optimization.zero_hpz_partition_size do not go together; keep one"
            )
        states = self.offload_optimizer
        if self.offload_param.device == "nvme" and (states.super_offload or states.delayed_update.enabled):
            key = "super_offload" if states.super_offload else "delayed_update"
            faults.append(
                f'{path}.device "nvme" and zero_optimization.offload_optimizer.{key} do not go together: '
                "what the step writes would have to be read from the disk first; keep one"
            )
        for fault in filter(None, faults):
            raise ValueError(fault)
        return self

    @property
    def max_whole_numel(self) -> tuple[int, int]:
        """Elements of a parameter, and of all together, that stay whole on every rank at stage 3; 0: none do.

        Parameters that lie elsewhere between their uses, or are shared by fewer ranks than their states, come
        and go all the same.
        """
        if self.offload_param.is_on or self.hpz_partition_size is not None:
            return 0, 0
        return self.param_persistence_numel, self.model_persistence_numel

    def looks_for_unused(self, *, is_lenient: bool) -> bool:
        """Return whether ignore_unused_parameters counts; for DeepSpeed's programs (`is_lenient`) with
        offloaded states only.

        Source: DeepSpeed 0.19.8 runtime/zero/stage_1_and_2.py, which alone reads it,
                and with cpu_offload alone
        """
        return not is_lenient or (self.stage in (1, 2) and self.offload_optimizer.is_on)
