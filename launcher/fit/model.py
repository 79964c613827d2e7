"""A model that is named by its configuration, to be planned in place of the program."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import LaunchError
from ..inputs.named_file import read_named
from .config_file import read_ds_config

CONFIG = "--deepspeed_config"
_TRAINERS_CONFIG = "--deepspeed"  # the Trainer's option; elsewhere it is a flag without a value
_BATCH = re.compile("[1-9][0-9]{0,6}x[1-9][0-9]{0,8}")


def model_request(
    model: str, batch: str, *, is_checkpointed: bool, arguments: Sequence[str], cwd: str
) -> dict[str, Any]:
    """Return the fields of the runtime's ModelRequest; `arguments` are those of the program.

    Errors: LaunchError if the model, the batch or the ds_config is not there, or cannot be read
    """
    if not os.path.exists(model):
        raise LaunchError(
            f"--model={model}: there is no such file; give a folder with a config.json, or that file"
        )
    _check_weights(Path(model))
    if _BATCH.fullmatch(batch) is None:
        raise LaunchError(
            f"--batch={batch[:40]}: it must be samples and tokens of a micro batch; write e.g. --batch=4x2048"
        )
    config = read_ds_config(ds_config_of(arguments), cwd)
    size = int(batch.partition("x")[0])
    if config.get("train_micro_batch_size_per_gpu", size) != size:  # the batch is what is planned
        config.pop("train_batch_size", None)
    return {
        "model": model,
        "batch": batch,
        "config": {**config, "train_micro_batch_size_per_gpu": size},
        "is_checkpointed": is_checkpointed,
    }


def _check_weights(model: Path) -> None:
    """Errors: LaunchError for a model whose weights are quantized"""
    path = model / "config.json" if model.is_dir() else model
    try:
        given = json.loads(read_named(path))
    except (OSError, ValueError, RecursionError):
        return  # transformers says what is wrong with it
    sections = [given, given.get("text_config")] if isinstance(given, dict) else []
    found = next(
        (one["quantization_config"] for one in sections if one and one.get("quantization_config")), None
    )
    if found is not None:
        method = found.get("quant_method", "unknown") if isinstance(found, dict) else "unknown"
        raise LaunchError(
            f"--model={model}: its weights are quantized (quantization_config, {method}): they stay as they "
            "are in a training, and what is trained beside them is in the program alone; plan the program "
            "itself, or take quantization_config out of a copy of the config.json to plan the model in the "
            "ds_config's dtype"
        )


def ds_config_of(arguments: Sequence[str]) -> str:
    """Return the ds_config that a program's arguments name.

    Errors: LaunchError if they name none
    """
    place = _place_of_config(arguments)
    if place is not None:
        word = arguments[place]
        return word.partition("=")[2] if word.startswith("-") else word
    raise LaunchError(
        f"the arguments of the script name no ds_config; write {CONFIG} ds_config.json behind the script"
    )


def with_ds_config(arguments: Sequence[str], path: str) -> tuple[str, ...]:
    """Return the arguments with another file as the ds_config that they name."""
    made = list(arguments)
    place = _place_of_config(arguments)
    if place is not None:
        name, equals, _ = made[place].partition("=")
        made[place] = f"{name}={path}" if equals and name.startswith("-") else path
    return tuple(made)


def with_mapped(
    arguments: Sequence[str], mapped: Sequence[tuple[str, str]], config: Mapping[str, Any]
) -> tuple[str, ...]:
    """Return the arguments with those that repeat keys of the ds_config, as Hugging Face's do, set to its
    values; `mapped` has each key with the argument's name.
    """
    made = list(arguments)
    for key, name in mapped:
        if config.get(key, "auto") == "auto":  # the program fills it in
            continue
        value = str(config[key])
        place = next((at for at, word in enumerate(made) if word.partition("=")[0] == name), None)
        if place is None:
            made += [name, value]
        elif "=" in made[place]:
            made[place] = f"{name}={value}"
        else:
            made[place + 1 : place + 2] = [value]
    return tuple(made)


def _place_of_config(arguments: Sequence[str]) -> int | None:
    """Return the place of the word that names the ds_config: `--name=FILE`, or the FILE behind `--name`."""
    for place, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        behind = arguments[place + 1] if place + 1 < len(arguments) else ""
        named = value if equals else behind
        if (name == CONFIG and named) or (name == _TRAINERS_CONFIG and named.endswith(".json")):
            return place if equals else place + 1
    return None
