"""Questions about a host, answered on it: its programs, their versions, its resources."""

from __future__ import annotations

import os
import resource
import sys
import time

from ...wire import fast_json
from ...wire.frames import Facts, bytes_of, text_of
from ..system.kernel_file import read_text
from ..system.lean_stdlib import suppress
from .devices import count_accelerators

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_MARK = b"dslaunch facts: "  # begins the answer among a program's other output
_ASK_PYTHON = "import platform; print('dslaunch facts: \"' + platform.python_version() + '\"')"
_ASK_TORCH = """
import json, torch
cuda, hip = torch.version.cuda, getattr(torch.version, "hip", None)
platform = "CUDA " + cuda if cuda else "HIP " + hip if hip else ""
nccl = ""
try:
    if platform: nccl = ".".join(map(str, torch.cuda.nccl.version()))
except Exception: pass  # a build without NCCL
print("\\ndslaunch facts: " + json.dumps([torch.__version__, platform, nccl]))
"""
_DRIVER_VERSION = r"Kernel Module.*?\s([0-9]+(?:\.[0-9]+)+)\s"
_TCP_LISTEN = "0A"


def answer(question: str, given: dict[str, Any]) -> Facts:
    """Return the facts; `error` alone if there is no answer."""
    try:
        return Facts(question, QUESTIONS[question](given))
    except Exception as error:  # any error that ends the thread is reported to the launcher
        return Facts(question, {"error": f"{type(error).__name__}: {error}"})


def _clock(given: dict[str, Any]) -> dict[str, Any]:
    return {"time": time.time()}


def _system(given: dict[str, Any]) -> dict[str, Any]:
    import shutil

    return {
        "hostname": os.uname().nodename,
        "boot_id": read_text("/proc/sys/kernel/random/boot_id").strip(),
        "kernel": os.uname().release,
        "machine": os.uname().machine,
        "num_cpus": len(os.sched_getaffinity(0)),
        "numactl": shutil.which("numactl") or "",
        "memlock": _limit(resource.RLIMIT_MEMLOCK),
        "nofile": _limit(resource.RLIMIT_NOFILE),
        **_memory(),
    }


def _memory() -> dict[str, Any]:
    lines = (line.split() for line in read_text("/proc/meminfo").splitlines())
    kib = {words[0]: int(words[1]) for words in lines if len(words) > 1}
    return {"memory_bytes": kib["MemTotal:"] << 10, "memory_free_bytes": kib["MemAvailable:"] << 10}


def _limit(kind: int) -> int:
    """Return the soft limit; -1 means no limit."""
    soft, _ = resource.getrlimit(kind)
    return -1 if soft == resource.RLIM_INFINITY else soft


def _disk(given: dict[str, Any]) -> dict[str, Any]:
    """Look at a folder that jobs use. On a file system that hangs the answer never comes."""
    path = os.path.expanduser(bytes_of(given["path"]))
    try:
        if not os.path.isdir(path):
            os.listdir(path)  # raises the reason
        if not os.access(path, os.X_OK):
            return {"problem": "Permission denied", "size_bytes": 0, "free_bytes": 0}
        found = os.statvfs(path)
    except OSError as error:
        return {"problem": os.strerror(error.errno or 0), "size_bytes": 0, "free_bytes": 0}
    return {
        "problem": "",
        "size_bytes": found.f_blocks * found.f_frsize,
        "free_bytes": found.f_bavail * found.f_frsize,
    }


def _python(given: dict[str, Any]) -> dict[str, Any]:
    version, problem = ask([given["python"], "-I", "-S", "-c", _ASK_PYTHON], given["timeout_s"])
    return {"version": version or "", "problem": problem}


def _torch(given: dict[str, Any]) -> dict[str, Any]:
    found, problem = ask([given["python"], "-c", _ASK_TORCH], given["timeout_s"])
    version, platform, nccl = found or ("", "", "")
    return {"version": version, "platform": platform, "nccl": nccl, "problem": problem}


def _nvml(given: dict[str, Any]) -> dict[str, Any]:
    """Return the output of a program that asks NVML. The launcher sends it along: jobs do not need it."""
    found, problem = ask([given["python"], "-c", given["program"]], given["timeout_s"])
    return {"problem": problem, "cuda": -1, "gpus": []} if found is None else found


def ask(argv: list[str], timeout_s: float) -> tuple[Any, str]:
    """Return the value that a Python program printed behind the mark, or None and the reason. An empty first
    word is the Python that runs this.
    """
    import subprocess

    program = os.path.expanduser(bytes_of(argv[0] or sys.executable))
    try:
        done = subprocess.run(
            [program, *argv[1:]],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            cwd="/",  # so that a file torch.py in the job's folder is not imported
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None, f"did not end within {timeout_s:g} s"
    except OSError as error:
        return None, os.strerror(error.errno or 0)
    for line in reversed(done.stdout.splitlines()):
        if line.startswith(_MARK):
            with suppress(ValueError):
                return fast_json.read(text_of(line[len(_MARK) :]).strip()), ""
    lines = text_of(done.stderr).strip().splitlines()
    if lines:
        return None, lines[-1].strip()
    how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
    return None, f"it said nothing, {how}"


def _gpu(given: dict[str, Any]) -> dict[str, Any]:
    """Look at NVIDIA's driver and GPUs. `num` counts the GPUs of any maker that a process can use."""
    import subprocess

    driver = ""
    names: list[str] = []
    with suppress(OSError, subprocess.SubprocessError):
        lines = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=given["timeout_s"],
            check=True,
        ).stdout
        rows = [line.partition(", ") for line in text_of(lines).splitlines() if ", " in line]
        driver = rows[0][0] if rows else ""
        names = [name for _, _, name in rows]
    if not driver:
        import re

        match = re.search(_DRIVER_VERSION, read_text("/proc/driver/nvidia/version"))
        driver = match.group(1) if match else ""
    return {"driver": driver, "names": names, "num": count_accelerators()}


def _link(given: dict[str, Any]) -> dict[str, Any]:
    """List network cards and InfiniBand ports, as `name speed`, and the reason against each unusable port.

    A card without a speed is left out: most virtual machines have such cards.
    """
    root = given["path"]
    found: list[tuple[int, str]] = []
    faults = []
    for name in _names(f"{root}/net"):
        place = f"{root}/net/{name}"
        speed, carrier = (read_text(f"{place}/{one}").strip() for one in ("speed", "carrier"))
        if os.path.exists(f"{place}/device") and speed.isdigit() and carrier == "1":
            found.append((int(speed), name))
    for device in _names(f"{root}/infiniband"):
        for port in _names(f"{root}/infiniband/{device}/ports"):
            place = f"{root}/infiniband/{device}/ports/{port}"
            state, rate = read_text(f"{place}/state").strip(), read_text(f"{place}/rate").split()
            if not state.endswith("ACTIVE"):
                faults.append(f"{device} port {port} is {state.rpartition(' ')[2] or 'in no known state'}")
            elif rate and rate[0].replace(".", "", 1).isdigit():
                found.append((int(float(rate[0]) * 1000), f"{device}:{port}"))
    found.sort(key=lambda one: (-one[0], one[1]))
    return {
        "fastest_mbit": found[0][0] if found else -1,
        "names": [f"{name} {speed / 1000:g} Gbit/s" for speed, name in found],
        "faults": faults,
    }


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _port_owner(given: dict[str, Any]) -> dict[str, Any]:
    """Name the program that listens on a port, if that may be known."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in read_text(table).splitlines()[1:]:
            words = line.split()
            if words[3] == _TCP_LISTEN and int(words[1].rpartition(":")[2], 16) == given["port"]:
                inodes.add(f"socket:[{words[9]}]")
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            if any(os.readlink(f"/proc/{pid}/fd/{fd}") in inodes for fd in os.listdir(f"/proc/{pid}/fd")):
                return {"owner": f"{read_text(f'/proc/{pid}/comm').strip()} (process {pid})"}
    return {"owner": ""}


def _notice(given: dict[str, Any]) -> dict[str, Any]:
    """Look whether a notice tells the host to go, as a job's agent would."""
    from .notice import notice_of

    return {"why": notice_of(given["file"], given["command"])}


QUESTIONS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "clock": _clock,
    "system": _system,
    "shm": _disk,
    "tmp": _disk,
    "cwd": _disk,
    "python": _python,
    "torch": _torch,
    "gpu": _gpu,
    "nvml": _nvml,
    "link": _link,
    "port_owner": _port_owner,
    "notice": _notice,
}
