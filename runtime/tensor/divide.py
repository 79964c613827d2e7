"""One model, divided over the ranks of the axis tp before it is placed in flat buffers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_leaves_with_path

from ..config.tensor import TensorParallelConfig
from ..errors import ConfigError
from ..log import logger
from ..mesh.axes import SAMPLES, Axes
from ..mesh.cut import Cut, cut_evenly
from ..mesh.domain import Domains
from ..mesh.parts import Parts
from ..zero.early_parameter import early_of
from .exchange import TensorAxis
from .lower import Division, is_dtensor, lower
from .plan import Plan, check_heads, choose_plan, plan_of_model, text_config
from .styles import Packs, PartialGradients, PartlyRotated
from .vocabulary import use_parts_of_logits


class DividedModel:
    """A model of which this rank holds a part."""

    def __init__(
        self, module: nn.Module, axis: TensorAxis, division: Division, *, settings: TensorParallelConfig
    ) -> None:
        self._axis, self._division, self._settings = axis, division, settings
        self._num_forwards = 0
        cuts = {id(param): cut for param, cut in division.cuts}
        for one in module.modules():
            own = {name: cuts[id(param)] for name, param in one._parameters.items() if id(param) in cuts}
            if own:
                one.register_state_dict_pre_hook(_RefuseParts(self, own))  # type: ignore[no-untyped-call]

    def has(self, module: nn.Module) -> bool:
        """Whether the divided parameters of a module are this model's, and no copies of them."""
        own = {id(param) for param, _ in self._division.cuts}
        return any(id(param) in own for param in module._parameters.values())

    @property
    def size(self) -> int:
        """Over how many ranks it is divided."""
        return self._axis.size

    def again(self, settings: TensorParallelConfig) -> DividedModel:
        """Return it, for another engine after the one before.

        Errors: ConfigError if the ds_config would divide it differently
        """
        if settings != self._settings:
            raise ConfigError(
                "this model is divided over ranks already, by an initialize() before, and the ds_config's "
                "section tensor_parallel is another one now: give the same, or make the model anew and load "
                "a checkpoint of the engine before"
            )
        self._num_forwards = 0
        return self

    def join(self, domains: Domains) -> None:
        """Let its parameters have a domain of their own, and its layers a process group.

        Order: a collective
        """
        group = domains.copies_group
        self._axis.join(group)
        if not self._division.cuts:
            return
        dense = domains.dense.comm.mesh
        domains.add(
            "cut over tp",
            sharers=domains.axes.lines(SAMPLES),
            shard_size=dense.shard.size,
            states_by_chunk=dense.states_by_chunk,
            params=[param for param, _ in self._division.cuts],
            parts=Parts(group, self._division.cuts),
        )

    def agree_on_random_numbers(self, device: torch.device) -> None:
        """Let ranks that compute one layer together draw the same numbers, as for dropout, from now on.

        Order: a collective
        """
        states = [torch.get_rng_state()]
        if device.type == "cuda":
            states.append(torch.cuda.get_rng_state(device))
        told = self._axis.group.all_gather_objects(states, what="the states of random numbers")[0]
        torch.set_rng_state(told[0])
        if device.type == "cuda":
            torch.cuda.set_rng_state(told[1], device)

    def check_inputs(self, args: Any, kwargs: Any) -> None:
        """See that ranks that compute one layer together were given the same. Forwards 1, 2, 4, 8 and so on
        do so: in the end that costs nothing, and a loader that goes another way later is found, too.

        Order:  a collective in these forwards
        Errors: ConfigError that names the first tensor that differs
        """
        self._num_forwards += 1
        if self._num_forwards.bit_count() != 1:
            return
        leaves = tree_leaves_with_path((args, kwargs))
        own = {keystr(path): _digest(leaf) for path, leaf in leaves if isinstance(leaf, Tensor)}
        told = self._axis.group.all_gather_objects(own, what="what the model is given")
        first = dist.get_rank() - self._axis.index
        for place, other in enumerate(told):
            differing = [name for name in {**told[0], **other} if told[0].get(name) != other.get(name)]
            if differing:
                raise ConfigError(
                    f"ranks {first} and {first + place} compute the same layers together "
                    f"(tensor_parallel.autotp_size {self._axis.size}), and were given different inputs "
                    f"in forward {self._num_forwards}: {differing[0]} differs; give both the same samples: "
                    f"of {self._axis.size} ranks that are neighbours all load the same, as "
                    "engine.deepspeed_io() does, or a sampler with "
                    "num_replicas=engine.dp_world_size and rank=engine.get_data_parallel_rank()"
                )

    def successor(self, param: Any) -> Any:
        """Return what a parameter of before has become; anything else as it is."""
        return self._division.successors.get(id(param), param)

    def renew_optimizer(self, optimizer: Any) -> Any:
        """Let an optimizer that was made before have the parameters that there are now.

        Errors: ConfigError if it has states of parameters that are no more
        """
        if not isinstance(optimizer, torch.optim.Optimizer):
            return optimizer
        for group in optimizer.param_groups:
            for param in group["params"]:
                if id(param) in self._division.successors and optimizer.state.get(param):
                    raise ConfigError(
                        f"the {type(optimizer).__name__} given to initialize() has taken steps with whole "
                        "parameters, which are divided over ranks now; give one without states, and load a "
                        "checkpoint after initialize()"
                    )
            group["params"] = [self.successor(param) for param in group["params"]]
        return optimizer

    def renew_parameters(self, given: Any) -> Any:
        """Return model_parameters with the parameters that there are now."""
        return None if given is None else list(self._renewed(given))

    def _renewed(self, given: Iterable[Any]) -> Iterator[Any]:
        for item in given:
            if isinstance(item, Mapping):
                listed = item["params"]
                params = [listed] if isinstance(listed, Tensor) else listed
                yield {**item, "params": list(self._renewed(params))}
            elif isinstance(item, tuple):
                name, param = item
                yield name, self.successor(param)
            else:
                yield self.successor(item)


def earlier_division(module: nn.Module) -> DividedModel | None:
    """Return what a call of divide() before has made of this model, None for one that it has not divided.

    Errors: ConfigError for a copy of a divided model, or for two of them in one
    """
    found: DividedModel | None = None
    for name, one in module.named_modules():
        for hook in one._state_dict_pre_hooks.values():
            if not isinstance(hook, _RefuseParts) or not any(hook.parts_of(one)):
                continue
            if not hook.divided.has(one) or found not in (None, hook.divided):
                raise ConfigError(
                    f"module '{name}' has this rank's parts of parameters: it is a copy of a layer that "
                    "initialize() has divided over ranks, or of another model than the others; give the "
                    "model itself, or a copy that was made before initialize(), or inside of "
                    "dslaunch.zero.GatheredParameters(model.parameters()), where parameters are whole"
                )
            found = hook.divided
    return found


def agree_on_division(settings: TensorParallelConfig | None) -> None:
    """See that all ranks divide the same way, those that divide nothing included: others would wait for them.

    Order:  a collective
    Errors: ConfigError with what two ranks were given
    """
    everywhere: list[Any] = [None] * dist.get_world_size()
    own = "left out" if settings is None else settings.model_dump_json(exclude_defaults=True)
    dist.all_gather_object(everywhere, own)
    for rank, other in enumerate(everywhere):
        if other != everywhere[0]:
            raise ConfigError(
                f"rank {rank} and rank 0 were given different settings: tensor_parallel is {other} on rank "
                f"{rank} and {everywhere[0]} on rank 0; give initialize() the same ds_config on every rank"
            )


def divide(
    module: nn.Module, axes: Axes, settings: TensorParallelConfig, *, device: torch.device
) -> DividedModel:
    """Divide the layers of a model over the axis tp, in place.

    Parameters get rank 0's values first. A model that torch's parallelize_module() or Hugging Face's loading
    has divided stays as it is divided.

    Order:  a collective
    Errors: ConfigError if no plan says how, or it cannot be done by name
    """
    known = earlier_division(module)
    if known is not None:
        return known.again(settings)
    return _divide(module, axes, settings, device=device)


def _divide(
    module: nn.Module, axes: Axes, settings: TensorParallelConfig, *, device: torch.device
) -> DividedModel:
    rank = dist.get_rank()
    place = axes.coordinates(rank)["tp"]
    axis = TensorAxis(size=axes.tp, index=place)
    is_divided = any(is_dtensor(param) for param in module.parameters())
    if is_divided and not _is_of_hugging_face(module):
        return DividedModel(module, axis, lower(module, axes, rank=rank), settings=settings)
    check_heads(module, axes.tp)
    if is_divided:
        _undo_forwards(module)
    plan = choose_plan(module, settings)
    if is_divided:
        division = lower(module, axes, rank=rank, shows=False)
    else:
        plan = _without_ties(module, plan)
        _check_agreement(module, plan)
        division = _cut(module, plan, axis, device=device)
    _install(module, plan, axis, division)
    if settings.vocab_parallel_lm_head:
        use_parts_of_logits(module, axis)
    return DividedModel(module, axis, division, settings=settings)


class _RefuseParts:
    """A hook of state_dict() of one module: a file with one rank's parts is of no use, and says so only when
    it is loaded.
    """

    def __init__(self, divided: DividedModel, cuts: Mapping[str, Cut]) -> None:
        self.divided, self._cuts = divided, cuts

    def __deepcopy__(self, memo: dict[int, Any]) -> _RefuseParts:
        """A copy of a module has parts, too."""
        return self

    def __call__(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if keep_vars:  # the caller wants the parameters themselves
            return
        for name, param, cut in self.parts_of(module):
            raise ConfigError(
                f"state_dict() of the module would hold this rank's part of parameter '{prefix}{name}', "
                f"{tuple(param.shape)} of {cut.shape}, which is divided over ranks; call on all ranks "
                "engine.state_dict(), save_16bit_model() or save_checkpoint(), which have whole "
                "tensors"
            )

    def parts_of(self, module: nn.Module) -> Iterator[tuple[str, nn.Parameter, Cut]]:
        """Return the parameters of a module that are no whole tensors now."""
        for name, cut in self._cuts.items():
            param = dict(module._parameters).get(name)
            if param is not None and tuple(param.shape) != cut.shape:
                yield name, param, cut


def _digest(value: Tensor) -> tuple[tuple[int, ...], int]:
    whole = value.detach().cpu().contiguous()
    return tuple(whole.shape), crc32(whole.reshape(-1).view(torch.uint8).numpy().tobytes())


def _is_of_hugging_face(module: nn.Module) -> bool:
    return any(getattr(one, "_is_hooked", False) for one in module.modules()) and bool(plan_of_model(module))


def _undo_forwards(module: nn.Module) -> None:
    """Take away the forwards that Hugging Face's loading has put in: ours compute with plain tensors."""
    for one in module.modules():
        if getattr(one, "_is_hooked", False):
            vars(one).pop("forward", None)


def _check_agreement(module: nn.Module, plan: Plan) -> None:
    """Ranks that divide different models would wait for each other for ever."""
    text = "\n".join(
        f"{name} {tuple(param.shape)} {param.dtype}" for name, param in module.named_parameters()
    )
    own = crc32(f"{text}\n{sorted(plan.params)}\n{sorted(plan.modules)}".encode())
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, own)
    for rank, other in enumerate(everywhere):
        if other != everywhere[0]:
            raise ConfigError(
                f"rank {rank} and rank 0 were given different models to divide: names, shapes and dtypes "
                "of all parameters and the plan must agree; build the model the same way on every rank"
            )


def _without_ties(module: nn.Module, plan: Plan) -> Plan:
    """Leave out parameters that another module, which the plan does not name, uses whole."""
    holders: dict[int, list[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        holders.setdefault(id(param), []).append(name)
    left_out: set[str] = set()
    for names in holders.values():
        planned = [name for name in names if name in plan.params]
        if planned and len(planned) < len(names):
            left_out |= {name.rpartition(".")[0] for name in planned}
    for name in sorted(left_out):
        logger.info("'%s' stays whole: its parameter is also another module's, which no rule divides", name)
    return Plan(
        params={
            name: style for name, style in plan.params.items() if name.rpartition(".")[0] not in left_out
        },
        modules={name: style for name, style in plan.modules.items() if name not in left_out},
    )


@torch.no_grad()
def _cut(module: nn.Module, plan: Plan, axis: TensorAxis, *, device: torch.device) -> Division:
    done = Division()
    named = dict(module.named_modules())
    cuts: dict[int, Cut] = {}
    for name, style in plan.params.items():
        owner, _, key = name.rpartition(".")
        one = named[owner]
        param = one._parameters[key]
        if param is None:
            continue
        known_cut = cuts.get(id(param))
        shape = tuple(param.shape) if known_cut is None else known_cut.shape
        rule = style.cut(shape)
        if rule is None:
            continue
        cut = _cut_of(name, shape, rule, axis)
        cuts[id(param)] = cut
        if known_cut not in (None, cut):
            raise ConfigError(
                f"parameter '{name}' is tied to another one, and the plan divides the two differently; give "
                "both the same dimension, or leave one out"
            )
        if id(param) not in done.successors:
            leaf = nn.Parameter(_part(param, cut, device), requires_grad=param.requires_grad)
            done.successors[id(param)] = leaf
            done.kept.append(param)
            done.cuts.append((leaf, cut))
        one._parameters[key] = done.successors[id(param)]
    return done


def _cut_of(name: str, shape: tuple[int, ...], rule: tuple[int, Packs], axis: TensorAxis) -> Cut:
    dim, packs = rule
    length = shape[dim]
    if isinstance(packs, int):
        if length % packs:
            raise ConfigError(f"parameter '{name}' of shape {shape} does not fall into {packs} equal parts")
        packs = (length // packs,) * packs
    if sum(packs) != length:
        raise ConfigError(
            f"parameter '{name}' has {length} elements along dimension {dim % len(shape)}, and the parts "
            f"{list(packs)} have {sum(packs)} together"
        )
    if len(packs) > 1 and any(one % axis.size for one in packs):
        raise ConfigError(
            f"parameter '{name}' consists of parts of {list(packs)}, which {axis.size} ranks do not divide"
        )
    if min(packs) < axis.size:
        raise ConfigError(
            f"parameter '{name}' of shape {shape} cannot be divided over {axis.size} ranks along dimension "
            f"{dim % len(shape)}; use fewer ranks for tensor_parallel.autotp_size"
        )
    return cut_evenly(shape, dim, index=axis.index, size=axis.size, packs=packs)


def _part(param: nn.Parameter, cut: Cut, device: torch.device) -> Tensor:
    early = early_of(param)
    if early is not None:  # sharded by zero.Init: whole for this moment
        early.take_out()
    whole = param.detach().to(device).contiguous()
    dist.broadcast(whole, 0)
    part = cut.take(whole)
    param.data = param.data.new_empty(0)  # what was there before is no parameter of the model any more
    return part


def _install(module: nn.Module, plan: Plan, axis: TensorAxis, division: Division) -> None:
    named: dict[str, Any] = dict(module.named_modules())
    for name, style in plan.modules.items():
        if style.forward is None:
            continue
        one = named[name]
        if style.forward is PartialGradients:
            PartialGradients(one, axis, name, division)
        elif style.forward is PartlyRotated:
            one.forward = PartlyRotated(one, axis, name, division, rope_size=_rope_size(module, name))
        else:
            one.forward = style.forward(one, axis, name, division)


def _rope_size(module: nn.Module, name: str) -> int:
    size = getattr(text_config(module), "qk_rope_head_dim", None)
    if not isinstance(size, int):
        raise ConfigError(
            f"the plan divides '{name}' by the style 'mla_kv_a_proj', for which the model's config has to "
            f"have qk_rope_head_dim, a whole number, and there it is {size}; name the layers in "
            "tensor_parallel.partition_config instead"
        )
    return size
