"""Builds the device once for each version of torch and of its source, beside the environment's packages."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sysconfig
from importlib.metadata import version
from pathlib import Path

NATIVE = Path(__file__).parent / "native"
NAME = "fake_cuda"
COMPILER = os.environ.get("CXX", "g++")
LIMIT_S = 600.0


def can_be_built(packages: Path | None = None) -> str | None:
    """Return why it cannot, or None. `packages`: the folder that has torch."""
    text = ((packages or _packages()) / "torch" / "version.py").read_text()
    built_for = re.search(r"^cuda\b.*= ['\"](.+)['\"]", text, re.MULTILINE)
    if built_for is not None:
        return (
            f"the fake CUDA device stands in for true ones, and this torch is built for CUDA {built_for[1]}"
        )
    if shutil.which(COMPILER) is None:
        return f"the fake CUDA device is compiled, and there is no {COMPILER}"
    return None


def library() -> Path:
    """Return the compiled device, after a minute of compiling if it is not there yet.

    Errors:  subprocess.CalledProcessError with what the compiler said
    """
    packages = _packages()
    sources = [Path(__file__), *sorted(NATIVE.iterdir())]
    digest = hashlib.sha256(b"".join([version("torch").encode(), *(one.read_bytes() for one in sources)]))
    place = packages.parents[2] / f"{NAME}-{digest.hexdigest()[:16]}" / f"{NAME}.so"
    if not place.exists():
        place.parent.mkdir(exist_ok=True)
        with place.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # of several test processes one compiles, and the others wait
            if not place.exists():
                own = place.with_suffix(".new")
                _compile(own, packages / "torch")
                own.rename(place)
    return place


def _packages() -> Path:
    return Path(sysconfig.get_path("purelib"))


def _compile(target: Path, torch: Path) -> None:
    subprocess.run(
        [
            COMPILER, "-std=c++20", "-O1", "-g0", "-fPIC", "-shared", "-w",
            f"-DTORCH_EXTENSION_NAME={NAME}",
            f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}",
            f"-I{sysconfig.get_path('include')}", str(NATIVE / "operators.cpp"), "-o", str(target),
            f"-L{torch / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10", "-ltorch_python",
            f"-Wl,-rpath,$ORIGIN/{os.path.relpath(torch / 'lib', target.parent)}",
        ],
        check=True,
        timeout=LIMIT_S,
    )  # fmt: skip


if __name__ == "__main__":
    why_not = can_be_built()
    print(why_not or f"the fake CUDA device: {library()}")
