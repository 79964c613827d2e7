from __future__ import annotations

import re
from pathlib import Path

import pytest

from dslaunch.launcher.node.observe.gpu_cores import cores_near

INFORMATION = """\
Model: \t\t NVIDIA {model}
IRQ:   \t\t 234
GPU UUID: \t GPU-{uuid}
Bus Type: \t PCIe
Bus Location: \t {bus_id}
Device Minor: \t {minor}
GPU Excluded:\t No
"""


class Machine:
    """Folders as /proc, /sys and /dev of a machine with GPUs."""

    def __init__(self, root: Path) -> None:
        self._root = root
        (root / "dev").mkdir()

    def add(self, bus_id: str, minor: int, cores: str, *, model: str = "H100", is_ours: bool = True) -> None:
        told = self._root / "proc" / "driver" / "nvidia" / "gpus" / bus_id
        told.mkdir(parents=True)
        uuid = f"{minor}0000000-aaaa"
        (told / "information").write_text(
            INFORMATION.format(model=model, uuid=uuid, bus_id=bus_id, minor=minor)
        )
        device = self._root / "sys" / "bus" / "pci" / "devices" / bus_id
        device.mkdir(parents=True)
        (device / "local_cpulist").write_text(cores + "\n")
        if is_ours:
            (self._root / "dev" / f"nvidia{minor}").touch()

    def near(self, *devices: str, is_by_bus: bool = False) -> list[set[int]]:
        roots = {name: str(self._root / name) for name in ("proc", "sys", "dev")}
        return cores_near(list(devices), is_by_bus=is_by_bus, **roots)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Four GPUs on two sockets; the driver has counted them in another order than the bus has them."""
    machine = Machine(tmp_path)
    for bus_id, minor, cores in (
        ("0000:9b:00.0", 0, "4-7"),
        ("0000:18:00.0", 1, "0-3"),
        ("0000:2a:00.0", 2, "0-3"),
        ("0000:ab:00.0", 3, "4-7"),
    ):
        machine.add(bus_id, minor, cores)
    return machine


FIRST, SECOND = {0, 1, 2, 3}, {4, 5, 6, 7}


def test_gpus_are_counted_in_the_order_of_the_bus_or_named_by_uuid(machine: Machine) -> None:
    assert machine.near("0", "1", "2", "3") == [FIRST, FIRST, SECOND, SECOND]
    assert machine.near("3", "0") == [SECOND, FIRST]
    assert machine.near("GPU-0", "GPU-10000000-aaaa") == [SECOND, FIRST]


def test_a_gpu_without_a_device_file_here_is_another_container_s(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.add("0000:18:00.0", 0, "0-3", is_ours=False)
    machine.add("0000:9b:00.0", 1, "4-7")
    assert machine.near("0") == [SECOND]


def test_gpus_of_several_models_are_counted_by_the_bus_only_if_cuda_does(machine: Machine) -> None:
    machine.add("0000:01:00.0", 4, "4-7", model="T4")
    with pytest.raises(LookupError, match="several models; set CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        machine.near("0")
    assert machine.near("0", "1", is_by_bus=True) == [SECOND, FIRST]
    assert machine.near("GPU-1") == [FIRST]


@pytest.mark.parametrize(
    ("device", "why"),
    [
        ("4", "the driver names 4 GPUs, and not 4"),
        ("MIG-1", "the driver names 4 GPUs, and not MIG-1"),
        ("GPU-", "the driver names 4 GPUs, and not GPU-"),
    ],
)
def test_a_device_that_the_driver_does_not_name(device: str, why: str, machine: Machine) -> None:
    with pytest.raises(LookupError, match=re.escape(why)):
        machine.near(device)


def test_a_machine_that_says_nothing(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    with pytest.raises(LookupError, match="proc/driver/nvidia/gpus names no GPU"):
        machine.near("0")
    machine.add("0000:18:00.0", 0, "")
    with pytest.raises(LookupError, match="local_cpulist names no core"):
        machine.near("0")
