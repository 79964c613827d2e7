"""Layers that a program divides over ranks itself, as Megatron's do.

Source: Megatron-LM core/tensor_parallel/layers.py, fairscale nn/model_parallel/layers.py, DeepSpeed 0.19.8
        runtime/utils.py, `is_model_parallel_parameter`
"""

from __future__ import annotations

from torch import nn

from ..errors import ConfigError

_PARTS = {  # a layer's attribute for its part, and possible attributes for the whole
    "output_size_per_partition": ("output_size", "out_features"),
    "input_size_per_partition": ("input_size", "in_features"),
    "num_embeddings_per_partition": ("num_embeddings",),
    "embedding_dim_per_partition": ("embedding_dim",),
}
_MARKS = ("tensor_model_parallel", "model_parallel")


def check_whole(model: nn.Module, *, tp: int) -> None:
    """Check that the program has not divided the model's layers; `tp`: over how many ranks its mpu says so.

    Megatron marks its parameters in a job of one model-parallel rank too: a mark counts beside an mpu only.

    Errors: ConfigError that names the first such layer or parameter
    """
    said = _divided_layer(model) or (_marked_parameter(model, tp) if tp > 1 else "")
    if said:
        raise ConfigError(
            f"{said}: the program divides its layers itself, as Megatron does, and dslaunch divides models "
            "that are given whole. Build the model of layers that are not divided, e.g. nn.Linear, and let "
            'the ds_config divide it: "tensor_parallel": {"autotp_size": ...}, with partition_config where '
            "the model has no plan of its own; or build it for one model-parallel rank"
        )


def _divided_layer(model: nn.Module) -> str:
    for name, layer in model.named_modules():
        for part, wholes in _PARTS.items():
            held = getattr(layer, part, None)
            whole = next((value for key in wholes if (value := getattr(layer, key, None)) is not None), None)
            if isinstance(held, int) and isinstance(whole, int) and 0 < held < whole:
                return f"layer '{name}' ({type(layer).__name__}) has {part} {held} of {whole}"
    return ""


def _marked_parameter(model: nn.Module, tp: int) -> str:
    for name, param in model.named_parameters():
        for mark in _MARKS:
            if getattr(param, mark, False) is True:
                return f"parameter '{name}' has {mark}=True, and the mpu divides layers over {tp} ranks"
    return ""
