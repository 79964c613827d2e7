"""DeepSpeed's layer of experts, with its signature, its names of parameters and its results.

Each of `ep_size` ranks holds E / ep_size of E experts, and numbers them from 0 as DeepSpeed does: on the rank
at place q, expert i is expert q * E / ep_size + i of the model. Checkpoints, and the layer's state_dict() and
load_state_dict(), use the model's numbers; before initialize() has given the ranks their places, DeepSpeed's.

Source: DeepSpeed 0.19.8 moe/layer.py, moe/experts.py, moe/sharded_moe.py (`MOELayer`)
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..environment import computes_plainly
from ..errors import ConfigError
from ..log import logger
from .dispatch import ExpertAxis, through_slots
from .gate import NOISES, Routes, TopKGate

_EXPERTS = "deepspeed_experts"


class Experts(nn.Module):
    """This rank's experts, each a copy of one module."""

    def __init__(self, expert: nn.Module, num_local_experts: int = 1, expert_group_name: str | None = None):
        super().__init__()
        self.deepspeed_experts = nn.ModuleList(deepcopy(expert) for _ in range(num_local_experts))
        self.num_local_experts = num_local_experts
        self.axis = ExpertAxis(size=1)
        for param in self.deepspeed_experts.parameters():
            param.allreduce = False  # type: ignore[attr-defined]
            param.group_name = expert_group_name  # type: ignore[attr-defined]
        self.register_state_dict_post_hook(_number_as_in_model)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_number_as_here)  # type: ignore[no-untyped-call]

    def forward(self, inputs: Tensor) -> Tensor:
        """Run the experts. Shapes: [ranks, experts here, C, h], and so is the result."""
        parts = inputs.chunk(self.num_local_experts, dim=1)
        outputs = (_first(expert(part)) for part, expert in zip(parts, self.deepspeed_experts, strict=True))
        return torch.cat(list(outputs), dim=1)

    def names(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield for each parameter its name in this module, and its names in the model by the
        ranks' places.
        """
        for name, _ in self.deepspeed_experts.named_parameters(remove_duplicate=False):
            number, _, rest = name.partition(".")
            yield (
                f"{_EXPERTS}.{name}",
                tuple(
                    f"{_EXPERTS}.{place * self.num_local_experts + int(number)}.{rest}"
                    for place in range(self.axis.size)
                ),
            )


def _first(output: Any) -> Tensor:
    """Return an expert's output without the bias that it may return beside it, as in DeepSpeed."""
    result: Tensor = output[0] if isinstance(output, tuple) else output
    return result


def _number_as_in_model(module: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
    _renumber(module, state, prefix, is_in_model=True)


def _number_as_here(module: nn.Module, state: dict[str, Any], prefix: str, *more: object) -> None:
    _renumber(module, state, prefix, is_in_model=False)


def _renumber(module: nn.Module, state: dict[str, Any], prefix: str, *, is_in_model: bool) -> None:
    """Change experts' numbers in a state_dict to the model's if `is_in_model`, else to this rank's, and then
    drop the experts of other ranks.
    """
    axis, num_local = module.axis, module.num_local_experts
    if not isinstance(axis, ExpertAxis) or not isinstance(num_local, int) or axis.size == 1:
        return
    begin = f"{prefix}{_EXPERTS}."
    if not axis.has_group:
        if not is_in_model:
            _check_numbers(state, begin, num_local)
        return
    first = axis.index * num_local
    for name in [one for one in state if one.startswith(begin)]:
        number, _, rest = name[len(begin) :].partition(".")
        if not number.isdecimal():
            continue
        value = state.pop(name)
        here = int(number) if is_in_model else int(number) - first
        if 0 <= here < num_local:
            # marked with \0 for now: the new name may be the old name of a value that is still to come
            state[f"{begin}\0{here + first if is_in_model else here}.{rest}"] = value
    for name in [one for one in state if one.startswith(f"{begin}\0")]:
        state[name.replace("\0", "", 1)] = state.pop(name)


def _check_numbers(state: dict[str, Any], begin: str, num_local: int) -> None:
    """Check that a state_dict has one rank's experts only, before the ranks have their places."""
    numbers = {name[len(begin) :].partition(".")[0] for name in state if name.startswith(begin)}
    beyond = sorted(int(one) for one in numbers if one.isdecimal() and int(one) >= num_local)
    if beyond:
        raise ConfigError(
            f"load_state_dict() was given '{begin}{beyond[0]}', and this rank holds {num_local} of the "
            "model's experts: which ones is known after initialize(); load the whole model's state_dict into "
            "engine.module then"
        )


class MOELayer(nn.Module):
    """The gate, the experts, and the exchange of tokens between them."""

    def __init__(
        self,
        gate: TopKGate,
        experts: Experts,
        ep_group_name: str,
        ep_size: int,
        num_local_experts: int,
        use_tutel: bool = False,
    ) -> None:
        super().__init__()
        self.gate, self.experts = gate, experts
        self.ep_group_name, self.ep_size, self.num_local_experts = ep_group_name, ep_size, num_local_experts
        self.axis = ExpertAxis(size=ep_size)
        experts.axis = self.axis
        self.l_aux: Tensor | None = None
        self.exp_counts: Tensor | None = None
        if use_tutel:
            logger.warning("MoE(use_tutel=True) changes nothing: the tokens go the way they go without")

    @property
    def ep_group(self) -> Any:
        """Return the process group of the ranks that hold the layer's experts; None before an engine has made
        it.
        """
        return None if self.axis.size == 1 else self.axis.group.axis.group

    def forward(self, hidden_states: Tensor, used_token: Tensor | None = None) -> Tensor:
        """Shapes: [..., h], and so is the result; used_token has an element for each token."""
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        routes: Routes = self.gate(tokens, used_token)
        self.l_aux, self.exp_counts = routes.l_aux, routes.counts
        capacity = self.axis.largest(routes.capacity, tokens.device)
        slots = _slots(routes, capacity)
        done = through_slots(_fill(tokens, slots, routes.num_experts, capacity), self.axis, self.experts)
        return _combine(done, slots, routes.weights).reshape(hidden_states.shape)


def _slots(routes: Routes, capacity: int) -> Tensor:
    """Return the slot of each route among E * C slots; the number E * C marks a route that goes nowhere.

    Shapes: [k, S] int64
    """
    taken = routes.experts * capacity + routes.places
    return torch.where(routes.experts >= 0, taken, routes.num_experts * capacity)


def _fill(tokens: Tensor, slots: Tensor, num_experts: int, capacity: int) -> Tensor:
    """Return the tokens in their slots, [E, C, h], and zeros in the others."""
    num_tokens, width = tokens.shape
    source = torch.full((num_experts * capacity + 1,), num_tokens, device=slots.device)
    source[slots.reshape(-1)] = torch.arange(num_tokens, device=slots.device).expand_as(slots).reshape(-1)
    padded = torch.cat([tokens, tokens.new_zeros(1, width)])
    return padded.index_select(0, source[:-1]).view(num_experts, capacity, width)


def _combine(done: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
    """Return for each token the weighted sum of its experts' results, added in float32.

    Shapes: done [E, C, h], slots and weights [k, S]; the result is [S, h]
    """
    width = done.shape[-1]
    padded = torch.cat([done.reshape(-1, width), done.new_zeros(1, width)])
    rows = padded.index_select(0, slots.reshape(-1)).view(*slots.shape, width)
    return (rows * weights.unsqueeze(-1)).sum(0).to(done.dtype)


class MoE(nn.Module):
    """A layer of experts in place of one module that maps [..., hidden_size] to the same."""

    def __init__(  # noqa: PLR0913  (DeepSpeed's signature)
        self,
        hidden_size: int,
        expert: nn.Module,
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        """Make `num_experts` experts as copies of `expert`; this rank holds num_experts / ep_size of them,
        and a token goes to `k` of them.

        An expert takes `capacity_factor` times its even share of a rank's tokens, at least `min_capacity`.
        Tokens beyond that are dropped: they get a result of 0. With `drop_tokens` False it takes all.
        `use_rts`: the tokens that it takes are drawn at random. `noisy_gate_policy`: "Jitter" varies the
        gate's input, "RSample" draws the expert. `use_residual` adds the weighted result of `expert` itself.

        Errors: ConfigError for arguments that contradict each other
        """
        super().__init__()
        for key, value in (("num_experts", num_experts), ("ep_size", ep_size)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"MoE({key}={value!r}): must be a whole number above 0")
        if computes_plainly():  # the plain run of `dslaunch numerics` has all experts on every rank
            ep_size = 1
        if num_experts % ep_size:
            raise ConfigError(
                f"MoE(num_experts={num_experts}, ep_size={ep_size}): every rank holds as many experts; give "
                "an ep_size that divides num_experts"
            )
        if noisy_gate_policy not in (None, "None", *NOISES):
            raise ConfigError(
                f"MoE(noisy_gate_policy={noisy_gate_policy!r}): it is one of {', '.join(NOISES)}, or None"
            )
        if enable_expert_tensor_parallelism:
            raise ConfigError(
                "MoE(enable_expert_tensor_parallelism=True): an expert is on one rank as a whole in this "
                "version; leave it out, and give a larger ep_size where experts need too much memory"
            )
        self.use_residual, self.num_experts, self.ep_size = use_residual, num_experts, ep_size
        self.enable_expert_tensor_parallelism = enable_expert_tensor_parallelism
        self.num_local_experts = num_experts // ep_size
        self.expert_group_name = f"ep_size_{ep_size}"
        gate = TopKGate(
            hidden_size,
            num_experts,
            k,
            capacity_factor,
            eval_capacity_factor,
            min_capacity,
            noisy_gate_policy,
            drop_tokens,
            use_rts,
            None,
            top2_2nd_expert_sampling,
        )
        experts = Experts(expert, self.num_local_experts, self.expert_group_name)
        self.deepspeed_moe = MOELayer(
            gate, experts, self.expert_group_name, ep_size, self.num_local_experts, use_tutel=use_tutel
        )
        if use_residual:
            self.mlp = expert
            self.coefficient = nn.Linear(hidden_size, 2)

    @property
    def axis(self) -> ExpertAxis:
        """Return the ranks that hold the layer's experts."""
        return self.deepspeed_moe.axis

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Do nothing: initialize() has made the groups, and calls this as DeepSpeed does.

        Errors: AssertionError before initialize() has made the groups
        """
        if self.axis.size > 1:
            _ = self.axis.group

    def forward(self, hidden_states: Tensor, used_token: Tensor | None = None) -> tuple[Tensor, Tensor, Any]:
        """Return the result, the auxiliary loss that balances the experts, and how many tokens chose each.

        Shapes: hidden_states [..., h], used_token [tokens], 0 for those that are not to be routed (k=1);
                the results are [..., h], [] float32 and [num_experts] int64
        """
        output = self.deepspeed_moe(hidden_states, used_token)
        if self.use_residual:
            coefficient = F.softmax(self.coefficient(hidden_states), dim=-1)
            output = output * coefficient[..., 0:1] + _first(self.mlp(hidden_states)) * coefficient[..., 1:]
        l_aux = self.deepspeed_moe.l_aux
        if l_aux is None:
            raise AssertionError("the gate has not run")
        return output, l_aux, self.deepspeed_moe.exp_counts
