"""Values of `engine._config`, DeepSpeed's object of the settings in effect, for programs that read it:
the same names, from ours.

Source: DeepSpeed 0.19.8 runtime/config.py, `DeepSpeedConfig._initialize_params`, and runtime/zero/config.py,
        `DeepSpeedZeroConfig`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch

from ...config.config import Config
from ...config.section import Section

_GUIDE = "docs/train/config.md says what becomes of each key"

_FIELDS: Mapping[str, Callable[[Config], Any]] = {
    "_param_dict": lambda config: config.origin.given,
    "activation_checkpointing_config": lambda config: view_of(config.activation_checkpointing),
    "aio_config": lambda config: config.aio.model_dump(by_alias=True),
    "bfloat16_config": lambda config: view_of(config.bf16),
    "buffer_dtype": lambda config: config.data_types.buffer_dtype,
    "checkpoint_config": lambda config: view_of(config.checkpoint),
    "comms_config": lambda config: view_of(config.comms_logger),
    "communication_data_type": lambda config: config.communication_data_type,
    "dataloader_drop_last": lambda config: config.dataloader_drop_last,
    "dump_state": lambda config: config.dump_state,
    "float16_config": lambda config: view_of(config.fp16),
    "flops_profiler_config": lambda config: view_of(config.flops_profiler),
    "grad_accum_dtype": lambda config: config.data_types.grad_accum_dtype,
    "gradient_allreduce_op": lambda config: config.gradient_allreduce_op,
    "gradient_accumulation_steps": lambda config: config.gradient_accumulation_steps,
    "gradient_clipping": lambda config: config.gradient_clipping,
    "keep_in_fp32_modules": lambda config: (
        "auto"
        if config.data_types.keep_in_fp32_modules is None
        else list(config.data_types.keep_in_fp32_modules)
    ),
    "log_level": lambda config: config.origin.given.get("log_level"),
    "managed_gradient_accumulation": lambda config: config.managed_gradient_accumulation,
    "optimizer_name": lambda config: None if config.optimizer is None else config.optimizer.type.lower(),
    "optimizer_params": lambda config: (
        None if config.optimizer is None else config.optimizer.params.model_dump()
    ),
    "param_dtype": lambda config: config.data_types.param_dtype,
    "scheduler_name": lambda config: None if config.scheduler is None else config.scheduler.type,
    "scheduler_params": lambda config: (
        None if config.scheduler is None else config.scheduler.params.model_dump()
    ),
    "steps_per_print": lambda config: config.steps_per_print,
    "timers_config": lambda config: view_of(config.timers),
    "torch_autocast_dtype": lambda config: getattr(torch, config.torch_autocast.dtype),
    "torch_autocast_enabled": lambda config: config.torch_autocast.enabled,
    "train_batch_size": lambda config: config.train_batch_size,
    "train_micro_batch_size_per_gpu": lambda config: config.micro_batch_size,
    "use_node_local_storage": lambda config: config.checkpoint.use_node_local_storage,
    "wall_clock_breakdown": lambda config: config.wall_clock_breakdown,
    "world_size": lambda config: config.world_size,
    "zero_config": lambda config: view_of(config.zero),
    "zero_enabled": lambda config: config.zero.stage > 0,
    "zero_optimization_stage": lambda config: config.zero.stage,
}


class _View:
    """Read only: the settings of an engine are fixed."""

    _of = "engine._config"

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(
            f"{self._of}.{name} = {value!r}: the settings are fixed once initialize() has read the "
            "ds_config; set it there, or use engine.set_train_batch_size(), "
            "engine.set_train_micro_batch_size() or optimizer.clip_grad",
            name=name,
        )

    def _refuse(self, name: str) -> NoReturn:
        """Errors: AttributeError, so that hasattr() is False and getattr() takes its default"""
        hint = f"; engine.settings has what is in effect, and {_GUIDE}" if not name.startswith("__") else ""
        raise AttributeError(f"{self._of}.{name} is not here{hint}", name=name)


class DeepSpeedConfig(_View):
    """The whole; `engine.settings` is the typed one."""

    def __init__(self, config: Config) -> None:
        vars(self)["_settings"] = config

    def __getattr__(self, name: str) -> Any:
        if name not in _FIELDS:
            self._refuse(name)
        return _FIELDS[name](vars(self)["_settings"])

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_FIELDS})

    def print_user_config(self) -> None:
        """Print the ds_config as it was given."""
        print(self._param_dict, flush=True)


class SectionView(_View):
    """A section, by the keys of the ds_config; a section of its own that is off,
    such as `offload_param`, is None.
    """

    _of = "a section of engine._config"

    def __init__(self, section: Section) -> None:
        fields = type(section).model_fields
        vars(self)["_section"] = section
        vars(self)["_names"] = {field.alias or name: name for name, field in fields.items()}

    def __getattr__(self, name: str) -> Any:
        names: Mapping[str, str] = vars(self).get("_names", {})
        if name not in names:
            self._refuse(name)
        value = getattr(vars(self)["_section"], names[name])
        return view_of(value) if isinstance(value, Section) else value

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *vars(self)["_names"]})

    def model_dump(self, **options: Any) -> dict[str, Any]:
        """Return the section as a dict, as pydantic's models do."""
        dumped: dict[str, Any] = vars(self)["_section"].model_dump(by_alias=True, **options)
        return dumped


def view_of(section: Section | None) -> SectionView | None:
    is_off = section is None or getattr(section, "is_on", True) is False
    return None if section is None or is_off else SectionView(section)
