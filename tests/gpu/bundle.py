"""Fill .gpu/ with what a machine with a GPU and no network needs beside the checkout: `make gpu-bundle`.

    python -m tests.gpu.bundle [--python 3.12]

Wheels of the packages that dslaunch and its tests import, dslaunch's own, compiled here with that Python, and
DeepSpeed to compare with. Checkout and bundle together stay below 64 MiB.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUNDLE = ROOT / ".gpu"
LIMIT_MIB, MIB = 64, 2**20
PACKAGES = (
    "pydantic",
    "annotated-types",
    "typing-inspection",
    "cuda-core",
    "scikit-build-core",
    "pytest-timeout",
    "pytest-xdist",
    "execnet",
)
PLATFORMS = (
    "manylinux_2_28_x86_64",
    "manylinux_2_27_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
)


def main() -> int:
    """Return 0 if all is there and small enough."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu.bundle",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--python", default="3.12", help="version on the machine with the GPU; 3.12 unless given"
    )
    version = parser.parse_args().python
    shutil.rmtree(BUNDLE, ignore_errors=True)
    wheels = BUNDLE / "wheels"
    wheels.mkdir(parents=True)
    download(wheels, version)
    is_built = build(wheels, version)
    pack_deepspeed()
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    checkout = [ROOT / name.decode() for name in tracked.split(b"\0") if name]
    said, fits = sizes(checkout, sorted(one for one in BUNDLE.rglob("*") if one.is_file()))
    print(said)
    return 0 if is_built and fits else 1


def sizes(checkout: Sequence[Path], bundle: Sequence[Path]) -> tuple[str, bool]:
    """Return what to carry takes, in words, and whether that is little enough."""
    of_checkout, of_bundle = (sum(one.lstat().st_size for one in files) for files in (checkout, bundle))
    fits = of_checkout + of_bundle < LIMIT_MIB * MIB
    lines = [
        f"the checkout, {of_checkout / MIB:.1f} MiB, and {BUNDLE.name}, {of_bundle / MIB:.1f} MiB, are "
        f"{'less' if fits else 'more'} than {LIMIT_MIB} MiB together" + ("" if fits else ": leave files out"),
        *(f"  {one.stat().st_size / MIB:6.1f} MiB  {one.name}" for one in bundle),
    ]
    return "\n".join(lines), fits


def download(wheels: Path, version: str) -> None:
    """Fetch what is imported, for that Python; pydantic-core in the version that pydantic asks for."""
    ask = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels)]
    ask += ["--only-binary=:all:", "--python-version", version, "--implementation", "cp"]
    ask += [word for platform in PLATFORMS for word in ("--platform", platform)]
    subprocess.run([*ask, *PACKAGES], check=True)
    (pydantic,) = wheels.glob("pydantic-[0-9]*.whl")
    with zipfile.ZipFile(pydantic) as packed:
        (name,) = (one for one in packed.namelist() if one.endswith(".dist-info/METADATA"))
        needs = Parser().parsestr(packed.read(name).decode()).get_all("Requires-Dist", [])
    (core,) = (one.split(";")[0].strip() for one in needs if one.startswith("pydantic-core"))
    subprocess.run([*ask, core], check=True)
    # it has no wheel of its own
    make = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(wheels), "hjson"]
    subprocess.run(make, check=True)


def build(wheels: Path, version: str) -> bool:
    """Compile dslaunch's wheel with that Python, in an environment of its own; return whether it is there."""
    python = python_of(version)
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "venv"
        pip = [str(made / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
        try:
            if python is None:
                raise OSError(f"no python{version} that runs")
            subprocess.run([python, "-m", "venv", str(made)], check=True, capture_output=True)
            subprocess.run([*pip, "install", "scikit-build-core", "nanobind", "cmake", "ninja"], check=True)
            wheel = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels)]
            subprocess.run([*wheel, f"-Cbuild-dir={folder}/build", str(ROOT)], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            print(
                f"no wheel of dslaunch for Python {version}: {error}; install that Python here, or give "
                "--python with the other machine's version; else that machine compiles it, in a minute",
                flush=True,
            )
            return False
    return True


def python_of(version: str) -> str | None:
    """Return a Python of this version that runs: what has its name may be a shim of another one's."""
    folders = [*os.environ.get("PATH", "").split(os.pathsep), "/usr/local/bin", "/usr/bin"]
    folders += map(str, sorted(Path.home().glob(f".pyenv/versions/{version}*/bin")))
    ask = "import sys; print('%d.%d' % sys.version_info[:2])"
    for folder in dict.fromkeys(folders):
        python = shutil.which(f"python{version}", path=folder)
        if python is None:
            continue
        asked = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=False)
        if asked.stdout.strip() == version:
            return python
    return None


def pack_deepspeed() -> None:
    """DeepSpeed as `make setup` has it, in pure Python."""
    found = Path(sys.prefix) / "deepspeed"
    if not found.is_dir():
        print("without DeepSpeed: make setup could not install it")
        return
    with tarfile.open(BUNDLE / "deepspeed.tgz", "w:gz") as packed:
        for one in sorted(found.iterdir()):
            packed.add(one, arcname=one.name, filter=_without_caches)


def _without_caches(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if "__pycache__" in entry.name else entry


if __name__ == "__main__":
    sys.exit(main())
