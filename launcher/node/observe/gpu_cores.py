"""CPU cores near each NVIDIA GPU, as the kernel and the driver know them."""

from __future__ import annotations

import os

from ..system.kernel_file import read_text
from .core_binding import parse_ranges

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NamedTuple
else:
    from ...wire.fast_tuple import Record as NamedTuple


class _Gpu(NamedTuple):
    """One GPU that processes here may use."""

    bus_id: str
    uuid: str
    model: str


def cores_near(
    devices: list[str], *, is_by_bus: bool, proc: str = "/proc", sys: str = "/sys", dev: str = "/dev"
) -> list[set[int]]:
    """Return the CPUs near each of these devices, which are named as in CUDA_VISIBLE_DEVICES: by number or
    UUID.

    CUDA counts GPUs of one model in the order of the bus. It puts the fastest of several models first, unless
    `is_by_bus`, that is with CUDA_DEVICE_ORDER=PCI_BUS_ID.
    Errors: LookupError with the reason why the place of a GPU is unknown
    """
    gpus = _read_gpus(proc, dev)
    if not gpus:
        raise LookupError(f"{proc}/driver/nvidia/gpus names no GPU")
    if len({gpu.model for gpu in gpus}) > 1 and not is_by_bus and any(one.isdigit() for one in devices):
        raise LookupError("the GPUs are of several models; set CUDA_DEVICE_ORDER=PCI_BUS_ID")
    near = []
    for device in devices:
        gpu = _named(device, gpus)
        path = os.path.join(sys, "bus", "pci", "devices", gpu.bus_id, "local_cpulist")
        near.append(set(parse_ranges(read_text(path))))
        if not near[-1]:
            raise LookupError(f"{path} names no core")
    return near


def _named(device: str, gpus: list[_Gpu]) -> _Gpu:
    if device.isdigit():
        found = gpus[int(device) : int(device) + 1]
    else:  # the beginning of a UUID is enough
        found = [gpu for gpu in gpus if device.startswith("GPU-") and gpu.uuid.startswith(device)]
    if len(found) != 1:
        raise LookupError(f"the driver names {len(gpus)} GPUs, and not {device}")
    return found[0]


def _read_gpus(proc: str, dev: str) -> list[_Gpu]:
    """List the GPUs in the order of the bus. A container may see all in /proc, but has device files for its
    own only.
    """
    folder = os.path.join(proc, "driver", "nvidia", "gpus")
    gpus = []
    for bus_id in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
        lines = read_text(os.path.join(folder, bus_id, "information")).splitlines()
        said = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if os.path.exists(os.path.join(dev, "nvidia" + said.get("Device Minor", "?"))):
            gpus.append(_Gpu(bus_id.lower(), said.get("GPU UUID", ""), said.get("Model", "")))
    return gpus
