"""`dslaunch report-env`: the words for every case, and a real report of this machine."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from dslaunch.launcher.command_line import cli
from dslaunch.launcher.fleet import env_report

NO_GPU: dict[str, Any] = {"driver": "", "names": [], "num": 0}
A_GPU = {"driver": "550.54", "names": ["H100"], "num": 1}
TORCH = {
    "version": "2.13.0",
    "platform": "12.8",
    "devices": ["H100 (sm_90, 79 GiB)"],
    "why_no_device": "",
    "problem": "",
}
DISK = {
    "path": "/nvme",
    "problem": "",
    "is_direct": True,
    "why_not_direct": "",
    "free_bytes": 3 << 40,
}
SPEED = {
    "test_bytes": 8 << 30,
    "num_threads": 8,
    "block_bytes": 1 << 20,
    "first_write_bytes_per_s": 1.5e9,
    "write_bytes_per_s": 2.5e9,
    "read_bytes_per_s": 6.25e9,
}
NO_CUDA_KERNELS = {
    "problem": "NVRTC is missing",
    "compiler": "",
    "cache_folder": "",
    "num_cached": 0,
    "cached_bytes": 0,
}
CUDA_KERNELS = {
    "problem": "",
    "compiler": "nvrtc 13.0",
    "cache_folder": "/home/ada/.cache/dslaunch/kernels",
    "num_cached": 3,
    "cached_bytes": 12_000,
}
FOUND: dict[str, Any] = {
    "dslaunch": "1.0",
    "python": {"version": "3.12.1", "path": "/usr/bin/python3"},
    "libc": "glibc 2.36",
    "linux": {"release": "6.18", "machine": "x86_64"},
    "processor": {"name": "AMD EPYC", "num_cpus": 16},
    "torch": TORCH,
    "gpu": A_GPU,
    "kernels_problem": "",
    "build": {
        "compiler": "GCC 12.2.0",
        "instruction_sets": ["default", "avx2"],
        "taken": "avx2",
        "num_threads": 16,
    },
    "kernels": [
        {"name": "adamw_step", "problem": ""},
        {"name": "squared_norm", "problem": ""},
    ],
    "cuda_kernels": CUDA_KERNELS,
    "disk": {**DISK, **SPEED},
}


def rows(**changed: Any) -> dict[str, str]:
    lines = env_report.as_text({**FOUND, **changed}).splitlines()
    return {
        name.strip(): text for name, text in (re.split(r"(?<=\S)  +", line, maxsplit=1) for line in lines)
    }


def test_where_everything_works_every_question_has_a_yes() -> None:
    assert rows() == {
        "dslaunch": "1.0",
        "Python": "3.12.1 (/usr/bin/python3)",
        "C library": "glibc 2.36, Linux 6.18 x86_64",
        "processor": "AMD EPYC, 16 CPUs may be used",
        "torch": "2.13.0",
        "CUDA": "yes: H100 (sm_90, 79 GiB); torch for 12.8, driver 550.54",
        "kernels": "yes: by GCC 12.2.0 for default, avx2; this processor takes avx2",
        "adamw_step": "yes",
        "squared_norm": "yes",
        "OpenMP": "16 threads",
        "CUDA kernels": "yes: compiled here by nvrtc 13.0",
        "cache": "3 compiled, 11.72 KiB, in /home/ada/.cache/dslaunch/kernels",
        "direct I/O": "yes; /nvme has 3 TiB free",
        "test": "8 GiB, 8 threads, blocks of 1 MiB",
        "write": "2.50 GB/s, the first time 1.50",
        "read": "6.25 GB/s",
    }


@pytest.mark.parametrize(
    ("torch", "gpu", "want"),
    [
        (None, NO_GPU, "not asked; there is no NVIDIA driver"),
        (None, A_GPU, "not asked; there is a driver 550.54"),
        ({**TORCH, "problem": "ModuleNotFoundError"}, NO_GPU,
         "no: without torch nothing uses it; there is no NVIDIA driver"),
        ({**TORCH, "devices": [], "why_no_device": "built without CUDA"}, NO_GPU,
         "no: this torch is built without CUDA; no NVIDIA driver here either"),
        ({**TORCH, "devices": [], "why_no_device": "built without CUDA"}, A_GPU,
         "no: this torch is built without CUDA; install a torch for CUDA, driver 550.54 is here"),
        ({**TORCH, "devices": [], "why_no_device": "no CUDA-capable device"}, A_GPU,
         "no: no CUDA-capable device (torch for 12.8, driver 550.54)"),
    ],
)  # fmt: skip
def test_without_a_gpu_the_reason_is_said(torch: Any, gpu: Any, want: str) -> None:
    assert rows(torch=torch, gpu=gpu)["CUDA"] == want


def test_kernels_that_cannot_be_loaded_leave_a_report() -> None:
    found = rows(kernels_problem="ImportError: no _C", build=None, kernels=[], cuda_kernels=None, disk=None)
    assert found["kernels"] == "no: ImportError: no _C"
    assert not {"OpenMP", "CUDA kernels", "direct I/O"} & set(found)


def test_a_kernel_that_is_wrong_is_named() -> None:
    found = rows(kernels=[{"name": "adamw_step", "problem": "its result is not that of the plain loop"}])
    assert found["kernels"].startswith("no: see below: by GCC")
    assert found["adamw_step"] == "no: its result is not that of the plain loop"


@pytest.mark.parametrize(
    ("disk", "want"),
    [
        (None, "not tried; name a folder with --nvme_path"),
        (DISK, "yes; /nvme has 3 TiB free"),
        ({**DISK, "problem": "No such file or directory"}, "no: /nvme: No such file or directory"),
        (
            {**DISK, "is_direct": False, "why_not_direct": "tmpfs keeps its files in memory"},
            "no: tmpfs keeps its files in memory; /nvme has 3 TiB free",
        ),
    ],
)
def test_a_folder_without_direct_io_has_its_reason(disk: Any, want: str) -> None:
    found = rows(disk=disk, cuda_kernels=NO_CUDA_KERNELS)
    assert found["direct I/O"] == want
    assert found["CUDA kernels"] == "no: NVRTC is missing"
    assert "read" not in found


# ---- this machine ----------------------------------------------------------------------------------------


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main(["report-env", *words])
    printed = capsys.readouterr()
    assert (ended.value.code, printed.err) == (0, "")
    return printed.out


@pytest.mark.slow
def test_this_machine_runs_every_kernel_and_its_disk_is_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = json.loads(
        shown(capsys, "--json", "--no_torch", "--nvme_path", str(tmp_path), "--disk_test", "3M")
    )
    assert set(found) == set(FOUND)
    assert found["kernels_problem"] == ""
    assert {one["name"] for one in found["kernels"]} >= {"adamw_step", "squared_norm"}
    assert [one for one in found["kernels"] if one["problem"]] == []
    assert found["disk"]["problem"] == ""
    assert found["disk"]["test_bytes"] == 3 << 20
    assert min(found["disk"][name] for name in SPEED) > 0
    assert found["python"]["path"] == sys.executable
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_torch_is_asked_in_a_process_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    found = json.loads(shown(capsys, "--json"))
    assert found["torch"]["version"] == torch.__version__
    assert len(found["torch"]["devices"]) == torch.cuda.device_count()
    assert bool(found["torch"]["devices"]) != bool(found["torch"]["why_no_device"])
    assert found["disk"] is None


@pytest.mark.slow
def test_a_python_without_what_is_asked_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'ModuleNotFoundError: No module named this' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(env_report.sys, "executable", str(broken))
    found = env_report.find_out(nvme_path=None, disk_test_bytes=0, asks_torch=True)
    assert found["torch"]["problem"] == "ModuleNotFoundError: No module named this"
    assert found["kernels_problem"] == "ModuleNotFoundError: No module named this"
    text = env_report.as_text(found)
    assert "no: it cannot be imported: ModuleNotFoundError: No module named this\n" in text
