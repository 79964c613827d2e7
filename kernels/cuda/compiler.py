"""From kernel sources to code for one chip: by NVRTC at first use, from the disk afterwards.

One program is compiled for each combination of dtypes that is in use, in about a quarter of a second. NVRTC
takes no host compiler, no CUDA toolkit and no CUDA headers: 16-bit types are converted by bit operations
(bfloat16.h, float16.h).
"""

from __future__ import annotations

import hashlib
import io
import os
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from .errors import CudaUnavailable

SOURCES = Path(__file__).parent
INSTALL = (
    "python -m pip install '.[cuda12]' (torch for CUDA 12) or '.[cuda13]' (torch for CUDA 13) in a clone of "
    "dslaunch"
)
# Without fused multiply-add a kernel has the bits of the CPU's. The step is limited by memory,
# so it costs nothing.
_OPTIONS = (("std", "c++17"), ("fma", False), ("ftz", False), ("prec_div", True), ("prec_sqrt", True))
_DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A source file and the macros that choose one variant of it."""

    source: str  # without `.cu`
    macros: tuple[tuple[str, str], ...]


class Compiler(Protocol):
    """Makes code for one chip."""

    def version(self) -> str:
        """Return the versions that must be the same for code to be the same."""

    def compile(self, program: Program, arch: str) -> bytes:
        """Return a cubin. `arch` is `sm_90` or the like."""


class Nvrtc:
    """NVIDIA's run-time compiler, through the packages `cuda-core` and `cuda-bindings`.

    Errors: CudaUnavailable if they are missing, or too old for the chip
    """

    def version(self) -> str:
        """Return the version of the library, which is not that of a package."""
        try:
            from cuda.bindings import nvrtc  # imported at need: 0.4 s, and only a machine with a GPU has it

            _, major, minor = nvrtc.nvrtcVersion()
        except (ImportError, RuntimeError, OSError) as error:
            raise CudaUnavailable(_cannot_compile(error)) from error
        return f"nvrtc {major}.{minor}"

    def compile(self, program: Program, arch: str) -> bytes:
        """Return a cubin; what the compiler says about registers is dropped."""
        return self.compile_with_log(program, arch)[0]

    def compile_with_log(self, program: Program, arch: str) -> tuple[bytes, str]:
        """Return a cubin, and ptxas's lines on registers, stack and spills of each kernel."""
        version = self.version()
        try:
            from cuda.core import Program as CoreProgram, ProgramOptions
        except (ImportError, RuntimeError, OSError) as error:
            raise CudaUnavailable(_cannot_compile(error)) from error
        log = io.StringIO()
        options = ProgramOptions(
            name=f"{program.source}.cu",
            arch=arch,
            define_macro=list(program.macros),
            include_path=str(SOURCES),
            ptxas_options="-v",
            **dict(_OPTIONS),
        )
        core = None
        try:
            core = CoreProgram((SOURCES / f"{program.source}.cu").read_text(), "c++", options)
            code = core.compile("cubin", logs=log).code
        except Exception as error:  # cuda.core has no class for "the compiler refused"
            raise CudaUnavailable(
                f"{program.source}.cu: {version} cannot compile it for {arch}; if that chip is newer or "
                f"older than the compiler knows, install another: {INSTALL}. It said: {error}"
            ) from error
        finally:
            # The error's traceback would keep `core` until the garbage collector frees it, and a program of
            # cuda-core 1.2 that is freed so prints an AttributeError.
            del core
        return bytes(code), log.getvalue()


def _cannot_compile(error: BaseException) -> str:
    return (
        f"NVIDIA's run-time compiler cannot be loaded ({error}); the CUDA kernels of dslaunch need "
        f"cuda-core, cuda-bindings and NVRTC of torch's CUDA version: {INSTALL}"
    )


class CubinCache:
    """Code on the disk, one file for each program, chip, compiler and state of the sources.

    A file is its own checksum and the code. It is written under another name and then moved, so processes
    that start together may all compile, but none reads half a file. One that is broken is compiled again.
    """

    def __init__(self, folder: Path, compiler: Compiler) -> None:
        self._folder = folder
        self._compiler = compiler

    def load(self, program: Program, arch: str) -> bytes:
        """Return the program's cubin, compiled if it is not there.

        Errors: CudaUnavailable if it must be compiled and cannot
        """
        path = self.path(program, arch)
        cubin = _read(path)
        if cubin is None:
            cubin = self._compiler.compile(program, arch)
            self._write(path, cubin)
        return cubin

    def path(self, program: Program, arch: str) -> Path:
        """Return where the program's code belongs."""
        key = hashlib.sha256()
        for part in (self._compiler.version(), arch, repr(_OPTIONS), repr(program)):
            key.update(part.encode() + b"\0")
        for path in _sources(program):
            key.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
        return self._folder / f"{program.source}-{arch}-{key.hexdigest()[:32]}.cubin"

    def _write(self, path: Path, cubin: bytes) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.NamedTemporaryFile(
                dir=self._folder, prefix=".", suffix=".part", delete=False
            ) as file:
                try:
                    file.write(hashlib.sha256(cubin).digest() + cubin)
                    file.close()
                    os.replace(file.name, path)
                except BaseException:
                    os.unlink(file.name)
                    raise
        except OSError as error:
            warnings.warn(
                f"{self._folder}: compiled CUDA kernels cannot be kept there ({error}); every process "
                "compiles them again; set DSLAUNCH_CACHE_DIR to a folder that can be written",
                RuntimeWarning,
                stacklevel=2,
            )


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Return where compiled kernels are kept: DSLAUNCH_CACHE_DIR, or `dslaunch` in the user's cache folder.

    Source: XDG Base Directory Specification 0.8: a relative XDG_CACHE_HOME is to be ignored
    """
    chosen = environment.get("DSLAUNCH_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser() / "kernels"
    xdg = environment.get("XDG_CACHE_HOME", "")
    caches = Path(xdg) if os.path.isabs(xdg) else Path(environment.get("HOME") or Path.home()) / ".cache"
    return caches / "dslaunch" / "kernels"


def _sources(program: Program) -> list[Path]:
    """Return the file itself and all files that it could include."""
    headers = sorted([*SOURCES.glob("*.cuh"), *SOURCES.parent.glob("*.h")])
    return [SOURCES / f"{program.source}.cu", *headers]


def _read(path: Path) -> bytes | None:
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, cubin = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return cubin if cubin and hashlib.sha256(cubin).digest() == digest else None
