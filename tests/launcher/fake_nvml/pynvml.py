"""A stand-in for pynvml: it answers from a record of NVML's answers, which the variable FAKE_NVML names.

A record has an answer for each function, `every_gpu` for all GPUs and `gpu` by number for what is different
there. An answer `{"error": N}` is raised as NVMLError.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

NVML_ERROR_INVALID_ARGUMENT, NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_NO_PERMISSION = 2, 3, 4
NVML_ERROR_LIBRARY_NOT_FOUND = 12
NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
NVML_VOLATILE_ECC = 0
NVML_TEMPERATURE_GPU = 0
NVML_NVLINK_MAX_LINKS = 18
_TEXTS = {
    NVML_ERROR_INVALID_ARGUMENT: "Invalid Argument",
    NVML_ERROR_NOT_SUPPORTED: "Not Supported",
    NVML_ERROR_NO_PERMISSION: "Insufficient Permissions",
    NVML_ERROR_LIBRARY_NOT_FOUND: "NVML Shared Library Not Found",
    15: "GPU is lost",
    18: "Driver/library version mismatch",
}
_RECORD: dict[str, Any] = json.loads(Path(os.environ["FAKE_NVML"]).read_text())


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(_TEXTS[value])
        self.value = value


def _told(answer: Any) -> Any:
    if isinstance(answer, dict) and "error" in answer:
        raise NVMLError(answer["error"])
    return answer


def _of_gpu(function: str, gpu: int) -> Any:
    return _told({**_RECORD["every_gpu"], **_RECORD.get("gpu", {}).get(str(gpu), {})}[function])


def nvmlInit() -> None:
    _told(_RECORD.get("nvmlInit"))


def nvmlShutdown() -> None:
    pass


def nvmlSystemGetCudaDriverVersion_v2() -> Any:
    return _told(_RECORD["nvmlSystemGetCudaDriverVersion_v2"])


def nvmlDeviceGetCount() -> Any:
    return _told(_RECORD["nvmlDeviceGetCount"])


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    _of_gpu("nvmlDeviceGetHandleByIndex", index)
    return index


def nvmlDeviceGetName(gpu: int) -> Any:
    return _of_gpu("nvmlDeviceGetName", gpu)


def nvmlDeviceGetMemoryInfo(gpu: int) -> Any:
    return SimpleNamespace(**_of_gpu("nvmlDeviceGetMemoryInfo", gpu))


def nvmlDeviceGetUtilizationRates(gpu: int) -> Any:
    return SimpleNamespace(**_of_gpu("nvmlDeviceGetUtilizationRates", gpu))


def nvmlDeviceGetPowerUsage(gpu: int) -> Any:
    return _of_gpu("nvmlDeviceGetPowerUsage", gpu)


def nvmlDeviceGetTemperature(gpu: int, sensor: int) -> Any:
    assert sensor == NVML_TEMPERATURE_GPU
    return _of_gpu("nvmlDeviceGetTemperature", gpu)


def nvmlDeviceGetTotalEccErrors(gpu: int, error_type: int, counter_type: int) -> Any:
    assert (error_type, counter_type) == (NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC)
    return _of_gpu("nvmlDeviceGetTotalEccErrors", gpu)


def nvmlDeviceGetCurrentClocksThrottleReasons(gpu: int) -> Any:
    return _of_gpu("nvmlDeviceGetCurrentClocksThrottleReasons", gpu)


def nvmlDeviceGetCurrPcieLinkGeneration(gpu: int) -> Any:
    return _of_gpu("nvmlDeviceGetCurrPcieLinkGeneration", gpu)


def nvmlDeviceGetMaxPcieLinkGeneration(gpu: int) -> Any:
    return _of_gpu("nvmlDeviceGetMaxPcieLinkGeneration", gpu)


def nvmlDeviceGetCurrPcieLinkWidth(gpu: int) -> Any:
    return _of_gpu("nvmlDeviceGetCurrPcieLinkWidth", gpu)


def nvmlDeviceGetMaxPcieLinkWidth(gpu: int) -> Any:
    return _of_gpu("nvmlDeviceGetMaxPcieLinkWidth", gpu)


def nvmlDeviceGetNvLinkState(gpu: int, link: int) -> Any:
    states = _of_gpu("nvmlDeviceGetNvLinkState", gpu)
    if link >= len(states):
        raise NVMLError(NVML_ERROR_INVALID_ARGUMENT)
    return states[link]
