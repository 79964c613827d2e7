"""`init_inference()` and `default_inference_config()`, as DeepSpeed has them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ...errors import ConfigError, show_user_errors_in_one_line
from ...inference.engine import InferenceEngine
from ...inference.make import make_inference_engine
from .config import DeepSpeedInferenceConfig
from .read_config import read_options

Source = str | os.PathLike[str] | Mapping[str, Any] | DeepSpeedInferenceConfig


def init_inference(
    model: nn.Module, config: Source | None = None, *, is_lenient: bool = False, **options: Any
) -> InferenceEngine:
    """Return an engine that answers with this model: `engine(inputs)` and `engine.generate(inputs)`.

    `config` is a dict or the path of a JSON file, and `options` are further keys of it. Those that matter:
    `dtype` (of torch, or its name; left out, parameters keep theirs); `tensor_parallel={"tp_size": n}`
    divides layers over n neighbours, by the model's own plan; `offload` "cpu" or "nvme", with `nvme_path`,
    streams weights from host memory or a disk; `checkpoint` is a folder with weights; `max_out_tokens` is the
    longest prompt.
    `is_lenient` is for programs that were written for DeepSpeed, and get it where they `import deepspeed`:
    dtype is float16 and max_out_tokens 1024 if they are left out.
    Order:  every rank must call this
    Errors: ConfigError; uncaught, it ends the program with one line and exit code 2
    Source: DeepSpeed 0.19.8 deepspeed/__init__.py, `init_inference`
    """
    show_user_errors_in_one_line()
    given = _joined(config, options)
    read = DeepSpeedInferenceConfig(**given)
    asked = read_options(read, model, given=given, is_lenient=is_lenient)
    engine = make_inference_engine(model, asked)
    if asked.save_path is not None and engine.global_rank == 0:
        _name_files(Path(asked.save_path))
    if not is_lenient and "dtype" not in given:
        read.dtype = next((one.dtype for one in model.parameters()), read.dtype)
    engine._config = read
    return engine


def _name_files(folder: Path) -> None:
    """Write the file that `checkpoint` of DeepSpeed's programs names."""
    values = {"type": "dslaunch", "checkpoints": ["model.safetensors"], "version": 1.0}
    (folder / "ds_inference_config.json").write_text(json.dumps(values))


def default_inference_config() -> dict[str, Any]:
    """Return all keys with DeepSpeed's defaults."""
    return DeepSpeedInferenceConfig().model_dump()


def _joined(config: Source | None, options: Mapping[str, Any]) -> dict[str, Any]:
    values = _read(config)
    for key in values.keys() & options.keys():
        if values[key] != options[key]:
            raise ConfigError(
                f"init_inference({key}={options[key]!r}) contradicts its config, which has "
                f"{key} {values[key]!r}; give it once"
            )
    return {**values, **options}


def _read(config: Source | None) -> dict[str, Any]:
    if config is None:
        return {}
    if isinstance(config, DeepSpeedInferenceConfig):
        return {key: getattr(config, key) for key in config.model_fields_set}
    if isinstance(config, Mapping):
        return dict(config)
    if not isinstance(config, str | os.PathLike):
        raise ConfigError(
            f"init_inference(config={type(config).__name__}): must be a dict or the path of a JSON file"
        )
    try:
        values = json.loads(Path(config).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"init_inference(config={os.fspath(config)!r}): {error}; give a JSON file"
        ) from None
    if not isinstance(values, dict):
        raise ConfigError(f"init_inference(config={os.fspath(config)!r}) holds no object: {{ ... }}")
    return values
