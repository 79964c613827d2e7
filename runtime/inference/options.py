"""Options of an engine for inference, and the ds_config that says them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import ConfigError

_SECTIONS = {torch.float16: "fp16", torch.bfloat16: "bf16"}
_PLACES = ("cpu", "nvme")


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceOptions:
    """Options of one engine for inference.

    Units: `max_tokens` and `min_tokens` count a prompt and its answer
    """

    dtype: torch.dtype | None = None  # None keeps each parameter's own
    tp_size: int = 1
    tp_group: Any = None  # a process group of the ranks that divide layers, to be compared with the axis tp
    mpu: object | None = None
    layer_rules: tuple[Mapping[str, Any], ...] = ()  # tensor_parallel.partition_config.layer_specs
    offload: str | None = None  # "cpu" or "nvme": weights stream from there
    nvme_path: str | None = None
    zero: Mapping[str, Any] = field(default_factory=dict)  # zero_optimization of a ds_config
    checkpoint: str | None = None
    save_path: str | None = None
    max_tokens: int | None = None  # the longest prompt
    min_tokens: int = 1
    kernels: bool = False  # attention by torch's fused kernels
    graphs: bool = False  # CUDA graphs
    compiles: bool = False
    notes: tuple[str, ...] = ()  # options without effect, in words
    is_lenient: bool = False

    def ds_config(self) -> dict[str, Any]:
        """Return the ds_config of the engine.

        Errors: ConfigError for a place of weights that is none, and for two places
        """
        config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1}
        zero = self._zero()
        if zero:
            config["zero_optimization"] = zero
        if self.dtype in _SECTIONS:
            config[_SECTIONS[self.dtype]] = {"enabled": True}
        if self.tp_size > 1:
            config["tensor_parallel"] = {"autotp_size": self.tp_size}
            if self.layer_rules:
                config["tensor_parallel"]["partition_config"] = {"layer_specs": list(self.layer_rules)}
        return config

    def _zero(self) -> dict[str, Any]:
        if self.offload is None:
            if self.nvme_path is not None:
                raise ConfigError(
                    f'init_inference(nvme_path={self.nvme_path!r}) without offload="nvme" has no effect; '
                    "give both, or leave it out"
                )
            return dict(self.zero)
        if self.offload not in _PLACES:
            raise ConfigError(
                f'init_inference(offload={self.offload!r}): must be "cpu" (weights stream from host memory), '
                '"nvme" (from a local disk), or left out (weights stay on the device)'
            )
        if self.offload == "nvme" and self.nvme_path is None:
            raise ConfigError(
                'init_inference(offload="nvme") needs the folder of a local disk for the weights; give '
                'nvme_path="/local_nvme"'
            )
        if self.offload == "cpu" and self.nvme_path is not None:
            raise ConfigError(
                f'init_inference(offload="cpu", nvme_path={self.nvme_path!r}): a path is for weights on a '
                'disk; give offload="nvme", or leave the path out'
            )
        if self.zero:
            raise ConfigError(
                f"init_inference(offload={self.offload!r}) and its zero section both say where weights are; "
                "give one of the two"
            )
        place = {"device": self.offload}
        if self.nvme_path is not None:
            place["nvme_path"] = self.nvme_path
        return {"stage": 3, "offload_param": place}
