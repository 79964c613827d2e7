"""Memory of the parameters, gradients and optimizer states of a model, by DeepSpeed's names.

Names, arguments, results and printed columns are DeepSpeed's, and the arithmetic is that of `dslaunch plan`
(shared/zero_bytes.py), for Adam in mixed precision with float32 masters and states: no ds_config is given, so
none can say fewer bits. Activations and buffers are in none of it, and `additional_buffer_factor` is a
surcharge on host memory. `dslaunch plan` counts all of it, as the ds_config says.
Units:  bytes; GiB where they are printed
Source: DeepSpeed 0.19.8 runtime/zero/stage_1_and_2.py and stage3.py, functions of the same names. Its numbers
        of stage 2 differ: it counts 2 bytes more of each gradient on the device, and the states of all ranks
        on every host
"""

from __future__ import annotations

from torch import nn

from ...shared.zero_bytes import adam_bytes, held_bytes
from ..strided import is_strided

_HALF = 2  # bytes of a parameter in 16 bits
_MADE = 4  # bytes of one in the model that a rank makes in host memory
_GIB = 2**30


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """Return the bytes of host memory a node and of GPU memory a GPU would need at stage 2."""
    held = held_bytes(
        total_params,
        each=adam_bytes(_HALF),
        stage=2,
        num_ranks=num_gpus_per_node * num_nodes,
        has_optimizer_on_host=cpu_offload,
    )
    host = num_gpus_per_node * max(_MADE * total_params, held.on_host)
    return int(host * additional_buffer_factor), int(held.on_device)


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print what a model would need at stage 2, with and without offload."""
    total, _ = count_params(model)
    estimate_zero2_model_states_mem_needs_all_cold(
        total, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print what a model of so many parameters would need at stage 2, with and without offload."""
    print(_title(2, num_gpus_per_node, num_nodes, f"{_millions(total_params)} parameters"))
    for cpu_offload in (True, False):
        host, gpu = estimate_zero2_model_states_mem_needs(
            total_params, num_gpus_per_node, num_nodes, cpu_offload, additional_buffer_factor
        )
        print(_row(host, gpu, f"offload_optimizer={_device(cpu_offload)}"))


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """Return the bytes of host memory a node and of GPU memory a GPU would need at stage 3,
    and those of the largest layer.

    Without `zero_init` every rank makes the whole model in host memory first. `cpu_offload_params` counts
    with `cpu_offload` only.
    """
    held = held_bytes(
        total_params,
        each=adam_bytes(_HALF),
        stage=3,
        num_ranks=num_gpus_per_node * num_nodes,
        has_optimizer_on_host=cpu_offload,
        has_parameters_on_host=cpu_offload and cpu_offload_params,
    )
    largest_layer = 2 * _HALF * largest_layer_params  # its parameters and gradients, whole
    made = _MADE * total_params
    if zero_init:
        made = 0 if cpu_offload else _MADE * largest_layer_params
    host = num_gpus_per_node * max(made, held.on_host)
    return int(host * additional_buffer_factor), largest_layer + int(held.on_device), largest_layer


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print what a model would need at stage 3, for each way of offloading."""
    total, largest = count_params(model)
    estimate_zero3_model_states_mem_needs_all_cold(
        total, largest, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print what a model of so many parameters would need at stage 3, for each way of offloading."""
    model = f"{_millions(total_params)} parameters, {_millions(largest_layer_params)} in the largest layer"
    print(_title(3, num_gpus_per_node, num_nodes, model))
    for cpu_offload, cpu_offload_params in ((True, True), (True, False), (False, False)):
        for zero_init in (True, False):
            host, gpu, _ = estimate_zero3_model_states_mem_needs(
                total_params,
                largest_layer_params,
                num_gpus_per_node,
                num_nodes,
                cpu_offload,
                cpu_offload_params,
                zero_init,
                additional_buffer_factor,
            )
            where = f"offload_param={_device(cpu_offload_params)}, offload_optimizer={_device(cpu_offload)}"
            print(_row(host, gpu, f"{where}, zero_init={int(zero_init)}"))


def count_params(model: nn.Module) -> tuple[int, int]:
    """Return the elements of all parameters, of tied ones once, and those of the largest module
    without its children.
    """
    total, seen = 0, set()
    for param in model.parameters():  # each object once
        place = param.data_ptr() if is_strided(param) else 0
        if place == 0 or place not in seen:  # 0: it has no memory of its own, so it shares none
            total += param.numel()
        seen.add(place)
    largest = max(
        (sum(param.numel() for param in module.parameters(recurse=False)) for module in model.modules()),
        default=0,
    )
    return total, largest


def _title(stage: int, num_gpus_per_node: int, num_nodes: int, model: str) -> str:
    return (
        f"ZeRO stage {stage}, {num_nodes} node(s) with {num_gpus_per_node} GPU(s) each, {model}:\n"
        "16-bit parameters and gradients, masters and states of Adam in float32, without activations;\n"
        "no ds_config is read here: `dslaunch plan` counts masters and states of fewer bits, too\n"
        "  a node's host |      a GPU | options"
    )


def _row(host: int, gpu: int, options: str) -> str:
    return f" {host / _GIB:11.2f}GiB | {gpu / _GIB:7.2f}GiB | {options}"


def _device(is_offloaded: bool) -> str:
    return "cpu " if is_offloaded else "none"


def _millions(numel: int) -> str:
    return f"{int(numel / 1e6)}M"
