"""The sections of a ds_config: which model reads each, and those that need more than a model."""

from __future__ import annotations

import difflib
from typing import Any

from . import optimizer, scheduler
from .activation import ActivationConfig
from .experts import ExpertParallelConfig
from .keys.value import PLAIN, POSITIVE, show
from .mesh import MeshConfig, agree_on_mesh
from .precision import Bf16Config, DataTypesConfig, Fp16Config, TorchAutocastConfig
from .section import Section, read_section
from .sequence import SequenceConfig
from .tensor import TensorParallelConfig
from .torch_scheduler import torch_scheduler, torch_scheduler_names, torch_scheduler_params
from .zero import ZeroConfig

# Sections that are read by themselves; one that is left out has its defaults.
SECTIONS: dict[str, type[Section]] = {
    "bf16": Bf16Config,
    "fp16": Fp16Config,
    "data_types": DataTypesConfig,
    "torch_autocast": TorchAutocastConfig,
    "zero_optimization": ZeroConfig,
}


def _type_of(values: dict[str, Any], section: str, problems: dict[str, str]) -> str | None:
    """The type that `section` names, where the section is there and names one."""
    inner = values.get(section)
    if not isinstance(inner, dict) or not inner or inner.get("type") == "auto":
        return None
    name = inner.get("type")
    if name is None:
        problems[f"{section}.type"] = f"{section}.type is missing"
    elif not isinstance(name, str):
        problems[f"{section}.type"] = f"{section}.type {show(name)} is not a text"
    else:
        return name
    return None


def _did_you_mean(name: str, names: tuple[str, ...]) -> str:
    lower = {known.lower(): known for known in names}
    near = [lower[hit] for hit in difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.7)]
    return f"did you mean {show(near[0])}? " if near else ""


def optimizer_type(values: dict[str, Any], problems: dict[str, str]) -> str | None:
    """The optimizer's type as it is spelled here, if it is available."""
    if (name := _type_of(values, "optimizer", problems)) is None:
        return None
    try:
        spelled = optimizer.spelled(name)
    except ValueError as error:
        problems["optimizer.type"] = f"optimizer.type {show(name)} {error}"
        return None
    if spelled is None:
        names = optimizer.optimizer_names()
        problems["optimizer.type"] = (
            f"optimizer.type {show(name)} is not a known optimizer; "
            f"{_did_you_mean(name, names)}known: {', '.join(names)}"
        )
    return spelled


def scheduler_type(values: dict[str, Any], problems: dict[str, str]) -> tuple[str | None, dict[str, bool]]:
    """The scheduler's type, if it is available; for one of torch its parameters and whether
    each must be given.
    """
    if (name := _type_of(values, "scheduler", problems)) is None or name in scheduler.PARAMS_OF:
        return name, {}
    try:
        kind = torch_scheduler(name)
    except ValueError as error:
        problems["scheduler.type"] = f"scheduler.type {show(name)} {error}"
        return None, {}
    if kind is None:
        names = (*scheduler.PARAMS_OF, *torch_scheduler_names())
        problems["scheduler.type"] = (
            f"scheduler.type {show(name)} is not a known scheduler; "
            f"{_did_you_mean(name, names)}known: {', '.join(names)}"
        )
        return None, {}
    return name, torch_scheduler_params(kind)


def read_optimizer(
    raw: dict[str, Any], kind: str | None, problems: dict[str, str]
) -> optimizer.OptimizerConfig | None:
    if kind is None:
        return None
    given = raw.get("params", {})
    if kind == "AdamW" and given.get("adam_w_mode") is False:
        problems["optimizer.params.adam_w_mode"] = (
            'optimizer.params.adam_w_mode false contradicts optimizer.type "AdamW"; '
            'write the type "Adam" for weight decay in the gradient'
        )
        return None
    if kind not in optimizer.PARAMS_OF:
        _check_plain(given, "optimizer.params", problems)
    model = optimizer.PARAMS_OF.get(kind, optimizer.TorchOptimizerParams)
    params = read_section(model, given, path="optimizer.params", problems=problems)
    return (
        None if params is None else optimizer.OptimizerConfig.model_validate({"type": kind, "params": params})
    )


def _check_plain(given: dict[str, Any], path: str, problems: dict[str, str]) -> None:
    """Refuse objects that no section describes: such a value goes to a class as it is."""
    for name, value in given.items():
        if not PLAIN.accepts(value):
            problems[f"{path}.{name}"] = f"{path}.{name} {show(value)} is not {PLAIN.words}"


def read_scheduler(
    raw: dict[str, Any], kind: str | None, must: dict[str, bool], problems: dict[str, str]
) -> scheduler.SchedulerConfig | None:
    if kind is None:
        return None
    given = raw.get("params", {})
    for name, is_required in must.items():
        if is_required and name not in given:
            problems[f"scheduler.params.{name}"] = f"scheduler.params.{name} is missing"
    if must:
        _check_plain(given, "scheduler.params", problems)
    model = scheduler.PARAMS_OF.get(kind, scheduler.TorchSchedulerParams)
    params = read_section(model, given, path="scheduler.params", problems=problems)
    return (
        None if params is None else scheduler.SchedulerConfig.model_validate({"type": kind, "params": params})
    )


def read_activation(raw: dict[str, Any] | None, problems: dict[str, str]) -> ActivationConfig | None:
    if raw is None:  # the process keeps what it has, see activation.py
        return None
    return read_section(ActivationConfig, raw, path="activation_checkpointing", problems=problems)


def read_tensor(
    raw: dict[str, Any], problems: dict[str, str], num_ranks: int, tp_size: int
) -> tuple[TensorParallelConfig | None, int]:
    """Return the section, None if it divides nothing, and how many ranks have samples of their own;
    `tp_size` is what the program says, 1 where it says nothing.
    """
    key = "tensor_parallel.autotp_size"
    section = read_section(
        TensorParallelConfig, raw.get("tensor_parallel", {}), path="tensor_parallel", problems=problems
    )
    if section is None:
        return None, num_ranks
    size = section.size if tp_size == 1 else tp_size
    if section.size not in (1, size):
        problems[key] = (
            f"{key} {section.size} contradicts the model, which is divided over {size} ranks; leave one out"
        )
    if num_ranks % size:
        problems[key] = f"{key} {size} does not divide the {num_ranks} ranks of the job"
        return None, num_ranks
    return section.model_copy(update={"autotp_size": size}) if size > 1 else None, num_ranks // size


def read_mesh(
    raw: dict[str, Any],
    problems: dict[str, str],
    num_ranks: int,
    tp_size: int,
    *,
    sp_size: int,
    num_stages: int,
    launched: MeshConfig,
) -> tuple[MeshConfig | None, int, int]:
    """Return what is said anywhere, None if no mesh is said, and over how many ranks layers and sequences
    are divided, 1 where only the keys for these say that.
    """
    found = read_section(MeshConfig, raw.get("mesh", {}), path="mesh", problems=problems) or MeshConfig()
    section, experts = raw.get("tensor_parallel"), raw.get("expert_parallel")
    in_section = section.get("autotp_size", 0) if isinstance(section, dict) else 0
    num_parts = raw.get("sequence_parallel_size", 1)
    num_expert_ranks = experts.get("autoep_size", 1) if isinstance(experts, dict) else 1
    is_on = isinstance(experts, dict) and bool(experts.get("enabled"))
    orders = {
        "dslaunch --mesh": launched.order or (),
        "the ds_config's section mesh": found.order or (),
    }
    sources = {
        "dslaunch --mesh": launched.given,
        "the ds_config's section mesh": found.given,
        "the model or tp_model_init()": {"tp": tp_size} if tp_size > 1 else {},
        "the ds_config's tensor_parallel.autotp_size": {"tp": in_section} if in_section else {},
        "initialize() or the topology of its model": {"sp": sp_size} if sp_size > 1 else {},
        "the ds_config's sequence_parallel_size": {"sp": num_parts} if num_parts != 1 else {},
        "the ds_config's expert_parallel.autoep_size": {"ep": num_expert_ranks} if is_on else {},
    }
    if not launched.given and not found.given and not found.order:
        return None, tp_size, sp_size
    if num_stages > 1:
        sources["the PipelineModule"] = {"pp": num_stages}
    elif max(launched.pp or 1, found.pp or 1) > 1:
        sources["the model, which is not in stages,"] = {"pp": 1}
    mesh = agree_on_mesh(sources, num_ranks=num_ranks * num_stages, problems=problems, orders=orders)
    is_agreed = not any(key.startswith("mesh") for key in problems)
    return (mesh, mesh.tp or tp_size, mesh.sp or sp_size) if is_agreed else (mesh, 1, sp_size)


def read_experts(raw: dict[str, Any], problems: dict[str, str]) -> ExpertParallelConfig | None:
    """Return the section, None if it divides nothing."""
    given = raw.get("expert_parallel", {})
    section = read_section(ExpertParallelConfig, given, path="expert_parallel", problems=problems)
    return None if section is None or section.size == 1 else section


def read_sequence(
    raw: dict[str, Any],
    problems: dict[str, str],
    num_places: int,
    sp_size: int,
    *,
    zero: ZeroConfig | None,
    is_lenient: bool,
) -> tuple[SequenceConfig | None, int]:
    """Return the section, None if it divides nothing, and over how many ranks a sequence is divided.

    `num_places` are those that layers are not divided over, and `sp_size` is what the program says, 1 where
    it says nothing.
    """
    name, data = "sequence_parallel_size", "data_parallel_size"
    section = raw.get("sequence", {})
    if is_lenient and "gradient" not in section:
        is_averaged = zero is not None and zero.stage == 3  # DeepSpeed 0.19.8 averages there
        section = {**section, "gradient": "mean" if is_averaged else "sum"}
    found = read_section(SequenceConfig, section, path="sequence", problems=problems)
    given = raw.get(name, 1)
    if not POSITIVE.accepts(given):
        return found, 1  # the top level says so
    size = given if sp_size == 1 else sp_size
    if given not in (1, size):
        problems[name] = f"{name} {given} contradicts initialize(), which is given {size}; leave one out"
    if num_places % size:
        problems[name] = (
            f"{name} {size} does not divide the {num_places} ranks that layers are not divided over"
        )
        return found, 1
    num_data = num_places // size
    if POSITIVE.accepts(raw.get(data)) and raw[data] != num_data:
        problems[data] = f"{data} {raw[data]} is {num_data} with these ranks and sizes; leave it out"
    return (None if size == 1 else found), size
