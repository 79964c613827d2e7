"""Report on what works on this machine, tested mostly by other processes."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from typing import Any

from ...shared.table import table, terminal_columns
from ..node.observe.inspection import answer, ask

TORCH_TIMEOUT_S = 120.0
KERNELS_TIMEOUT_S = 60.0
SLOWEST_BYTES_PER_S = 10e6  # the test of a disk that is slower than this is ended
NO_CUDA_BUILD = "built without CUDA"

_ASK_TORCH = f"""
import json, torch
why, devices = "", []
if torch.cuda.is_available():
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        memory = f"{{found.total_memory / 2**30:.0f}} GiB"
        devices.append(f"{{found.name}} (sm_{{found.major}}{{found.minor}}, {{memory}})")
elif torch.version.cuda is None and getattr(torch.version, "hip", None) is None:
    why = {NO_CUDA_BUILD!r}
else:
    try:
        torch.cuda.init()
        why = "torch finds no device"
    except Exception as error:
        why = str(error).strip().splitlines()[0]
platform = torch.version.cuda or getattr(torch.version, "hip", None) or ""
print("\\ndslaunch facts: " + json.dumps(
    {{"version": torch.__version__, "platform": platform, "devices": devices, "why_no_device": why,
     "problem": ""}}
))
"""


def find_out(*, nvme_path: str | None, disk_test_bytes: int, asks_torch: bool) -> dict[str, Any]:
    """Return all facts, as `--json` prints them.

    `problem` is empty for a part that works, else the reason.
    """
    from ... import __version__

    return {
        "dslaunch": __version__,
        "python": {"version": platform.python_version(), "path": sys.executable},
        "libc": _libc(),
        "linux": {"release": os.uname().release, "machine": os.uname().machine},
        "processor": {"name": _processor(), "num_cpus": len(os.sched_getaffinity(0))},
        "torch": _torch() if asks_torch else None,
        "gpu": answer("gpu", {"timeout_s": TORCH_TIMEOUT_S}).facts,
        **_kernels(nvme_path, disk_test_bytes),
    }


def _torch() -> dict[str, Any]:
    found, problem = ask([sys.executable, "-c", _ASK_TORCH], TORCH_TIMEOUT_S)
    if isinstance(found, dict):
        return found
    return {"version": "", "platform": "", "devices": [], "why_no_device": "", "problem": problem}


def _kernels(nvme_path: str | None, disk_test_bytes: int) -> dict[str, Any]:
    """Ask another process about the kernels: the launcher does not load them, and a faulty kernel may crash
    its process.
    """
    words = [] if nvme_path is None else ["--nvme_path", nvme_path, "--disk_test", str(disk_test_bytes)]
    timeout_s = KERNELS_TIMEOUT_S + 3 * disk_test_bytes / SLOWEST_BYTES_PER_S
    found, problem = ask(
        [sys.executable, "-m", f"{__package__.partition('.')[0]}.kernels.report", *words], timeout_s
    )
    if isinstance(found, dict):
        return {"kernels_problem": "", **found}
    return {"kernels_problem": problem, "build": None, "kernels": [], "cuda_kernels": None, "disk": None}


def _libc() -> str:
    name, version = platform.libc_ver()
    return f"{name} {version}".strip() or "unknown"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.machine()


# ---- words -----------------------------------------------------------------------------------------------


def as_text(found: dict[str, Any]) -> str:
    """Write the facts as text: one line for each part, which begins with `yes` or `no` where the part either
    works or does not.
    """
    rows = [
        ("dslaunch", found["dslaunch"]),
        ("Python", f"{found['python']['version']} ({found['python']['path']})"),
        ("C library", f"{found['libc']}, Linux {found['linux']['release']} {found['linux']['machine']}"),
        ("processor", f"{found['processor']['name']}, {found['processor']['num_cpus']} CPUs may be used"),
        *_torch_rows(found),
        *_kernel_rows(found),
        *_disk_rows(found),
    ]
    return "".join(f"{line}\n" for line in table(rows, columns=terminal_columns()))


def _torch_rows(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    torch, gpu = found["torch"], found["gpu"]
    driver = f"driver {gpu['driver']}" if gpu.get("driver") else "no NVIDIA driver"
    if torch is None:
        yield "torch", "not asked (--no_torch)"
        yield "CUDA", f"not asked; there is {'a ' if gpu.get('driver') else ''}{driver}"
    elif torch["problem"]:
        yield "torch", f"no: it cannot be imported: {torch['problem']}"
        yield (
            "CUDA",
            f"no: without torch nothing uses it; there is {'a ' if gpu.get('driver') else ''}{driver}",
        )
    elif torch["devices"]:
        yield "torch", torch["version"]
        yield "CUDA", f"yes: {', '.join(torch['devices'])}; torch for {torch['platform']}, {driver}"
    elif torch["why_no_device"] == NO_CUDA_BUILD:
        yield "torch", torch["version"]
        advice = (
            f"install a torch for CUDA, {driver} is here" if gpu.get("driver") else f"{driver} here either"
        )
        yield "CUDA", f"no: this torch is {NO_CUDA_BUILD}; {advice}"
    else:
        yield "torch", torch["version"]
        yield "CUDA", f"no: {torch['why_no_device']} (torch for {torch['platform']}, {driver})"


def _kernel_rows(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if found["kernels_problem"]:
        yield "kernels", f"no: {found['kernels_problem']}"
        return
    build = found["build"]
    sets = ", ".join(build["instruction_sets"])
    compiled = (
        f"for {sets}; this processor takes {build['taken']}" if sets else "once, for the oldest processor"
    )
    broken = [one for one in found["kernels"] if one["problem"]]
    yield "kernels", f"{'no: see below' if broken else 'yes'}: by {build['compiler']} {compiled}"
    for one in found["kernels"]:
        yield f"  {one['name']}", f"no: {one['problem']}" if one["problem"] else "yes"
    yield "OpenMP", f"{build['num_threads']} threads"
    cuda = found["cuda_kernels"]
    if cuda["problem"]:
        yield "CUDA kernels", f"no: {cuda['problem']}"
    else:
        yield "CUDA kernels", f"yes: compiled here by {cuda['compiler']}"
    if cuda["cache_folder"]:
        yield (
            "  cache",
            f"{cuda['num_cached']} compiled, {_size(cuda['cached_bytes'])}, in {cuda['cache_folder']}",
        )


def _disk_rows(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    disk = found["disk"]
    if disk is None:
        if not found["kernels_problem"]:
            yield "direct I/O", "not tried; name a folder with --nvme_path"
        return
    if disk["problem"]:
        yield "direct I/O", f"no: {disk['path']}: {disk['problem']}"
        return
    answered = "yes" if disk["is_direct"] else f"no: {disk['why_not_direct']}"
    yield "direct I/O", f"{answered}; {disk['path']} has {_size(disk['free_bytes'])} free"
    if "test_bytes" in disk:
        yield (
            "  test",
            (
                f"{_size(disk['test_bytes'])}, {disk['num_threads']} threads, blocks of "
                f"{_size(disk['block_bytes'])}"
            ),
        )
        yield (
            "  write",
            (
                f"{disk['write_bytes_per_s'] / 1e9:.2f} GB/s, the first time "
                f"{disk['first_write_bytes_per_s'] / 1e9:.2f}"
            ),
        )
        yield "  read", f"{disk['read_bytes_per_s'] / 1e9:.2f} GB/s"


def _size(nbytes: int) -> str:
    """Write bytes in the largest unit in which the number is at least 1."""
    for unit, shift in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << shift:
            return f"{nbytes / (1 << shift):.4g} {unit}"
    return f"{nbytes} bytes"
