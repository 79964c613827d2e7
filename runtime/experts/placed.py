"""A model whose experts are on different ranks, with the methods that an engine calls.

n ranks train the same layers, each with its own samples. Groups of `ep_size` of them hold all experts
together, and n / ep_size ranks hold the same experts. An expert gets tokens from all ranks of its group, so
its gradients are summed over the ranks that hold it and divided by n, like those of other parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...shared.axes import SAMPLES, Axes
from ..comm.mesh import Lines
from ..comm.wire import before_unwired
from ..config import Config
from ..config.experts import ExpertParallelConfig
from ..errors import ConfigError
from ..mesh.domain import Domains
from ..mesh.names import NamesByRank
from ..mesh.parts import Parts
from .hf import DividedExperts
from .layer import Experts, MoE


def expert_lines(axes: Axes, size: int, *, is_strided: bool = False) -> tuple[Lines, Lines]:
    """Return the ranks that hold all experts together, and those that hold the same ones.

    Among ranks that train the same layers, those that hold all experts together are consecutive; with
    `is_strided`, those that hold the same ones are.
    """
    together: list[tuple[int, ...]] = []
    alike: list[tuple[int, ...]] = []
    for line in axes.lines(SAMPLES):
        num_lines = len(line) // size
        rows = [line[start : start + size] for start in range(0, len(line), size)]
        if is_strided:
            rows = [line[start::num_lines] for start in range(num_lines)]
        together += rows
        alike += [tuple(row[place] for row in rows) for place in range(size)]
    return together, alike


class PlacedExperts:
    """The experts of one model, over the ranks."""

    def __init__(self, module: nn.Module, axes: Axes, config: Config) -> None:
        """Find the layers of experts, and check that ranks can be grouped for them; the model is not changed.

        Order:  a collective
        Errors: ConfigError for sizes or settings that contradict each other
        """
        self._module, self._axes = module, axes
        self._is_strided = bool(config.use_data_before_expert_parallelism)
        self._layers = [(name, one) for name, one in module.named_modules() if isinstance(one, MoE)]
        if config.expert_parallel is not None and axes.pp > 1:
            raise ConfigError(
                f"expert_parallel.autoep_size {config.expert_parallel.size} with a PipelineModule: stacks of "
                "experts in stages are not divided in this version; build the layers of dslaunch.moe.MoE "
                "with an ep_size, and leave the section out"
            )
        ep = None if config.mesh is None else config.mesh.ep
        self._divided = DividedExperts(module, self._section(config, ep))
        own: set[tuple[int, bool]] = {(layer.ep_size, False) for _, layer in self._layers}
        own |= {(size, True) for size in self._divided.sizes}
        everywhere: list[Any] = [None] * dist.get_world_size()
        before_unwired()
        dist.all_gather_object(everywhere, sorted(own))
        kinds = sorted({kind for kinds in everywhere for kind in map(tuple, kinds)})
        _check_mesh({size for size, _ in kinds}, ep)
        self._kinds = [kind for kind in kinds if kind[0] > 1]
        for size, _ in self._kinds:
            _check(size, axes, config)
        for name, layer in self._layers:
            if layer.ep_size > 1:
                _check_no_buffers(name, layer.deepspeed_moe.experts)
        self._check_other_marks()

    def _section(self, config: Config, ep: int | None) -> ExpertParallelConfig | None:
        """Return how stacks are divided: by the ds_config's section, or by the mesh if no layer sets its own
        ep_size.
        """
        is_said = config.expert_parallel is not None or self._layers or self._axes.pp > 1
        if is_said or ep in (None, 1):
            return config.expert_parallel
        return ExpertParallelConfig(enabled=True, autoep_size=ep)

    @property
    def divides_stacks(self) -> bool:
        """True if stacks of experts will be cut, or an earlier engine has cut them."""
        return bool(self._divided.sizes)

    def join(self, domains: Domains) -> None:
        """Give the experts domains of their own, and their layers process groups.

        Order: a collective
        """
        axes, dense = self._axes, domains.dense.comm.mesh
        for size, is_divided in self._kinds:
            together, alike = expert_lines(axes, size, is_strided=self._is_strided)
            group = domains.add_group(together, axis=f"ep_size_{size}")
            parts, names = None, None
            if is_divided:
                self._divided.join(group)
                params = list(self._divided.params)
                parts = Parts(group, self._divided.cuts)
            else:
                layers = [(name, layer) for name, layer in self._layers if layer.ep_size == size]
                for name, layer in layers:
                    layer.axis.name = name
                    layer.axis.join(group)
                params = [
                    submodule for _, layer in layers for submodule in layer.deepspeed_moe.experts.parameters()
                ]
                names = NamesByRank(group, dict(_names(layers)))
            domain = domains.add(
                f"experts over {size} ranks" + (", cut" if is_divided else ""),
                sharers=alike,
                copies=domains.copies,
                shard_size=1 if dense.shard.is_alone else len(alike[0]),
                divisor=dense.divisor or axes.dp * axes.sp,
                params=params,
                parts=parts,
                names=names,
            )
            domains.of_experts[f"ep_size_{size}"] = (group.axis, domain.comm.mesh.sharers)
        for _, submodule in self._module.named_modules():
            if hasattr(submodule, "set_deepspeed_parallelism"):
                submodule.set_deepspeed_parallelism(self._is_strided)

    def divide(self, device: torch.device) -> None:
        """Replace stacks of all experts by this rank's part of them.

        Order: a collective
        """
        for size in self._divided.sizes:
            together, _ = expert_lines(self._axes, size, is_strided=self._is_strided)
            line = next(tuple(line) for line in together if dist.get_rank() in line)
            self._divided.divide(line, device=device)

    def check_whole(self, is_part: Callable[[nn.Parameter], bool]) -> None:
        """Check that no other plan divides the experts; `is_part` tells whether one divides a parameter.

        Errors: ConfigError
        """
        layers = [(f"{name}.deepspeed_moe.experts", one.deepspeed_moe.experts) for name, one in self._layers]
        known = [(name, one) for name, one in layers if one.axis.size > 1]
        for name, experts in [*known, *self._divided.modules]:
            for own, param in experts.named_parameters():
                if is_part(param):
                    raise ConfigError(
                        f"the experts of '{name}' are on different ranks, and tensor_parallel divides each "
                        f"of them, too ('{own}'), which is not available in this version: name the layers "
                        "that are divided in tensor_parallel.partition_config.layer_specs, with a rule of "
                        'partition_type "skip" for the experts before the others'
                    )

    def _check_other_marks(self) -> None:
        """Refuse other parameters that a program has marked as an expert's: they would be averaged over all
        ranks.
        """
        ours = {id(one) for _, layer in self._layers for one in layer.deepspeed_moe.experts.parameters()}
        ours |= {id(one) for one in self._divided.params}
        for name, param in self._module.named_parameters():
            if not getattr(param, "allreduce", True) and id(param) not in ours:
                raise ConfigError(
                    f"parameter '{name}' has allreduce=False, which marks experts that live on different "
                    "ranks, and is in no layer of experts: use dslaunch.moe.MoE, or leave the mark out"
                )


def _check_mesh(sizes: Collection[int], ep: int | None) -> None:
    """Check that the layers of all ranks fit the mesh; `sizes` are the ep_size of layers and of stacks.

    Errors: ConfigError
    """
    if ep is None or set(sizes) == {ep} or (ep == 1 and not sizes):
        return
    other = next((size for size in sorted(sizes) if size != ep), None)
    differing = (
        "no layer has experts over ranks" if other is None else f"a layer of the model has ep_size {other}"
    )
    raise ConfigError(
        f"ep={ep} in dslaunch --mesh or the ds_config's section mesh, and {differing}; give the layers MoE "
        "the same ep_size, or leave ep out"
    )


def _check(size: int, axes: Axes, config: Config) -> None:
    num_sharers = axes.dp * axes.sp
    if num_sharers % size:
        raise ConfigError(
            f"experts over {size} ranks (ep_size {size}): the ranks that train the same layers are "
            f"{num_sharers} (dp x sp), which {size} does not divide; give an ep_size that does"
        )
    for key, value in (
        ("mics_shard_size", config.zero.mics_shard_size),
        ("zero_hpz_partition_size", config.zero.hpz_partition_size),
    ):
        if value not in (None, -1, 0, 1):
            raise ConfigError(
                f"zero_optimization.{key} {value} and experts over {size} ranks (ep_size {size}) do not go "
                "together in this version: leave the key out; experts are shared by fewer ranks already"
            )


def _check_no_buffers(name: str, experts: Experts) -> None:
    for buffer, _ in experts.deepspeed_experts.named_buffers():
        raise ConfigError(
            f"the experts of '{name}' have a buffer, '{buffer}': with ep_size above 1 each rank would have "
            "a different buffer of that name, and a checkpoint would keep only one of these; use experts "
            "without buffers, such as "
            "LayerNorm in place of BatchNorm, or ep_size 1"
        )


def _names(layers: Sequence[tuple[str, MoE]]) -> Iterator[tuple[str, tuple[str, ...]]]:
    for name, layer in layers:
        begin = f"{name}.deepspeed_moe.experts." if name else "deepspeed_moe.experts."
        for own, those in layer.deepspeed_moe.experts.names():
            yield begin + own, tuple(begin + one for one in those)
