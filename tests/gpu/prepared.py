"""What the steps find: the checkout, the bundle's packages, DeepSpeed, compilers."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import site
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUNDLE = ROOT / ".gpu"
CUDA = Path("/usr/local/cuda")
BUILD_S = 300.0
DAMAGED = (OSError, EOFError, zlib.error, zipfile.BadZipFile, tarfile.TarError)


@contextmanager
def prepared(*, is_fake: bool) -> Iterator[dict[str, str]]:
    """The environment of the steps: the checkout, and the bundle's packages before the installed ones."""
    environ = {**os.environ, "PYTHONUNBUFFERED": "1"}
    path = [str(ROOT)]
    if is_fake:
        path.append(str(ROOT / "tests" / "fake_cuda" / "everywhere"))
        environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        environ |= home(Path(folder) / "home")
        peers = Path(sys.prefix) / "deepspeed"
        if not is_fake and (names := bundled()):
            path += install(names, Path(folder))
            peers = unpack_deepspeed(Path(folder) / "peers") or peers
        elif not is_fake and importlib.util.find_spec("dslaunch") is None:
            print(
                f"no dslaunch here, and no packages in {BUNDLE}: run `make gpu-bundle` where there is a "
                "network, and carry that folder here",
                flush=True,
            )
        if peers.is_dir():
            environ["PEERS"] = str(peers)
        environ["PYTHONPATH"] = os.pathsep.join([*path, *filter(None, [os.environ.get("PYTHONPATH")])])
        yield environ | compilers(environ)


def home(spare: Path) -> dict[str, str]:
    """Return what the steps are to find as their HOME: the spare folder where the user has none or cannot
    write there. Torch, compilers and the driver keep below it what they make. What pip has installed for the
    user is found where it is.
    """
    own = os.environ.get("HOME") or os.path.expanduser("~")
    try:
        tempfile.TemporaryFile(dir=own).close()
    except OSError as error:
        print(f"HOME, {own}: {error.strerror}: what steps would keep there ends with this run", flush=True)
        spare.mkdir()
        return {"HOME": str(spare), "PYTHONUSERBASE": site.getuserbase()}
    return {"HOME": own}


def bundled() -> list[str]:
    """Return the names of the bundle's wheels; none where there is no bundle that this user can read."""
    try:
        return sorted(os.listdir(BUNDLE / "wheels"))
    except OSError as error:
        if not isinstance(error, FileNotFoundError) or BUNDLE.exists():
            print(f"{error.filename}: {error.strerror}: the bundle is left out", flush=True)
        return []


def install(names: Sequence[str], folder: Path) -> list[str]:
    """Unpack the bundle's wheels, each into a folder of its own, and return these; where dslaunch's is of
    another Python or damaged, build it from the checkout. What cannot be had is told: the steps that need it
    will say so, too.
    """
    wheels = [one for one in names if one.endswith(".whl") and is_for_this_python(one)]
    unpacked = [one for one in wheels if is_unpacked(BUNDLE / "wheels" / one, folder / one)]
    path = [str(folder / one) for one in unpacked]
    if any(one.startswith("dslaunch-") for one in unpacked):
        return path
    built = str(folder / "dslaunch")
    build = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-cache-dir"]
    build += ["--no-build-isolation", "--target", built, str(ROOT)]
    try:
        subprocess.run(
            build, check=True, timeout=BUILD_S, env={**os.environ, "PYTHONPATH": os.pathsep.join(path)}
        )
    except (OSError, subprocess.SubprocessError) as error:
        print(
            f"dslaunch was not built for this Python: {error}; `make gpu-bundle GPU_PYTHON="
            f"{sys.version_info.major}.{sys.version_info.minor}` makes its wheel where there is a network",
            flush=True,
        )
    return [*path, built]


def is_unpacked(wheel: Path, folder: Path) -> bool:
    """Leave out whole what is damaged: half a package may be imported, and crash."""
    try:
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(folder)
    except DAMAGED as error:
        print(f"{wheel.name}: left out: {error}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        return False
    return True


def unpack_deepspeed(folder: Path) -> Path | None:
    """Return where it is, if it is; what compares with it will say so if not."""
    try:
        with tarfile.open(BUNDLE / "deepspeed.tgz") as packed:
            packed.extractall(folder, filter="data")
    except FileNotFoundError:
        return None
    except DAMAGED as error:
        print(f"deepspeed.tgz: left out: {error}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        return None
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
