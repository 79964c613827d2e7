"""From a ds_config to a Config: read it, check every key, fill in the batch sizes."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError
from . import optimizer, scheduler
from .activation import ActivationConfig
from .batch import MICRO, STEPS, TRAIN, fill_batch
from .config import Config, Origin
from .experts import ExpertParallelConfig
from .keys.table import keys_for
from .keys.value import DTYPE, PLAIN, POSITIVE, show, show_name
from .lenient import relax
from .mesh import MeshConfig, agree_on_mesh
from .pipeline import PipelineConfig
from .precision import Bf16Config, DataTypesConfig, Fp16Config, TorchAutocastConfig
from .quoted import read_quoted
from .section import read_section
from .sequence import SequenceConfig
from .source import read_source
from .strict import Sifted, rename_old, sift
from .tensor import TensorParallelConfig
from .torch_scheduler import torch_scheduler, torch_scheduler_names, torch_scheduler_params
from .zero import ZeroConfig

_log = logging.getLogger("dslaunch")

DEEPSPEED_CLIPPING = (
    1.0  # where a ds_config says nothing; here it is off then, but for programs that count on it
)


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


def _optimizer_type(values: dict[str, Any], problems: dict[str, str]) -> str | None:
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


def _scheduler_type(values: dict[str, Any], problems: dict[str, str]) -> tuple[str | None, dict[str, bool]]:
    """The scheduler's type, if it is available; for one of torch its parameters and whether
    each must be given.
    """
    if (name := _type_of(values, "scheduler", problems)) is None or name in scheduler.PARAMS_OF:
        return name, {}
    try:
        found = torch_scheduler(name)
    except ValueError as error:
        problems["scheduler.type"] = f"scheduler.type {show(name)} {error}"
        return None, {}
    if found is None:
        names = (*scheduler.PARAMS_OF, *torch_scheduler_names())
        problems["scheduler.type"] = (
            f"scheduler.type {show(name)} is not a known scheduler; "
            f"{_did_you_mean(name, names)}known: {', '.join(names)}"
        )
        return None, {}
    return name, torch_scheduler_params(found)


def _read_optimizer(
    used: dict[str, Any], kind: str | None, problems: dict[str, str]
) -> optimizer.OptimizerConfig | None:
    if kind is None:
        return None
    given = used.get("params", {})
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
    """What no section describes goes to a class as it is."""
    for name, value in given.items():
        if not PLAIN.accepts(value):
            problems[f"{path}.{name}"] = f"{path}.{name} {show(value)} is not {PLAIN.words}"


def _read_scheduler(
    used: dict[str, Any], kind: str | None, must: dict[str, bool], problems: dict[str, str]
) -> scheduler.SchedulerConfig | None:
    if kind is None:
        return None
    given = used.get("params", {})
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


def _read_activation(used: dict[str, Any] | None, problems: dict[str, str]) -> ActivationConfig | None:
    if used is None:  # the process keeps what it has, see activation.py
        return None
    return read_section(ActivationConfig, used, path="activation_checkpointing", problems=problems)


def _read_tensor(
    used: dict[str, Any], problems: dict[str, str], num_ranks: int, tp_size: int
) -> tuple[TensorParallelConfig | None, int]:
    """Return the section, None if it divides nothing, and how many ranks have samples of their own;
    `tp_size` is what the program says, 1 where it says nothing.
    """
    key = "tensor_parallel.autotp_size"
    found = read_section(
        TensorParallelConfig, used.get("tensor_parallel", {}), path="tensor_parallel", problems=problems
    )
    if found is None:
        return None, num_ranks
    size = found.size if tp_size == 1 else tp_size
    if found.size not in (1, size):
        problems[key] = (
            f"{key} {found.size} contradicts the model, which is divided over {size} ranks; leave one out"
        )
    if num_ranks % size:
        problems[key] = f"{key} {size} does not divide the {num_ranks} ranks of the job"
        return None, num_ranks
    return found.model_copy(update={"autotp_size": size}) if size > 1 else None, num_ranks // size


def _read_mesh(
    used: dict[str, Any],
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
    found = read_section(MeshConfig, used.get("mesh", {}), path="mesh", problems=problems) or MeshConfig()
    section, experts = used.get("tensor_parallel"), used.get("expert_parallel")
    in_section = section.get("autotp_size", 0) if isinstance(section, dict) else 0
    num_parts = used.get("sequence_parallel_size", 1)
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


def _read_experts(used: dict[str, Any], problems: dict[str, str]) -> ExpertParallelConfig | None:
    """Return the section, None if it divides nothing."""
    given = used.get("expert_parallel", {})
    found = read_section(ExpertParallelConfig, given, path="expert_parallel", problems=problems)
    return None if found is None or found.size == 1 else found


def _read_sequence(
    used: dict[str, Any], problems: dict[str, str], num_places: int, sp_size: int, *, is_lenient: bool
) -> tuple[SequenceConfig | None, int]:
    """Return the section, and how many ranks have samples of their own; `num_places` are those that layers
    are
    not divided over, and `sp_size` is what the program says, 1 where it says nothing.
    """
    name, data = "sequence_parallel_size", "data_parallel_size"
    section = used.get("sequence", {})
    if is_lenient and "gradient" not in section:
        zero = used["zero_optimization"]
        is_averaged = isinstance(zero, ZeroConfig) and zero.stage == 3  # by DeepSpeed 0.19.8
        section = {**section, "gradient": "mean" if is_averaged else "sum"}
    found = read_section(SequenceConfig, section, path="sequence", problems=problems)
    given = used.get(name, 1)
    if not POSITIVE.accepts(given):
        return found, num_places  # the top level says so
    size = given if sp_size == 1 else sp_size
    if given not in (1, size):
        problems[name] = f"{name} {given} contradicts initialize(), which is given {size}; leave one out"
    if size == 1:
        found = None
    else:
        used[name] = size
    if num_places % size:
        problems[name] = (
            f"{name} {size} does not divide the {num_places} ranks that layers are not divided over"
        )
        return found, num_places
    num_data = num_places // size
    if POSITIVE.accepts(used.get(data)) and used[data] != num_data:
        problems[data] = f"{data} {used[data]} is {num_data} with these ranks and sizes; leave it out"
    return found, num_data


def _count_samples_once(used: dict[str, Any], world_size: int) -> None:
    """DeepSpeed's train_batch_size counts the samples of every rank, also of those that compute together."""
    if all(POSITIVE.accepts(used[name]) for name in (TRAIN, MICRO, STEPS)):
        said, used[TRAIN] = used[TRAIN], used[MICRO] * used[STEPS] * world_size
        _log.info(
            "%s %s counts the samples of all ranks, as DeepSpeed does; those over which layers are divided "
            "have the same, so a step has %s",
            TRAIN,
            said,
            used[TRAIN],
        )


def _check_together(values: dict[str, Any], problems: dict[str, str]) -> None:
    """Rules about more than one section."""

    def is_on(section: str) -> bool:
        inner = values.get(section)
        return isinstance(inner, dict) and inner.get("enabled") is True

    given = values.get("data_types")
    wanted = given.get("param_dtype") if isinstance(given, dict) else None
    trained = "bf16" if is_on("bf16") else "fp16" if is_on("fp16") else "fp32"
    if DTYPE.accepts(wanted) and DTYPE.read(wanted) != trained:
        problems["data_types.param_dtype"] = (
            f"data_types.param_dtype {show(wanted)} contradicts bf16.enabled and fp16.enabled, by which "
            f"parameters are {trained}; write {show(trained)}, or leave it out"
        )
    if is_on("bf16") and is_on("fp16"):
        problems["fp16.enabled"] = "fp16.enabled true contradicts bf16.enabled true; keep bf16"
    for section in ("bf16", "fp16"):
        if is_on("torch_autocast") and is_on(section):
            problems["torch_autocast.enabled"] = (
                f"torch_autocast.enabled true contradicts {section}.enabled true: one keeps float32 "
                "parameters, the other makes 16-bit ones; keep one of them"
            )


def _finish(name: str, sifted: Sifted, *, is_lenient: bool) -> None:
    """Raise what is wrong, one line for each; else say in one line what needs nothing,
    and in one what is not done.
    """
    autos = {f"{key} is missing" for key in sifted.autos}  # what is left out of the check is not missing
    lines = [] if is_lenient else list(sifted.unknown.values())
    lines += [line for line in sifted.problems.values() if line not in autos]
    if sifted.autos:
        lines.insert(
            0, f'"auto" is left in {", ".join(sifted.autos)}; write values: only a trainer can fill it in'
        )
    if lines:
        raise ConfigError("\n".join(f"{name}: {line}" for line in lines))
    info = _joined({"accepted, without effect here": sifted.hints, "old spelling": sifted.old_names})
    warning = _joined(
        {
            "accepted, but not done here": sifted.unmet,
            "not known, ignored": [show_name(path) or '""' for path in sifted.unknown],
            '"auto", counts as left out': sifted.left_out,
        }
    )
    if info:
        _log.info("%s: %s", name, info)
    if warning:
        _log.warning("%s: %s", name, warning)


def _joined(notes: dict[str, list[str]]) -> str:
    """The headings that have keys, with their keys, on one line."""
    return "; ".join(f"{heading}: {', '.join(keys)}" for heading, keys in notes.items() if keys)


def load_config(  # noqa: PLR0913, PLR0915  (each from another source)
    source: str | os.PathLike[str] | Mapping[str, Any],
    *,
    world_size: int,
    is_lenient: bool = False,
    has_optimizer: bool = False,
    tp_size: int = 1,
    num_stages: int = 1,
    launched: Mapping[str, Any] | None = None,
    sp_size: int = 1,
    num_data: int | None = None,
) -> Config:
    """The configuration that `source` gives `world_size` ranks, those of one stage of `num_stages`: a path, a
    dict, or base64 of JSON.

    A file may be JSON, HJSON (comments, trailing commas) or, by the end of its name, YAML. `is_lenient` is
    for programs that were written for DeepSpeed: a warning names the keys that are not known, or still say
    "auto", and they count as left out; gradient_clipping that is left out is 1.0, as there. `has_optimizer`:
    the program brings one. `tp_size`: over so many ranks it has divided its layers, `sp_size`: its sequences.
    `launched`: the sizes of axes that the launcher was given, and their order. `num_data`: so many ranks have
    samples of their own as the program says; a batch is counted by them. The Config's world_size are the
    ranks that have samples of their own.
    Errors: ConfigError with one line for each thing that is wrong
    Source: DeepSpeed 0.19.6 runtime/config.py, `DeepSpeedConfig`; the same keys and batch arithmetic.
    """
    if world_size < 1:
        raise AssertionError(f"world_size {world_size} is below 1")
    name, values = read_source(source)
    sifted = Sifted()
    problems = sifted.problems
    if is_lenient:
        values = relax(values, sifted, has_optimizer=has_optimizer)
    given = values
    if is_lenient:
        values = read_quoted(values, sifted)
    if is_lenient and "gradient_clipping" not in values:
        values = {**values, "gradient_clipping": DEEPSPEED_CLIPPING}
    values = rename_old(values, sifted, is_lenient=is_lenient)
    optimizer_type = _optimizer_type(values, problems)
    scheduler_type, torch_params = _scheduler_type(values, problems)
    class_params = {"scheduler": list(torch_params)}
    if optimizer_type is not None and optimizer_type not in optimizer.PARAMS_OF:
        class_params["optimizer"] = list(optimizer.optimizer_params(optimizer_type))
    sift(values, keys_for(optimizer_type, scheduler_type, class_params), sifted)
    _check_together(values, problems)

    used = sifted.used
    used["optimizer"] = _read_optimizer(used.get("optimizer", {}), optimizer_type, problems)
    used["scheduler"] = _read_scheduler(used.get("scheduler", {}), scheduler_type, torch_params, problems)
    used["bf16"] = read_section(Bf16Config, used.get("bf16", {}), path="bf16", problems=problems)
    used["fp16"] = read_section(Fp16Config, used.get("fp16", {}), path="fp16", problems=problems)
    used["data_types"] = read_section(
        DataTypesConfig, used.get("data_types", {}), path="data_types", problems=problems
    )
    used["torch_autocast"] = read_section(
        TorchAutocastConfig, used.get("torch_autocast", {}), path="torch_autocast", problems=problems
    )
    used["zero_optimization"] = read_section(
        ZeroConfig, used.get("zero_optimization", {}), path="zero_optimization", problems=problems
    )
    used["activation_checkpointing"] = _read_activation(used.get("activation_checkpointing"), problems)
    if "pipeline" in used:
        used["pipeline"] = read_section(PipelineConfig, used["pipeline"], path="pipeline", problems=problems)
    num_ranks = world_size
    used["mesh"], tp_size, sp_size = _read_mesh(
        used,
        problems,
        num_ranks,
        tp_size,
        sp_size=sp_size,
        num_stages=num_stages,
        launched=MeshConfig(**launched or {}),
    )
    used["tensor_parallel"], num_places = _read_tensor(used, problems, num_ranks, tp_size)
    used["sequence"], world_size = _read_sequence(used, problems, num_places, sp_size, is_lenient=is_lenient)
    used["expert_parallel"] = _read_experts(used, problems)
    num_counted = num_ranks // (num_places // world_size) if is_lenient else world_size
    num_counted = num_data or num_counted
    line = fill_batch(used, world_size=num_counted)
    if is_lenient and line is None and world_size < num_counted:
        _count_samples_once(used, world_size)
    if line and not {TRAIN, MICRO, STEPS} & set(sifted.autos):
        problems[TRAIN] = line
    if problems or sifted.autos:  # the sections may be None; what is left to check is the top level
        used["bf16"], used["fp16"], used["zero_optimization"] = Bf16Config(), Fp16Config(), ZeroConfig()
        used["data_types"], used["sequence"] = DataTypesConfig(), None
        used["torch_autocast"] = TorchAutocastConfig()
    used["origin"] = Origin(name=name, given=given, is_lenient=is_lenient)
    used["world_size"] = world_size
    config = read_section(Config, used, path="", problems=problems)
    _finish(name, sifted, is_lenient=is_lenient)
    if config is None:
        raise AssertionError(f"{name}: no line says why there is no configuration")
    return config
