"""The config of `init_inference()`, with DeepSpeed's keys, aliases and defaults.

Source: DeepSpeed 0.19.8 inference/config.py
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from enum import Enum
from typing import Any, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_serializer, field_validator

from ...errors import ConfigError

OLD_NAMES = {  # DeepSpeed's old keys, and ours for short, and where their values belong
    "tp_size": ("tensor_parallel", "tp_size"),
    "mp_size": ("tensor_parallel", "tp_size"),
    "mpu": ("tensor_parallel", "mpu"),
    "ep_size": ("moe", "ep_size"),
    "ep_group": ("moe", "ep_group"),
    "ep_mp_group": ("moe", "ep_mp_group"),
    "moe_experts": ("moe", "moe_experts"),
    "moe_type": ("moe", "type"),
}


class DtypeEnum(Enum):
    """Dtypes by the names that programs use for them."""

    fp16 = (torch.float16, "torch.float16", "fp16", "float16", "half")
    fp32 = (torch.float32, "torch.float32", "fp32", "float32", "float")
    bf16 = (torch.bfloat16, "torch.bfloat16", "bf16", "bfloat16", "bfloat")
    int8 = (torch.int8, "torch.int8", "int8")

    @classmethod
    def from_str(cls, value: str) -> DtypeEnum:
        """Return the dtype of this name.

        Errors: ValueError for other names
        """
        for dtype in cls:
            if value in dtype.value:
                return dtype
        raise ValueError(f"{value!r} is none of torch.float32, torch.float16, torch.bfloat16")


class MoETypeEnum(str, Enum):
    """Kinds of layers with experts in DeepSpeed."""

    residual = "residual"
    standard = "standard"


class InferenceSection(BaseModel):
    """A part of the config; other keys are refused."""

    model_config = ConfigDict(
        validate_default=True,
        validate_assignment=True,
        use_enum_values=True,
        populate_by_name=True,
        extra="forbid",
        arbitrary_types_allowed=True,
    )


class DeepSpeedTPConfig(InferenceSection):
    """Over how many ranks layers are divided."""

    enabled: bool = True
    tp_size: int = Field(1, ge=1)
    tp_grain_size: int = 64
    mpu: object = None
    tp_group: object = None
    partition_config: dict[str, Any] | None = None  # ours: rules for a model without a plan of its own


class DeepSpeedMoEConfig(InferenceSection):
    """Experts on different ranks."""

    enabled: bool = True
    ep_size: int = 1
    moe_experts: list[Any] = Field([1], alias="num_experts")
    type: MoETypeEnum = MoETypeEnum.standard
    ep_mp_group: object = None
    ep_group: object = Field(None, alias="expert_group")


class InferenceCheckpointConfig(InferenceSection):
    """Where weights are read from and written to."""

    checkpoint_dir: str | None = None
    save_mp_checkpoint_path: str | None = None
    base_dir: str | None = None


_Section = TypeVar("_Section", bound=InferenceSection)


def _default(section: type[_Section]) -> _Section:
    return section.model_validate({})


class DeepSpeedInferenceConfig(InferenceSection):
    """The whole config. `offload` and `nvme_path` are dslaunch's own."""

    replace_with_kernel_inject: bool = Field(False, alias="kernel_inject")
    dtype: torch.dtype = torch.float16
    tensor_parallel: DeepSpeedTPConfig = Field(
        default_factory=lambda: _default(DeepSpeedTPConfig), alias="tp"
    )
    enable_cuda_graph: bool = False
    use_triton: bool = False
    triton_autotune: bool = False
    zero: dict[str, Any] = Field(default_factory=dict)
    triangular_masking: bool = Field(True, alias="tm")
    moe: DeepSpeedMoEConfig = Field(default_factory=lambda: _default(DeepSpeedMoEConfig))
    keep_module_on_host: bool = False
    quant: dict[str, Any] = Field(default_factory=dict)
    checkpoint: str | dict[str, Any] | None = None
    base_dir: str = ""
    set_empty_params: bool = False
    save_mp_checkpoint_path: str | None = None
    checkpoint_config: InferenceCheckpointConfig = Field(
        default_factory=InferenceCheckpointConfig, alias="ckpt_config"
    )
    return_tuple: bool = True
    training_mp_size: int = 1
    replace_method: str = "auto"
    injection_policy: dict[Any, Any] | None = Field(None, alias="injection_dict")
    injection_policy_tuple: tuple[Any, ...] | None = None
    config: dict[str, Any] | None = Field(None, alias="args")
    max_out_tokens: int = Field(1024, alias="max_tokens", gt=0)
    min_out_tokens: int = Field(1, alias="min_tokens")
    transposed_mode: bool = False
    offload: str | None = None
    nvme_path: str | None = None

    @field_validator("dtype", mode="before")
    @classmethod
    def _read_dtype(cls, value: Any) -> torch.dtype:
        if isinstance(value, str):
            dtype: torch.dtype = DtypeEnum.from_str(value).value[0]
            return dtype
        if isinstance(value, torch.dtype):
            return value
        raise ValueError(f"is {type(value).__name__}, and must be a torch.dtype or its name")

    @field_validator("moe", mode="before")
    @classmethod
    def _read_moe(cls, value: Any) -> Any:
        return {"enabled": value} if isinstance(value, bool) else value

    @field_serializer("dtype")
    def _write_dtype(self, dtype: torch.dtype) -> str:
        return str(dtype)

    def __init__(self, strict: bool = False, **given: Any) -> None:
        """Read the keys; of those that say "auto", keep the default unless `strict`.

        Errors: ConfigError with a line for each fault
        """
        values = {
            key: value for key, value in given.items() if strict or value != "auto" or key == "replace_method"
        }
        try:
            super().__init__(**_without_old_names(values))
        except ValidationError as error:
            raise ConfigError("\n".join(_lines(error))) from None


def _without_old_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys with those of old names in their sections."""
    values = dict(given)
    if "tp" in values:
        values.setdefault("tensor_parallel", values.pop("tp"))
    for old, (section, key) in OLD_NAMES.items():
        if old not in values:
            continue
        value = values.pop(old)
        inner = values.setdefault(section, {})
        if isinstance(inner, BaseModel):
            inner = {name: getattr(inner, name) for name in inner.model_fields_set}
        if not isinstance(inner, Mapping):
            continue  # a fault, which the check of the section names
        if key in inner and inner[key] != value:
            raise ConfigError(
                f"init_inference({old}={value!r}) contradicts {section}.{key} {inner[key]!r}, another name "
                f"of the same; give {section}.{key}"
            )
        values[section] = {**inner, key: value}
    return values


def _lines(error: ValidationError) -> list[str]:
    known = sorted(_known_keys())
    lines = []
    for fault in error.errors(include_url=False):
        key = ".".join(map(str, fault["loc"]))
        if fault["type"] == "extra_forbidden":
            near = difflib.get_close_matches(str(fault["loc"][-1]), known, n=3, cutoff=0.6)
            lines.append(
                f"init_inference(): no key {key}; "
                + (f"is it {' or '.join(near)}?" if near else f"there are {', '.join(known)}")
            )
        else:
            why = fault.get("ctx", {}).get("error", fault["msg"])
            lines.append(f"init_inference({key}={fault['input']!r}): {why}")
    return lines


def _known_keys() -> set[str]:
    keys = set(OLD_NAMES)
    for model in (
        DeepSpeedInferenceConfig,
        DeepSpeedTPConfig,
        DeepSpeedMoEConfig,
        InferenceCheckpointConfig,
    ):
        keys |= set(model.model_fields)
        keys |= {one.alias for one in model.model_fields.values() if one.alias is not None}
    return keys
