"""The choice of the optimizer: the ds_config's, or the one that the user brings."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from ..config.config import Config
from ..config.keys.value import show
from ..config.optimizer import AdamParams, MuonParams, OptimizerConfig, optimizer_class
from ..errors import ConfigError
from ..optimizers.adam import AdamFormula
from ..optimizers.eight_bits import CODES
from ..optimizers.registry import ELEMENTWISE, row_of
from ..placement.precision import precision_of
from .flat_optimizer import FlatOptimizer
from .fused_rule import FusedRule
from .rule import Rule
from .stand_in import StandInOptimizer, wrap
from .torch_optimizer_rule import TorchOptimizerRule

Groups = list[dict[str, Any]]
_Optimizer = TypeVar("_Optimizer", bound=FlatOptimizer)
ModelParameters = Iterable[torch.Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, torch.Tensor]]
ClientOptimizer = torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer]

_log = logging.getLogger("dslaunch")

# DeepSpeed's key and ours
_MASTER_KEYS = ("bf16.bf16_master_weights_and_grads", "data_types.master_dtype")
_STATE_KEYS = ("bf16.bf16_optimizer_states", "data_types.optimizer_state_dtype")
_FLAGS_OURS_LACK = ("amsgrad", "maximize", "capturable", "differentiable")
# Optimizers that update each element independently of others. Classes that are not listed say so by an
# attribute `is_elementwise`.
_ELEMENTWISE = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)
# Other optimizers that step each parameter by itself; Muon is absent before torch 2.9. Classes that are not
# listed say so by an attribute `is_per_parameter`.
_PER_PARAMETER = (torch.optim.Adafactor, getattr(torch.optim, "Muon", None))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """Arguments of a `FlatOptimizer`."""

    param_groups: Groups
    defaults: dict[str, Any]
    rule: Rule
    client: torch.optim.Optimizer | None = None


def choose_optimizer(
    config: Config,
    *,
    kind: type[_Optimizer],
    client: ClientOptimizer | None,
    module: nn.Module,
    model_parameters: ModelParameters | None,
    may_be_empty: bool = False,
) -> _Optimizer | None:
    """Return the optimizer of this run, without states yet; None if neither the user nor the ds_config names
    one. `may_be_empty`: it may have no parameters on this rank, because other ranks have some.

    A client's optimizer, or a callable that makes one from the parameters, has precedence over the
    ds_config's.
    Errors: ConfigError for an optimizer that cannot be stepped here, by name
    """
    if client is None and config.optimizer is None:
        return None
    if isinstance(client, torch.optim.Optimizer):
        choice = _take_over(_inner(client))
    else:
        groups = _param_groups(module, model_parameters, may_be_empty=may_be_empty)
        choice = (
            _from_config(config.optimizer, groups, module)
            if client is None
            else _take_over(_call(client, groups))
        )
    _check_params(choice.param_groups, module, may_be_empty=may_be_empty)
    _check_precision(config, choice.rule)
    return kind(choice.param_groups, defaults=choice.defaults, rule=choice.rule, client=choice.client)


def _inner(client: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer inside a wrapper that shares its groups, such as Accelerate's."""
    inner = getattr(client, "optimizer", None)
    if isinstance(inner, torch.optim.Optimizer) and inner.param_groups is client.param_groups:
        return _inner(inner)
    return client


def _call(client: Callable[[Any], torch.optim.Optimizer], groups: Groups) -> torch.optim.Optimizer:
    has_options = len(groups) > 1 or set(groups[0]) != {"params"}
    optimizer = client(groups if has_options else groups[0]["params"])
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer={client!r} returned {type(optimizer).__name__}; a callable must return a "
            "torch.optim.Optimizer"
        )
    return optimizer


def _param_groups(
    module: nn.Module, model_parameters: ModelParameters | None, *, may_be_empty: bool
) -> Groups:
    """Return model_parameters as groups, default all that require a gradient; empty groups are dropped,
    unless they `may_be_empty`.
    """
    given: list[Any] = list(module.parameters() if model_parameters is None else model_parameters)
    if not given or not isinstance(given[0], dict):
        given = [{"params": given}]
    groups: Groups = []
    for group in given:
        listed = group["params"]
        params = [listed] if isinstance(listed, torch.Tensor) else list(listed)
        params = [item[1] if isinstance(item, tuple) else item for item in params]
        for item in params:
            if not isinstance(item, torch.Tensor):
                raise ConfigError(
                    f"initialize(model_parameters=...) has {item!r}; give parameters, (name, parameter) "
                    "pairs or groups, as model.parameters() and model.named_parameters() give them"
                )
        trained = [param for param in params if param.requires_grad]
        if trained or may_be_empty:  # an empty group stays, so that all ranks have as many groups
            groups.append({**group, "params": trained})
    if not groups:
        raise ConfigError(
            "no parameter requires a gradient; give model_parameters, or set requires_grad on some"
        )
    return groups


def _from_config(config: OptimizerConfig | None, groups: Groups, module: nn.Module) -> _Choice:
    if config is None:
        raise AssertionError("no optimizer in the ds_config")
    if isinstance(config.params, AdamParams):
        return _adam(config.params, groups)
    if isinstance(config.params, MuonParams):
        return _muon(config.params, groups, module)
    given = config.params.model_extra or {}
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    kind: Callable[..., torch.optim.Optimizer] = optimizer_class(config.type)
    try:
        optimizer = kind(groups, **options)
    except (TypeError, ValueError, RuntimeError) as error:
        shown = ", ".join(f"optimizer.params.{name} {show(value)}" for name, value in given.items())
        raise ConfigError(
            f"{shown or 'optimizer.params'}: {config.type} does not take this: {error}"
        ) from error
    return _take_over(optimizer)


def _adam(params: AdamParams, groups: Groups) -> _Choice:
    defaults = {name: getattr(params, name) for name in ("lr", "betas", "eps", "weight_decay")}
    if params.is_torchs:
        kind = torch.optim.AdamW if params.adam_w_mode else torch.optim.Adam
        return _take_over(kind(groups, **defaults, amsgrad=params.amsgrad, maximize=params.maximize))
    if not params.bias_correction:
        defaults["bias_correction"] = False
    return _Choice(
        param_groups=groups, defaults=defaults, rule=FusedRule(AdamFormula(adam_w_mode=params.adam_w_mode))
    )


def _muon(params: MuonParams, groups: Groups, module: nn.Module) -> _Choice:
    """Muon for matrices in the middle of the model, AdamW for all else;
    each group of the user's becomes up to two.

    Source: DeepSpeed 0.19.8 deepspeed/__init__.py `set_optimizer_flags` and runtime/engine.py
            `_muon_param_groups`
    """
    if not hasattr(torch.optim, "Muon"):
        raise ConfigError(
            f'optimizer.type "Muon" needs torch 2.9 or later; this is torch {torch.__version__}'
        )
    at_ends = {
        id(param)
        for name, param in module.named_parameters()
        if "embed" in name.lower() or "lm_head" in name.lower()
    }
    halves: Groups = []
    for group in groups:
        own = {name: value for name, value in group.items() if name != "params"}
        for is_muon, defaults in ((True, params.of_muon()), (False, params.of_adam())):
            chosen = [
                param
                for param in group["params"]
                if (param.ndim >= 2 and id(param) not in at_ends) is is_muon
            ]
            if chosen:
                halves.append({**defaults, **own, "params": chosen, "use_muon": is_muon})
    # constructors need a parameter; the real ones are set below
    shape = [nn.Parameter(torch.zeros(1, 1, device="cpu"))]
    muon, adam = torch.optim.Muon(shape), torch.optim.AdamW(shape)
    by_kind = {
        kind: [index for index, half in enumerate(halves) if half["use_muon"] is kind]
        for kind in (True, False)
    }
    rule = TorchOptimizerRule(
        "Muon",
        [
            wrap(
                muon,
                halves,
                by_kind[True],
                is_elementwise=False,
                is_per_parameter=True,
                as_matrices=True,
            ),
            wrap(adam, halves, by_kind[False], is_elementwise=True, is_per_parameter=True),
        ],
    )
    return _Choice(param_groups=halves, defaults={}, rule=rule)


def _check_precision(config: Config, rule: Rule) -> None:
    """Refuse values that are kept in few bits for an optimizer that has no kernel which rounds them by random
    bits.
    """
    precision = precision_of(config)
    for dtype, what, is_deepspeeds, keys in (
        (precision.masters, "masters", config.bf16.bf16_master_weights_and_grads, _MASTER_KEYS),
        (precision.states, "states", config.bf16.bf16_optimizer_states, _STATE_KEYS),
    ):
        able = [row.formula(name) for row in ELEMENTWISE for name in row.names]
        able = [one for one in able if dtype != CODES or one.kernel.has_eight_bits]
        names = [one.name for one in able]
        if dtype != torch.float32 and not (isinstance(rule, FusedRule) and rule.name in names):
            few = "8 bits" if dtype == CODES else str(dtype).removeprefix("torch.")
            raise ConfigError(
                f"{keys[not is_deepspeeds]} asks for {what} in {few}, and optimizer {rule.name} keeps them "
                f"in more; take {', '.join(names[:-1])} or {names[-1]} in its usual form, or leave the key "
                "out"
            )


def _check_params(groups: Groups, module: nn.Module, *, may_be_empty: bool) -> None:
    """Refuse parameters outside the model: only the model's lie in flat buffers, others would silently keep
    their values.
    """
    ours = {id(param) for param in module.parameters()}
    params = [param for group in groups for param in group["params"]]
    strangers = sum(id(param) not in ours for param in params)
    if strangers:
        raise ConfigError(
            f"{strangers} of the optimizer's {len(params)} parameters are not the model's; give initialize() "
            "the model that holds them all, and make the optimizer after anything that replaces parameters"
        )
    if not (may_be_empty or any(param.requires_grad for param in params)):
        raise ConfigError("no parameter of the optimizer requires a gradient; set requires_grad on some")


def _take_over(client: torch.optim.Optimizer) -> _Choice:
    """Return the arguments of our optimizer, with the client's groups: the same dicts,
    so that a scheduler made for the client still works.
    """
    rule = _rule_of(client)
    # torch's schedulers warn if the optimizer they were made for never steps; ours steps in its place.
    client._opt_called = True  # type: ignore[attr-defined]
    return _Choice(param_groups=client.param_groups, defaults=client.defaults, rule=rule, client=client)


def _rule_of(client: torch.optim.Optimizer) -> Rule:
    kind = type(client)
    name = f"{kind.__module__}.{kind.__qualname__}"
    groups = client.param_groups
    _check_can_step(client, name)
    fused = _fused_rule(client)
    if fused is not None:
        client.state.clear()  # the optimizer has not stepped: no state is lost
        return fused
    is_elementwise = kind in _ELEMENTWISE or getattr(kind, "is_elementwise", False) is True
    if not is_elementwise:
        _log.info(
            "optimizer %s sees whole parameters, each on one rank: three times their elements travel more "
            "for each step; if it treats every element alone, say so with a class attribute "
            "is_elementwise = True",
            name,
        )
    wrapped: StandInOptimizer = wrap(
        client,
        groups,
        range(len(groups)),
        is_elementwise=is_elementwise,
        is_per_parameter=(
            is_elementwise or kind in _PER_PARAMETER or getattr(kind, "is_per_parameter", False) is True
        ),
    )
    return TorchOptimizerRule(_torch_name(kind), [wrapped])


def _fused_rule(client: torch.optim.Optimizer) -> Rule | None:
    """Return the rule with a fused kernel that does what this optimizer does; None if there is none,
    or it has stepped.
    """
    kind, groups = type(client), client.param_groups
    if any(group.get(flag) for group in groups for flag in _FLAGS_OURS_LACK):
        return None
    if any(
        state.get("step", 1) for state in client.state.values() if state
    ):  # Adagrad's states begin with a 0
        return None
    row = row_of(kind)
    if row is None or not row.is_elementwise:
        return None
    formulas = {row.formula(kind.__name__).for_group(group) for group in groups}
    return FusedRule(formulas.pop()) if len(formulas) == 1 else None


def _torch_name(kind: type[torch.optim.Optimizer]) -> str:
    """Return the name in checkpoints of an optimizer that is stepped as it is. torch's Adam gets a name of
    its own, because its states have another layout than ours.
    """
    row = row_of(kind)
    if row is not None and len(row.names) == 1:
        return row.names[0]
    return f"{kind.__name__} of torch" if row and kind.__name__ in row.torch_classes else kind.__name__


def _check_can_step(client: torch.optim.Optimizer, name: str) -> None:
    if any(group.get("differentiable") for group in client.param_groups):
        raise ConfigError(f"optimizer {name}(differentiable=True) is not supported; leave it off")
    if type(client) is torch.optim.SparseAdam:
        raise ConfigError(f"optimizer {name}: averaged gradients are dense here; take torch.optim.Adam")
    closure = inspect.signature(type(client).step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ConfigError(
            f"optimizer {name} runs forward and backward itself, in step(closure), which engine.step() has "
            "no place for; take one that steps from gradients"
        )
