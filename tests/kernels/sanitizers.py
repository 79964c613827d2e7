"""Run tests/kernels against compiled code that watches every memory access and every undefined operation.

    make check-sanitizers

Builds `dslaunch.kernels._C` with the address and undefined-behaviour sanitizers into build/sanitizers, beside
the installed one, and runs the tests with it; further arguments go to pytest. The first finding ends the run,
with its stack on standard error and an exit code that is not 0.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import nanobind

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "sanitizers"

# Python imports a module of this name when it starts, in the processes that tests start as well.
SITE_CUSTOMIZE = """
import sys
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location

name, path = "dslaunch.kernels._C", {path!r}
spec = spec_from_file_location(name, path, loader=ExtensionFileLoader(name, path))
sys.modules[name] = module = module_from_spec(spec)
spec.loader.exec_module(module)
"""


def compiled(folder: Path, *definitions: str) -> Path:
    """Return the compiled module, built in `folder` from the sources as they are."""
    tools = Path(sys.executable).parent
    configure = [
        *(str(tools / "cmake"), "-S", str(ROOT / "kernels"), "-B", str(folder), "-G", "Ninja"),
        f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}",
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-Dnanobind_DIR={nanobind.cmake_dir()}",
        *definitions,
    ]
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
    subprocess.run([str(tools / "cmake"), "--build", str(folder)], check=True)
    (module,) = folder.glob("_C*.so")
    return module


def build() -> Path:
    """Return the folder of what was built."""
    module = compiled(BUILD, "-DDSLAUNCH_SANITIZE=ON")
    site = BUILD / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(SITE_CUSTOMIZE.format(path=str(module)))
    return site


def environment(site: Path) -> dict[str, str]:
    """What the tests run under: the sanitizer must be the first library of the process,
    before what throws for C++.
    """
    compiler = os.environ.get("CXX", "c++")
    libraries = [_library(compiler, name) for name in ("libasan.so", "libstdc++.so")]
    return {
        **os.environ,
        "LD_PRELOAD": " ".join(libraries),
        "PYTHONPATH": str(site),
        "PYTHONMALLOC": "malloc",  # one allocation per object, so that an access beside it is seen
        "ASAN_OPTIONS": "detect_leaks=0",  # Python itself keeps memory until the process ends
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def _library(compiler: str, name: str) -> str:
    asked = [compiler, f"-print-file-name={name}"]
    path = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()
    if not Path(path).is_absolute():
        raise SystemExit(f"{compiler} has no {name}; install GCC with its sanitizers, or set CXX to g++")
    return path


def main() -> int:
    env = environment(build())
    probe = "import sys, dslaunch.kernels; print(sys.modules['dslaunch.kernels._C'].__file__)"
    loaded = subprocess.run(
        [sys.executable, "-c", probe], check=True, capture_output=True, text=True, env=env
    )
    if str(BUILD) not in loaded.stdout:
        raise AssertionError(f"the tests would run with {loaded.stdout.strip()}, not with what is in {BUILD}")
    # Behind tests/kernels/cuda is no code of _C that the others leave out, but NVIDIA's compiler and fibers.
    words = [sys.executable, "-m", "pytest", "-q", "--capture=sys", "tests/kernels"]
    words += ["--ignore=tests/kernels/cuda", *sys.argv[1:]]
    return subprocess.run(words, check=False, cwd=ROOT, env=env).returncode


if __name__ == "__main__":
    sys.exit(main())
