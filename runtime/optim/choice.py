"""Which optimizer: the ds_config's, or the one that the user brings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ..config.config import Config
from ..config.optimizer import AdamParams, OptimizerConfig
from ..errors import ConfigError
from .adam import AdamRule
from .flat import FlatOptimizer
from .rule import Rule
from .sgd import SgdRule

Groups = list[dict[str, Any]]
ModelParameters = Iterable[torch.Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, torch.Tensor]]
ClientOptimizer = torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer]

_FLAGS_WE_LACK = ("amsgrad", "maximize", "capturable", "differentiable")


def choose_optimizer(
    config: Config,
    *,
    client: ClientOptimizer | None,
    module: nn.Module,
    model_parameters: ModelParameters | None,
) -> FlatOptimizer | None:
    """Return the optimizer of this run, without states yet; None if neither the user nor the ds_config names one.

    A client's optimizer, or a callable that makes one from the parameters, goes before the ds_config's.
    Errors: ConfigError for an optimizer that we cannot run on shards, by name
    """
    if client is None and config.optimizer is None:
        return None
    if isinstance(client, torch.optim.Optimizer):
        optimizer = _take_over(client)
    else:
        groups = _param_groups(module, model_parameters)
        optimizer = (
            _from_config(config.optimizer, groups) if client is None else _take_over(_call(client, groups))
        )
    _check_params(optimizer, module)
    return optimizer


def _call(client: Callable[[Any], torch.optim.Optimizer], groups: Groups) -> torch.optim.Optimizer:
    has_options = len(groups) > 1 or set(groups[0]) != {"params"}
    made = client(groups if has_options else groups[0]["params"])
    if not isinstance(made, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer={client!r} returned {type(made).__name__}; a callable must return a torch.optim.Optimizer"
        )
    return made


def _param_groups(module: nn.Module, model_parameters: ModelParameters | None) -> Groups:
    """Return model_parameters as groups, default all that require a gradient; empty groups are dropped."""
    given: list[Any] = list(module.parameters() if model_parameters is None else model_parameters)
    if not given or not isinstance(given[0], dict):
        given = [{"params": given}]
    groups: Groups = []
    for group in given:
        listed = group["params"]
        params = [listed] if isinstance(listed, torch.Tensor) else list(listed)
        params = [item[1] if isinstance(item, tuple) else item for item in params]
        trained = [param for param in params if param.requires_grad]
        if trained:
            groups.append({**group, "params": trained})
    if not groups:
        raise ConfigError(
            "no parameter requires a gradient; give model_parameters, or set requires_grad on some"
        )
    return groups


def _from_config(config: OptimizerConfig | None, groups: Groups) -> FlatOptimizer:
    if config is None:
        raise AssertionError("no optimizer in the ds_config")
    defaults = config.params.model_dump()
    if isinstance(config.params, AdamParams):
        rule: Rule = AdamRule(adam_w_mode=defaults.pop("adam_w_mode"))
    else:
        rule = SgdRule(has_momentum=any(group.get("momentum", defaults["momentum"]) != 0 for group in groups))
    return FlatOptimizer(groups, defaults=defaults, rule=rule)


def _check_params(optimizer: FlatOptimizer, module: nn.Module) -> None:
    """Only the model's parameters lie in flat buffers: others would silently keep their values."""
    ours = {id(param) for param in module.parameters()}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    strangers = sum(id(param) not in ours for param in params)
    if strangers:
        raise ConfigError(
            f"{strangers} of the optimizer's {len(params)} parameters are not the model's; give initialize() the model "
            "that holds them all, and make the optimizer after anything that replaces parameters"
        )
    if not any(param.requires_grad for param in params):
        raise ConfigError("no parameter of the optimizer requires a gradient; set requires_grad on some")


def _take_over(client: torch.optim.Optimizer) -> FlatOptimizer:
    """Return our optimizer with the client's groups: the same dicts, so that a scheduler made for it still works."""
    rule = _rule_of(client)
    for group in client.param_groups:
        for flag in _FLAGS_WE_LACK:
            if group.get(flag):
                raise ConfigError(
                    f"optimizer {type(client).__name__}({flag}=True) is not supported; leave {flag} off"
                )
    if any(client.state.values()):
        raise ConfigError(
            f"the {type(client).__name__} given to initialize() has stepped already and its states would be lost; "
            "give a fresh one, and continue from a checkpoint with engine.load_checkpoint()"
        )
    # torch's schedulers warn if the optimizer they were made for never steps; ours steps in its place.
    client._opt_called = True  # type: ignore[attr-defined]
    return FlatOptimizer(client.param_groups, defaults=client.defaults, rule=rule)


def _rule_of(client: torch.optim.Optimizer) -> Rule:
    """Only exact classes: a subclass may override anything."""
    if type(client) is torch.optim.SGD:
        return SgdRule(has_momentum=any(group["momentum"] != 0 for group in client.param_groups))
    if type(client) in (torch.optim.Adam, torch.optim.AdamW):
        is_adam_w = type(client) is torch.optim.AdamW
        modes = {group.get("decoupled_weight_decay", is_adam_w) for group in client.param_groups}
        if len(modes) == 1:
            return AdamRule(adam_w_mode=modes.pop())
        raise ConfigError("optimizer Adam: decoupled_weight_decay must be the same in all groups")
    raise ConfigError(
        f"optimizer {type(client).__module__}.{type(client).__qualname__} cannot run on shards; torch.optim.AdamW, "
        "torch.optim.Adam and torch.optim.SGD can, or name one in the ds_config"
    )
