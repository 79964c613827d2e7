"""From a ds_config to a Config: read it, check every key, fill in the batch sizes."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError
from . import optimizer
from .batch import MICRO, STEPS, TRAIN, fill_batch
from .config import Config, ConfigOrigin
from .key_table import keys_for
from .keys.value import DTYPE, OPTIMIZER_STATE_DTYPE, POSITIVE, STATE_DTYPE, show, show_name
from .lenient import relax
from .mesh import MeshConfig
from .pipeline import PipelineConfig
from .quoted import read_quoted
from .section import read_section
from .sections import (
    SECTIONS,
    optimizer_type,
    read_activation,
    read_experts,
    read_mesh,
    read_optimizer,
    read_scheduler,
    read_sequence,
    read_tensor,
    scheduler_type,
)
from .source import read_source
from .strict import Sifted, rename_old, sift

_log = logging.getLogger("dslaunch")

DEEPSPEED_CLIPPING = (
    1.0  # DeepSpeed's default; here clipping is off then, except for programs that count on it
)


def _count_samples_once(batch: dict[str, Any], world_size: int) -> None:
    """DeepSpeed's train_batch_size counts the samples of every rank, also of those that compute together."""
    if all(POSITIVE.accepts(batch[name]) for name in (TRAIN, MICRO, STEPS)):
        said, batch[TRAIN] = batch[TRAIN], batch[MICRO] * batch[STEPS] * world_size
        _log.info(
            "%s %s counts the samples of all ranks, as DeepSpeed does; those over which layers are divided "
            "have the same, so a step has %s",
            TRAIN,
            said,
            batch[TRAIN],
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
    _check_kept(values, problems, is_bf16=is_on("bf16"))
    if is_on("bf16") and is_on("fp16"):
        problems["fp16.enabled"] = "fp16.enabled true contradicts bf16.enabled true; keep bf16"
    for section in ("bf16", "fp16"):
        if is_on("torch_autocast") and is_on(section):
            problems["torch_autocast.enabled"] = (
                f"torch_autocast.enabled true contradicts {section}.enabled true: one keeps float32 "
                "parameters, the other makes 16-bit ones; keep one of them"
            )


# DeepSpeed's keys and ours that say the same: in which dtype values are kept from step to step
_KEPT_IN = (
    ("bf16.bf16_master_weights_and_grads", "data_types.master_dtype"),
    ("bf16.bf16_optimizer_states", "data_types.optimizer_state_dtype"),
)


def _check_kept(values: dict[str, Any], problems: dict[str, str], *, is_bf16: bool) -> None:
    """Rules about values that are kept in bfloat16."""

    def said(key: str) -> Any:
        section, name = key.split(".")
        inner = values.get(section)
        return inner.get(name) if isinstance(inner, dict) else None

    for key, own in _KEPT_IN:
        if said(key) is True and not is_bf16:
            problems[key] = f"{key} true needs bf16.enabled true; leave it out"
        wanted = said(own)
        is_known = OPTIMIZER_STATE_DTYPE.accepts(wanted)
        if said(key) is True and is_known and OPTIMIZER_STATE_DTYPE.read(wanted) != "bf16":
            problems[own] = f"{own} {show(wanted)} contradicts {key} true; leave one of them out"
    master = said("data_types.master_dtype")
    if STATE_DTYPE.accepts(master) and STATE_DTYPE.read(master) == "bf16" and not is_bf16:
        problems["data_types.master_dtype"] = (
            f"data_types.master_dtype {show(master)} needs bf16.enabled true: a bfloat16 parameter is its "
            "own master; leave it out, or train in bf16"
        )


def _finish(name: str, sifted: Sifted, *, is_lenient: bool) -> None:
    """Raise what is wrong, one line for each; else say in one line what needs nothing,
    and in one what is not done.
    """
    # A key that says "auto" was taken out before the check, which therefore calls it missing.
    autos = {f"{key} is missing" for key in sifted.autos}
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


def load_config(  # noqa: PLR0913  (each from another source)
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
    Errors: ConfigError with one line for each fault
    Source: DeepSpeed 0.19.6 runtime/config.py, `DeepSpeedConfig`; the same keys and batch arithmetic.
    """
    if world_size < 1:
        raise AssertionError(f"world_size {world_size} is below 1")
    name, values = read_source(source)
    sifted = Sifted()
    raw, problems = sifted.used, sifted.problems
    given = relax(values, sifted, has_optimizer=has_optimizer) if is_lenient else values
    read = _sift(given, sifted, is_lenient=is_lenient)
    for key, model in SECTIONS.items():
        read[key] = read_section(model, raw.get(key, {}), path=key, problems=problems)
    read["activation_checkpointing"] = read_activation(raw.get("activation_checkpointing"), problems)
    if "pipeline" in raw:
        read["pipeline"] = read_section(PipelineConfig, raw["pipeline"], path="pipeline", problems=problems)
    read["mesh"], tp_size, sp_size = read_mesh(
        raw,
        problems,
        world_size,
        tp_size,
        sp_size=sp_size,
        num_stages=num_stages,
        launched=MeshConfig(**launched or {}),
    )
    read["tensor_parallel"], num_places = read_tensor(raw, problems, world_size, tp_size)
    read["sequence"], sp_size = read_sequence(
        raw, problems, num_places, sp_size, zero=read["zero_optimization"], is_lenient=is_lenient
    )
    read["expert_parallel"] = read_experts(raw, problems)
    if sp_size > 1:
        read["sequence_parallel_size"] = sp_size
    own_samples = num_places // sp_size
    read |= _batch(
        sifted,
        num_counted=num_data or (world_size // sp_size if is_lenient else own_samples),
        own_samples=own_samples if is_lenient else None,
    )
    if problems or sifted.autos:  # sections may be None; what is left to check is the top level
        read |= {key: model() for key, model in SECTIONS.items()} | {"sequence": None}
    read["origin"] = ConfigOrigin(name=name, given=given, is_lenient=is_lenient)
    config = read_section(Config, {**raw, **read, "world_size": own_samples}, path="", problems=problems)
    _finish(name, sifted, is_lenient=is_lenient)
    if config is None:
        raise AssertionError(f"{name}: no line says why there is no configuration")
    return config


def _sift(values: dict[str, Any], sifted: Sifted, *, is_lenient: bool) -> dict[str, Any]:
    """Take the config apart; return the sections that say by their type which keys they have."""
    problems = sifted.problems
    if is_lenient:
        values = read_quoted(values, sifted)
        if "gradient_clipping" not in values:
            values = {**values, "gradient_clipping": DEEPSPEED_CLIPPING}
    values = rename_old(values, sifted, is_lenient=is_lenient)
    of_optimizer = optimizer_type(values, problems)
    of_scheduler, torch_params = scheduler_type(values, problems)
    class_params = {"scheduler": list(torch_params)}
    if of_optimizer is not None and of_optimizer not in optimizer.PARAMS_OF:
        class_params["optimizer"] = list(optimizer.optimizer_params(of_optimizer))
    sift(values, keys_for(of_optimizer, of_scheduler, class_params), sifted)
    _check_together(values, problems)
    return {
        "optimizer": read_optimizer(sifted.used.get("optimizer", {}), of_optimizer, problems),
        "scheduler": read_scheduler(sifted.used.get("scheduler", {}), of_scheduler, torch_params, problems),
    }


def _batch(sifted: Sifted, *, num_counted: int, own_samples: int | None) -> dict[str, Any]:
    """Return the three sizes of a batch, by `num_counted` ranks; where a program counts as DeepSpeed does,
    `own_samples` ranks have samples of their own.
    """
    batch = {side: sifted.used[side] for side in (TRAIN, MICRO, STEPS) if side in sifted.used}
    line = fill_batch(batch, world_size=num_counted)
    if own_samples is not None and line is None and own_samples < num_counted:
        _count_samples_once(batch, own_samples)
    if line and not {TRAIN, MICRO, STEPS} & set(sifted.autos):
        sifted.problems[TRAIN] = line
    return batch
