"""NVML's facts about a host's NVIDIA GPUs, as one line of JSON: a program of its own.

`dslaunch check` sends the text of this file to every host, and the Python that jobs have there runs it: it
may have pynvml (the package nvidia-ml-py), which the agent's Python need not have. Standard library and
pynvml only.
"""

from __future__ import annotations

import json
from functools import partial
from importlib import import_module

TYPE_CHECKING = False  # defined here and not imported: any Python that a host has must run this
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

NO_MODULE = "no pynvml"
NO_LIBRARY = "no NVML library"
UNTOLD = -1  # a number that this GPU, or its driver, does not give


def ask_nvml(nvml: Any) -> dict[str, Any]:
    """Return the driver's CUDA version (12040 for 12.4) and all GPUs that may be used, or why NVML does not
    start.
    """
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        is_missing = error.value == nvml.NVML_ERROR_LIBRARY_NOT_FOUND
        return no_answer(NO_LIBRARY if is_missing else str(error))
    try:
        number = told(nvml, nvml.nvmlDeviceGetCount)
        gpus = [ask_gpu(nvml, index) for index in range(number)]
        return {
            "problem": "",
            "cuda": told(nvml, nvml.nvmlSystemGetCudaDriverVersion_v2),
            "gpus": [gpu for gpu in gpus if gpu],
        }
    finally:
        nvml.nvmlShutdown()


def no_answer(problem: str) -> dict[str, Any]:
    return {"problem": problem, "cuda": UNTOLD, "gpus": []}


def ask_gpu(nvml: Any, index: int) -> dict[str, Any]:
    """Return the facts about one GPU, by nvidia-smi's number; empty if we may not use the GPU."""
    problem, name, gpu = "", "", None
    try:
        gpu = nvml.nvmlDeviceGetHandleByIndex(index)
        name = nvml.nvmlDeviceGetName(gpu)
    except nvml.NVMLError as error:
        if error.value == nvml.NVML_ERROR_NO_PERMISSION:
            return {}
        problem = str(error)

    def number(ask: Callable[[], Any]) -> int:
        return UNTOLD if problem else told(nvml, ask)

    links = [] if problem else nvlinks(nvml, gpu)
    return {
        "index": index,
        "problem": problem,
        # Old versions of pynvml return bytes
        "name": name if isinstance(name, str) else name.decode("utf-8", "replace"),
        "memory_bytes": number(lambda: nvml.nvmlDeviceGetMemoryInfo(gpu).total),
        "ecc_errors": number(
            lambda: nvml.nvmlDeviceGetTotalEccErrors(
                gpu, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            )
        ),
        "throttling": number(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)),
        "pcie_generation": number(lambda: nvml.nvmlDeviceGetCurrPcieLinkGeneration(gpu)),
        "max_pcie_generation": number(lambda: nvml.nvmlDeviceGetMaxPcieLinkGeneration(gpu)),
        "pcie_width": number(lambda: nvml.nvmlDeviceGetCurrPcieLinkWidth(gpu)),
        "max_pcie_width": number(lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(gpu)),
        "num_nvlinks": len(links),
        "num_nvlinks_up": sum(links),
    }


def told(nvml: Any, ask: Callable[[], Any]) -> int:
    try:
        return int(ask())
    except nvml.NVMLError:
        return UNTOLD


def nvlinks(nvml: Any, gpu: Any) -> list[int]:
    """Return for each NVLink of the GPU: 1 if it is up, 0 if not. The list ends where NVML knows no more."""
    asks = [partial(nvml.nvmlDeviceGetNvLinkState, gpu, link) for link in range(nvml.NVML_NVLINK_MAX_LINKS)]
    states = [told(nvml, ask) for ask in asks]
    return [state for state in states if state != UNTOLD]


def main() -> None:
    try:
        answer = ask_nvml(import_module("pynvml"))
    except ImportError:
        answer = no_answer(NO_MODULE)
    print("\ndslaunch facts: " + json.dumps(answer))


if __name__ == "__main__":
    main()
