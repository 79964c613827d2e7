"""What DeepSpeed measures with, that programs call by themselves."""

from __future__ import annotations

from .table import MEASURING, Module, mapped, refused, works

_PROFILER = (
    mapped(
        "dslaunch.runtime.profiling.flops_profiler",
        "FlopsProfiler get_model_profile",
        "FLOPs are those of matrix products, convolutions and attention, without estimates for what works element by element",
    ),
    works(
        "dslaunch.runtime.profiling.amounts",
        "number_to_string flops_to_string macs_to_string params_to_string bytes_to_string duration_to_string",
    ),
    refused(
        MEASURING,
        "get_module_flops get_module_macs get_module_duration wrapFunc MODULE_HOOK_MAPPING module_flop_count module_mac_count "
        "old_functions DEFAULT_PRECISION",
        "is how DeepSpeed's profiler keeps its counts; print_model_profile() shows them by module",
    ),
)

MEASURED: tuple[Module, ...] = (
    Module("deepspeed.profiling"),
    Module("deepspeed.profiling.flops_profiler", _PROFILER),
    Module("deepspeed.profiling.flops_profiler.profiler", _PROFILER),
)
