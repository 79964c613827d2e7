"""Number of accelerators of this machine, without asking torch."""

from __future__ import annotations

import os

from ..system.kernel_file import read_text


def count_accelerators(dev: str = "/dev", sys: str = "/sys") -> int:
    """Number of GPUs that a process started here could use: NVIDIA's device files, else AMD's compute nodes;
    0 if there are none.
    """
    nvidia = sum(name.startswith("nvidia") and name[6:].isdigit() for name in _listdir(dev))
    return nvidia or sum(
        1 for node in _amd_nodes(sys) if read_text(os.path.join(node, "gpu_id")).strip() not in ("", "0")
    )


def gpu_models(proc: str = "/proc") -> list[str]:
    """Names of the models of this machine's GPUs, as NVIDIA's driver says them; empty if they are divided
    (MIG), since a part has less of everything.
    """
    folder = os.path.join(proc, "driver", "nvidia")
    devices = os.path.join(folder, "capabilities")
    for device in _listdir(devices):
        if any(one.startswith("gi") for one in _listdir(os.path.join(devices, device, "mig"))):
            return []
    gpus = os.path.join(folder, "gpus")
    texts = [read_text(os.path.join(gpus, one, "information")) for one in _listdir(gpus)]
    rows = [line.partition(":") for text in texts for line in text.splitlines()]
    return [value.strip() for name, _, value in rows if name.strip() == "Model"]


def count_hidden(proc: str = "/proc") -> int:
    """Number of GPUs that NVIDIA's driver has, whether or not a process started here can use them: a
    container that was given none has no device files of them.
    """
    return len(_listdir(os.path.join(proc, "driver", "nvidia", "gpus")))


def _amd_nodes(sys: str) -> list[str]:
    folder = os.path.join(sys, "class", "kfd", "kfd", "topology", "nodes")
    return [os.path.join(folder, name) for name in _listdir(folder)]


def _listdir(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
