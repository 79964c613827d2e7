from __future__ import annotations

from pathlib import Path

import pytest

from dslaunch.launcher.node.observe.devices import count_accelerators, count_hidden


def machine(
    root: Path, *, dev: tuple[str, ...] = (), gpu_ids: tuple[str, ...] | None = None
) -> tuple[str, str]:
    """Device files, and one AMD topology node for each gpu_id (a CPU is a node with gpu_id 0)."""
    (root / "dev").mkdir()
    for name in dev:
        (root / "dev" / name).touch()
    for place, gpu_id in enumerate(gpu_ids or ()):
        node = root / "sys" / "class" / "kfd" / "kfd" / "topology" / "nodes" / str(place)
        node.mkdir(parents=True)
        (node / "gpu_id").write_text(gpu_id)
    return str(root / "dev"), str(root / "sys")


@pytest.mark.parametrize(
    ("dev", "gpu_ids", "number"),
    [
        ((), None, 0),
        (("null", "zero", "sda1"), None, 0),
        (("nvidia0",), None, 1),
        (("nvidia0", "nvidia1", "nvidia2", "nvidia10"), None, 4),
        # A driver without a GPU, and the files beside the GPUs'.
        (
            ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset", "nvidia-caps", "nvidia0-x"),
            None,
            0,
        ),
        (("nvidiactl", "nvidia-uvm", "nvidia3"), None, 1),
        ((), ("0\n",), 0),
        ((), ("0\n", "12345\n", "54321\n"), 2),
        ((), ("", "0", "7"), 1),
        (("nvidia0",), ("0\n", "12345\n", "1\n"), 1),
    ],
)
def test_gpus_are_counted_from_the_kernel_s_files(
    dev: tuple[str, ...], gpu_ids: tuple[str, ...] | None, number: int, tmp_path: Path
) -> None:
    assert count_accelerators(*machine(tmp_path, dev=dev, gpu_ids=gpu_ids)) == number


def test_a_machine_without_these_files_has_none(tmp_path: Path) -> None:
    assert count_accelerators(str(tmp_path / "dev"), str(tmp_path / "sys")) == 0


def test_a_node_without_gpu_id_counts_as_a_cpu(tmp_path: Path) -> None:
    dev, sys = machine(tmp_path, gpu_ids=("5",))
    (tmp_path / "sys/class/kfd/kfd/topology/nodes/1").mkdir()
    assert count_accelerators(dev, sys) == 1


def test_this_machine_can_be_asked() -> None:
    assert count_accelerators() >= 0


def test_gpus_of_the_driver_are_counted_where_no_process_can_use_them(tmp_path: Path) -> None:
    assert count_hidden(str(tmp_path)) == 0
    for name in ("0000:19:00.0", "0000:3b:00.0"):
        (tmp_path / "driver" / "nvidia" / "gpus" / name).mkdir(parents=True)
    assert count_hidden(str(tmp_path)) == 2
