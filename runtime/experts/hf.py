"""Experts of Hugging Face models: modules whose parameters are stacks with all experts along dimension 0.

Each rank keeps its part of the stacks. With it the module's own forward computes the tokens that arrive from
all ranks; no token is dropped.

Source: transformers 5.23 integrations/moe.py: a forward of (hidden_states, top_k_index, top_k_weights)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..comm.rank_group import RankGroup
from ..config.experts import ExpertParallelConfig
from ..errors import ConfigError
from ..mesh.cut import Cut, cut_evenly
from ..zero.parameters.early_parameter import early_of
from .dispatch import ExpertAxis, through_rows

_FORWARD = ("hidden_states", "top_k_index", "top_k_weights")


class DividedExperts:
    """The stacks of one model, and how they are divided by the ds_config's section expert_parallel."""

    def __init__(self, module: nn.Module, settings: ExpertParallelConfig | None) -> None:
        """Find the stacks of experts; the model is not changed.

        Errors: ConfigError if there are no stacks, or the ranks do not divide them
        """
        self._size = 1 if settings is None else settings.size
        forwards = (vars(one).get("forward") for one in module.modules())
        self._known = [one for one in forwards if isinstance(one, LocalExperts)]
        self._found = [] if self._known else list(_stacks(module))
        known = {one.axis.size for one in self._known}
        if known and known != {self._size}:
            raise ConfigError(
                f"the experts of this model are divided over {known.pop()} ranks already, by an initialize() "
                f"before, and expert_parallel.autoep_size is {self._size} now: give the same, or make the "
                "model anew and load a checkpoint of the engine before"
            )
        if self._size == 1:
            return
        if not self._found and not self._known:
            raise ConfigError(
                f"expert_parallel.autoep_size (or ep of a mesh) {self._size}: the model has no experts that "
                "can be divided: "
                "modules of Hugging Face's, with num_experts, parameters that have all experts along their "
                "first dimension, and a forward(hidden_states, top_k_index, top_k_weights); leave the "
                "section out, or build the model of dslaunch.moe.MoE layers"
            )
        for name, one in self._found:
            if one.num_experts % self._size:
                raise ConfigError(
                    f"'{name}' has {one.num_experts} experts, and expert_parallel.autoep_size is "
                    f"{self._size}: every rank holds as many; give a number of ranks that divides them"
                )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return over how many ranks the stacks are divided: one number, or an empty tuple if nothing is
        divided.
        """
        return (self._size,) if self._size > 1 else ()

    @property
    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules with stacks that are divided, or will be."""
        if self._size > 1:
            yield from self._found
            yield from ((one.axis.name, one.module) for one in self._known if not self._found)

    @property
    def cuts(self) -> Iterator[tuple[nn.Parameter, Cut]]:
        """Yield each stack with the cut of this rank's part, once stacks are divided."""
        for experts in self._known:
            yield from experts.cuts

    @property
    def params(self) -> Iterator[nn.Parameter]:
        """Yield the stacks that are divided."""
        for experts in self._known:
            yield from (param for param, _ in experts.cuts)

    @torch.no_grad()
    def divide(self, line: tuple[int, ...], *, device: torch.device) -> None:
        """Replace each stack by this rank's part of rank 0's stack; `line` are the ranks that hold all parts.

        Order: a collective
        """
        if self._size == 1 or self._known:
            return
        index = line.index(dist.get_rank())
        for name, submodule in self._found:
            cuts = [(param, _take(param, index, self._size, device)) for param in submodule.parameters()]
            for param, _ in cuts:
                param.allreduce = False
                param.group_name = f"ep_size_{self._size}"
            forward = LocalExperts(submodule, ExpertAxis(size=self._size, name=name), cuts)
            submodule.forward = forward
            submodule.register_state_dict_pre_hook(forward.refuse_parts)
            self._known.append(forward)

    def join(self, group: RankGroup) -> None:
        """Send tokens along this group from now on."""
        for experts in self._known:
            experts.axis.join(group)


def _stacks(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, submodule in module.named_modules():
        number = getattr(submodule, "num_experts", None)
        params = list(submodule.parameters())
        if (
            isinstance(number, int)
            and params
            and all(param.dim() > 1 and param.shape[0] == number for param in params)
            and tuple(inspect.signature(submodule.forward).parameters) == _FORWARD
        ):
            yield name, submodule


def _take(param: nn.Parameter, index: int, size: int, device: torch.device) -> Cut:
    early = early_of(param)
    if early is not None:  # zero.Init has sharded the stack: gather it for the cut
        early.take_out()
    cut = cut_evenly(tuple(param.shape), 0, index=index, size=size)
    whole = param.detach()
    if not whole.is_meta:  # else it has no values yet
        whole = whole.to(device).contiguous()
        dist.broadcast(whole, 0)
    param.data = cut.take(whole)
    return cut


class LocalExperts:
    """Replacement of a module's forward where each rank has its part of the experts."""

    def __init__(self, module: Any, axis: ExpertAxis, cuts: list[tuple[nn.Parameter, Cut]]) -> None:
        self.axis, self.cuts = axis, cuts
        self._forward: Callable[..., Tensor] = module.forward
        self.module = module
        self._num_experts: int = module.num_experts
        module.num_experts = self._num_experts // axis.size  # the module's own forward uses this count

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Run the experts as the module's own forward does, for tokens of this rank.

        Shapes: hidden_states [S, h], the others [S, k]; the result is [S, h]
        """
        done = through_rows(hidden_states, top_k_index, self.axis, self._num_experts, self._compute)
        return (done * top_k_weights.unsqueeze(-1)).sum(dim=1).to(hidden_states.dtype)

    def _compute(self, rows: Tensor, counts: Tensor) -> Tensor:
        if len(rows) == 0:  # even without tokens this rank's backward takes part in the exchange
            params = (getattr(self.module, name) for name, _ in self.module.named_parameters(recurse=False))
            nothing = sum(param.reshape(-1)[:0].sum() for param in params)
            result: Tensor = rows + nothing
            return result
        number = torch.arange(len(counts), device=rows.device)
        numbers = number.repeat_interleave(counts, output_size=len(rows))
        ones = rows.new_ones(len(rows), 1)
        return self._forward(rows, numbers.unsqueeze(1), ones)

    def refuse_parts(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Refuse a state_dict with one rank's experts: a file of it is useless, which would show only at
        loading.

        Errors: ConfigError
        """
        for param, cut in self.cuts:
            if not keep_vars and tuple(param.shape) != cut.shape:
                raise ConfigError(
                    f"state_dict() of the module would hold this rank's experts of '{prefix[:-1]}', "
                    f"{tuple(param.shape)} of {cut.shape}, which are divided over ranks; call on all ranks "
                    "engine.state_dict(), save_16bit_model() or save_checkpoint(), which have whole tensors"
                )
