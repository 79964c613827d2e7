"""What the steps find: the checkout, the bundle's packages, DeepSpeed, compilers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUNDLE = ROOT / ".gpu"
CUDA = Path("/usr/local/cuda")
BUILD_S = 300.0


@contextmanager
def prepared(*, is_fake: bool) -> Iterator[dict[str, str]]:
    """The environment of the steps: the checkout, and the bundle's packages before the installed ones."""
    environ = {**os.environ, "PYTHONUNBUFFERED": "1"}
    path = [str(ROOT)]
    if is_fake:
        path.append(str(ROOT / "tests" / "fake_cuda" / "everywhere"))
        environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        if BUNDLE.is_dir() and not is_fake:
            path.append(folder)
            install(Path(folder))
        if (BUNDLE / "deepspeed.tgz").exists() and not is_fake:
            environ["PEERS"] = str(unpack_deepspeed(Path(folder) / "peers"))
        elif (Path(sys.prefix) / "deepspeed").is_dir():
            environ["PEERS"] = str(Path(sys.prefix) / "deepspeed")
        environ["PYTHONPATH"] = os.pathsep.join([*path, *filter(None, [os.environ.get("PYTHONPATH")])])
        yield environ | compilers(environ)


def install(folder: Path) -> None:
    """Unpack the bundle's wheels; where dslaunch's is of another Python, build it from the checkout. What
    cannot be had is told: the steps that need it will say so, too.
    """
    wheels = [one for one in sorted((BUNDLE / "wheels").glob("*.whl")) if is_for_this_python(one.name)]
    for wheel in wheels:
        try:
            with zipfile.ZipFile(wheel) as packed:
                packed.extractall(folder)
        except (OSError, zipfile.BadZipFile) as error:
            print(f"{wheel.name}: left out: {error}", flush=True)
    if any(one.name.startswith("dslaunch-") for one in wheels):
        return
    build = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-cache-dir"]
    build += ["--no-build-isolation", "--target", str(folder), str(ROOT)]
    try:
        subprocess.run(build, check=True, timeout=BUILD_S, env={**os.environ, "PYTHONPATH": str(folder)})
    except (OSError, subprocess.SubprocessError) as error:
        print(f"dslaunch was not built for this Python: {error}", flush=True)


def unpack_deepspeed(folder: Path) -> Path:
    """Return where it is, if it is; what compares with it will say so if not."""
    try:
        with tarfile.open(BUNDLE / "deepspeed.tgz") as packed:
            packed.extractall(folder, filter="data")
    except (OSError, tarfile.TarError) as error:
        print(f"deepspeed.tgz: left out: {error}", flush=True)
    return folder


def is_for_this_python(wheel: str) -> bool:
    """A wheel of the stable ABI is for newer ones, too."""
    found = re.search(r"-cp3(\d+)-(abi3|cp3\d+)-", wheel)
    if found is None:
        return True
    minor = int(found[1])
    return minor == sys.version_info.minor or (found[2] == "abi3" and minor <= sys.version_info.minor)


def compilers(environ: dict[str, str]) -> dict[str, str]:
    """Return what compiling needs to find: the programs that are installed beside this Python, CUDA, and the
    headers of its libraries, which pip may have brought.
    """
    beside = str(Path(sys.executable).parent)
    found = {"PATH": os.pathsep.join([environ.get("PATH", ""), beside])}
    if "CUDA_HOME" not in environ and (CUDA / "bin" / "nvcc").is_file():
        found["CUDA_HOME"] = str(CUDA)
    headers = [str(one) for place in sys.path for one in Path(place).glob("nvidia/cu*/include")]
    if headers:
        found["CPATH"] = os.pathsep.join([*filter(None, [environ.get("CPATH")]), *headers])
    return found
