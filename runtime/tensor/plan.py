"""Plans: the style of each module and each parameter of a model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn

from ..config.tensor import LayerRule, TensorParallelConfig
from ..errors import ConfigError
from ..log import logger
from ..zero.parameters.packed import is_packed
from .known_plans import known_plan
from .styles import STYLES, Column, Packs, PartlyRotated, Row, SplitRow, Style

_NUMBER = re.compile(r"\.\d+(?=\.|$)")  # number of a layer, which a plan leaves open
_HEADS = (
    "num_attention_heads",
    "num_key_value_heads",
    "n_head",
    "n_heads",
    "encoder_attention_heads",
    "decoder_attention_heads",
)
_NO_PLAN = (
    "tensor_parallel.autotp_size {size}: {kind} does not say how its layers are divided. A Hugging Face "
    "model has a tp_plan; for another one name the layers in tensor_parallel.partition_config, or divide it "
    "with torch's parallelize_module() before initialize()"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlan:
    """Styles by the full names of parameters and of modules."""

    params: Mapping[str, Style]
    modules: Mapping[str, Style]


def choose_plan(module: nn.Module, settings: TensorParallelConfig, *, is_stage: bool = False) -> TensorPlan:
    """Return the ds_config's rules for this model, if it has any, else the model's own plan.

    `is_stage`: the module is one of several stages, so rules that fit nothing here may be for another stage.
    Errors: ConfigError if there is no plan, if it names an unknown style, or if no name of it is in the model
    """
    if settings.partition_config is not None and settings.partition_config.layer_specs:
        plan = _from_rules(module, settings.partition_config.layer_specs, is_stage=is_stage)
        source = "tensor_parallel.partition_config.layer_specs"
    else:
        given = plan_of_model(module)
        if not given:
            raise ConfigError(_NO_PLAN.format(size=settings.size, kind=type(module).__name__))
        plan, source = _from_styles(module, given), f"the tp_plan of {type(module).__name__}"
    if not plan.params and not is_stage:
        raise ConfigError(
            f"{source} fits no layer of this model, so nothing would be divided; the names of parameters are "
            f"like '{next(name for name, _ in module.named_parameters())}': write rules for these in "
            "tensor_parallel.partition_config, or give the model without what has been put around it (LoRA "
            "and other adapters train with zero_optimization.stage 3 instead)"
        )
    _check_kinds(module, plan)
    return plan


def plan_of_model(module: nn.Module) -> Mapping[str, str]:
    """Return a Hugging Face model's own plan, or ours for it: patterns of names, and the names of styles."""
    plan = getattr(module, "tp_plan", None) or getattr(module, "_tp_plan", None)
    return plan if plan and isinstance(plan, Mapping) else known_plan(module)


def _from_styles(module: nn.Module, given: Mapping[str, str]) -> TensorPlan:
    for pattern, style in given.items():
        if style not in STYLES:
            raise ConfigError(
                f"the tp_plan of {type(module).__name__} gives '{pattern}' the style {style!r}, which is not "
                f"available; there are {', '.join(STYLES)}. Name the layers in "
                "tensor_parallel.partition_config instead"
            )
    params: dict[str, Style] = {}
    names = (f"{prefix}.{key}" for prefix, one in module.named_modules() for key in one._parameters)
    for name in names:
        open_name = _NUMBER.sub(".*", name)
        found = given.get(open_name) or given.get(open_name.rpartition(".")[0])
        if found is not None:
            params[name] = STYLES[found]
    modules = {
        name: STYLES[given[_NUMBER.sub(".*", name)]]
        for name, _ in module.named_modules()
        if _NUMBER.sub(".*", name) in given
    }
    return TensorPlan(params=params, modules=modules)


def _from_rules(module: nn.Module, rules: tuple[LayerRule, ...], *, is_stage: bool) -> TensorPlan:
    model_type = str(getattr(getattr(module, "config", None), "model_type", "")).lower()
    own = [
        rule for rule in rules if rule.model_types is None or model_type in map(str.lower, rule.model_types)
    ]
    params: dict[str, Style] = {}
    modules: dict[str, Style] = {}
    weights = [
        f"{name}.weight" for name, submodule in module.named_modules() if "weight" in submodule._parameters
    ]
    useless = [rule for rule in own if not any(_fits(rule, weight) for weight in weights)]
    if useless and len(useless) < len(own) and dist.get_rank() == 0 and not is_stage:
        logger.warning(
            "tensor_parallel.partition_config.layer_specs: patterns %s fit the name of no weight from its "
            "beginning on, as '%s'; what they mean is not divided",
            ", ".join(repr(pattern) for rule in useless for pattern in rule.patterns),
            weights[0],
        )
    for name, submodule in module.named_modules():
        rule = next((rule for rule in own if _fits(rule, f"{name}.weight")), None)
        if rule is None or "weight" not in submodule._parameters:
            continue
        style = _style_of(rule)
        if style is not None:
            modules[name] = style
            params |= {f"{name}.{param}": style for param in submodule._parameters}
    return TensorPlan(params=params, modules=modules)


def _fits(rule: LayerRule, weight: str) -> bool:
    return any(re.match(pattern, weight) for pattern in rule.patterns)


def _style_of(rule: LayerRule) -> Style | None:
    if rule.partition_type == "skip":
        return STYLES["replicated_with_grad_allreduce"] if rule.grad_allreduce else None
    if rule.partition_type == "row":
        return replace(STYLES["rowwise"], cut=partial(_rows, rule.packs))
    style = STYLES["colwise_gather_output" if rule.gather_output else "colwise"]
    return replace(style, cut=partial(_columns, rule.packs))


def _columns(packs: Packs, shape: tuple[int, ...]) -> tuple[int, Packs]:
    return 0, packs


def _rows(packs: Packs, shape: tuple[int, ...]) -> tuple[int, Packs] | None:
    return None if len(shape) == 1 else (1, packs)


def _check_kinds(module: nn.Module, plan: TensorPlan) -> None:
    named: dict[str, Any] = dict(module.named_modules())
    for name, style in plan.modules.items():
        submodule = named[name]
        if style.forward is PartlyRotated:
            rope_size(module, name)
        if not isinstance(submodule, style.kinds):
            kinds = " or ".join(kind.__name__ for kind in style.kinds)
            raise ConfigError(
                f"tensor parallelism divides '{name}' as a {kinds}, and it is a {type(submodule).__name__}: "
                "leave what has replaced it out (adapters, quantization), or name other layers in "
                "tensor_parallel.partition_config"
            )
        if (
            style.forward in (Row, SplitRow)
            and getattr(submodule.forward, "__func__", None) is not nn.Linear.forward
        ):
            raise ConfigError(
                f"tensor parallelism computes '{name}' as a Linear by rows, and it has a forward of its own "
                f"({type(submodule).__name__}), which would be left out: give it Linear's, or name other "
                "layers in tensor_parallel.partition_config"
            )
        if isinstance(submodule, nn.Embedding) and (
            submodule.max_norm or submodule.scale_grad_by_freq or submodule.sparse
        ):
            raise ConfigError(
                f"embedding '{name}' has max_norm, scale_grad_by_freq or sparse, which need all of its rows; "
                "leave it out of the plan"
            )
    params: dict[str, Any] = dict(module.named_parameters())
    for name, param in params.items():
        if name in plan.params and (not param.is_floating_point() or is_packed(param)):
            kind = type(param).__name__ if is_packed(param) else param.dtype
            raise ConfigError(
                f"parameter '{name}' is {kind}: a quantized layer cannot be divided over ranks; load "
                "the model in bfloat16"
            )


def _is_plain_linear(module: nn.Module) -> bool:
    return getattr(module.forward, "__func__", None) is nn.Linear.forward


def text_config(module: nn.Module) -> Any:
    """Return a Hugging Face model's config (that for texts if it takes images, too); None without one."""
    config: Any = getattr(module, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def check_heads(module: nn.Module, size: int, plan: TensorPlan | None = None) -> None:
    """Check that each rank gets whole heads of attention; rules in `plan` may leave attention undivided.

    Errors: ConfigError naming the number of heads that `size` does not divide
    """
    config = text_config(module)
    for key in _HEADS:
        heads = getattr(config, key, None)
        if not isinstance(heads, int) or heads % size == 0:
            continue
        if plan is None or _divides_heads(module, plan, heads * _head_dim(config)):
            raise ConfigError(
                f"tensor_parallel.autotp_size {size} does not divide the model's {key}, {heads}: each rank "
                "computes whole heads; give a divisor of it, or rules for the other layers in "
                "tensor_parallel.partition_config"
            )


def _head_dim(config: Any) -> int:
    given = getattr(config, "head_dim", None)
    heads = next(
        getattr(config, key) for key in ("num_attention_heads", "n_head", "n_heads") if hasattr(config, key)
    )
    return given if isinstance(given, int) else int(config.hidden_size) // int(heads)


def _divides_heads(module: nn.Module, plan: TensorPlan, length: int) -> bool:
    """Tell whether a layer gives each rank a part of an output of this length, or of an output that contains
    it.
    """
    named: dict[str, Any] = dict(module.named_modules())
    return any(
        style.forward is Column and getattr(named[name], "out_features", 0) == length
        for name, style in plan.modules.items()
    )


def rope_size(module: nn.Module, name: str) -> int:
    """Return how many elements at the end of a module's output are the rotated key.

    Errors: ConfigError if the model's config does not say
    """
    size = getattr(text_config(module), "qk_rope_head_dim", None)
    if not isinstance(size, int):
        raise ConfigError(
            f"the plan divides '{name}' by the style 'mla_kv_a_proj', for which the model's config has to "
            f"have qk_rope_head_dim, a whole number, and there it is {size}; name the layers in "
            "tensor_parallel.partition_config instead"
        )
    return size
