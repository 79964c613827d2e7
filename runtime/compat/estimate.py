"""Memory that parameters, gradients and optimizer states of a model would take, by DeepSpeed's arithmetic.

That is Adam in mixed precision, with DeepSpeed's flat float32 gradients: 2 bytes a parameter in 16 bits, and
18 more for its gradients (2 + 4), its master (4) and two moments (8). Activations and buffers are in none of
it; `additional_buffer_factor` is a surcharge on host memory. Numbers are DeepSpeed's, so that its plans can
be compared; what an engine of ours takes is measured in docs/train/zero.md and docs/train/offload.md.
Units:  bytes; GiB where they are printed
Source: DeepSpeed 0.19.8 runtime/zero/stage_1_and_2.py and stage3.py, functions of the same names
"""

from __future__ import annotations

from torch import nn

from ..strided import is_strided

_HALF = 2  # bytes of a parameter in 16 bits
_REST = 18  # bytes of its gradients and states, see above
_GIB = 2**30


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """Return the bytes of host memory a node and of GPU memory a GPU would need at stage 2."""
    num_gpus = num_gpus_per_node * num_nodes
    if cpu_offload:
        host, gpu = total_params * max(16, 4 * num_gpus), _HALF * total_params
    else:
        host = total_params * 4 * num_gpus_per_node
        gpu = _HALF * total_params + int(_REST * total_params / num_gpus)
    return int(host * additional_buffer_factor), int(gpu)


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
    num_gpus = num_gpus_per_node * num_nodes
    largest_layer = 4 * largest_layer_params
    each_makes_it = 4 * num_gpus_per_node
    if not cpu_offload:
        num_params = largest_layer_params if zero_init else total_params
        host: float = num_params * each_makes_it
        gpu = largest_layer + int(_REST * total_params / num_gpus)
    else:
        kept = (_REST if cpu_offload_params else _REST - _HALF) / num_nodes
        host = total_params * (kept if zero_init else max(each_makes_it, kept))
        gpu = largest_layer + (0 if cpu_offload_params else int(_HALF * total_params / num_gpus))
    return int(host * additional_buffer_factor), int(gpu), largest_layer


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
        "parameters, gradients and states of Adam in mixed precision, by DeepSpeed's arithmetic\n"
        "  a node's host |      a GPU | options"
    )


def _row(host: int, gpu: int, options: str) -> str:
    return f" {host / _GIB:11.2f}GiB | {gpu / _GIB:7.2f}GiB | {options}"


def _device(is_offloaded: bool) -> str:
    return "cpu " if is_offloaded else "none"


def _millions(numel: int) -> str:
    return f"{int(numel / 1e6)}M"
