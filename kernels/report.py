"""State of the kernels on this machine, as JSON: `python -m dslaunch.kernels.report`.

`dslaunch report-env` runs it in a process of its own: a kernel that this processor cannot run ends that
process, and not the report.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from .. import kernels
from .compiled import _C
from .disk import DiskEngine, DiskFile, aligned_empty
from .disk_folder import DiskFolder
from .disk_speed import measure

NUMEL = 70_000  # enough for two threads
PROBE_BYTES = 1 << 20
# A value for every hyper-parameter that a segment may have.
HYPER: dict[str, Any] = {
    "lr": 1e-3,
    "beta1": 0.9,
    "beta2": 0.99,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "step": 3,
    "momentum": 0.9,
    "dampening": 0.1,
    "nesterov": False,
    "lr_decay": 0.01,
    "min_coeff": 0.01,
    "max_coeff": 10.0,
}
KERNELS = {one.name.lower(): one for one in vars(kernels).values() if isinstance(one, kernels.Kernel)}
KERNELS["adamw"] = kernels.ADAM


def report(nvme_path: str | None, disk_test_bytes: int) -> dict[str, Any]:
    """Return everything, with the reason for each failure. Units are in the names."""
    return {
        "build": _C.build_info(),
        "kernels": kernels_that_work(),
        "cuda_kernels": cuda_kernels(),
        "disk": None if nvme_path is None else disk(nvme_path, disk_test_bytes),
    }


# ---- kernels ---------------------------------------------------------------------------------------------


def kernels_that_work() -> list[dict[str, Any]]:
    """Run each step beside its plain loop, and the norm beside Python's own sum."""
    problems = []
    for name in sorted(kernels.__all__):
        if name == "squared_norm":
            problems.append({"name": name, "problem": _problem(_try_norm)})
        elif name.endswith("_step") and f"{name}_reference" in kernels.__all__:
            problems.append({"name": name, "problem": _problem(lambda name=name: _try_step(name))})  # type: ignore[misc]
    return problems


def _problem(attempt: Callable[[], str]) -> str:
    try:
        return attempt()
    except Exception as error:  # the report goes on, and says so
        return f"{type(error).__name__}: {error}"


def _floats(scale: float) -> memoryview[float]:
    values = memoryview(aligned_empty(4 * NUMEL)).cast("f")  # type: ignore[arg-type]
    for index in range(NUMEL):
        values[index] = scale * ((index * 37) % 101 - 50.5)
    return values


def _try_step(name: str) -> str:
    kernel = KERNELS[name.removesuffix("_step")]
    names = [field.name for field in kernel.numbers]
    unknown = [one for one in names if one not in HYPER]
    if unknown:
        return f"not tried: nothing is known about {', '.join(unknown)}"
    segment = kernel.segment(offset=0, numel=NUMEL, **{one: HYPER[one] for one in names})
    states = (*kernel.states, *(["update"] if kernel.has_update else []))
    results = []
    for suffix in ("", "_reference"):
        arrays = {one: _floats(0.01 if one == "param" else 0.0) for one in ("param", *states)}
        getattr(kernels, name + suffix)(
            [kernel.shard(grads=((0, _floats(0.001)),), segments=(segment,), **arrays)]
        )
        results.append([bytes(array) for array in arrays.values()])
    if results[0][0] == bytes(_floats(0.01)):
        return "it changes nothing"
    return "" if results[0] == results[1] else "its result is not that of the plain loop"


def _try_norm() -> str:
    values = _floats(1.0)
    want = sum(float(value) ** 2 for value in values)
    norm = kernels.squared_norm([values])  # type: ignore[list-item]
    return "" if abs(norm - want) <= 1e-9 * want else f"it is {norm!r}, and should be {want!r}"


# ---- CUDA ------------------------------------------------------------------------------------------------


def cuda_kernels() -> dict[str, Any]:
    """Whether kernels for CUDA can be compiled here, and what is compiled already."""
    nothing = {"problem": "", "compiler": "", "cache_folder": "", "num_cached": 0, "cached_bytes": 0}
    if importlib.util.find_spec(f"{__package__}.cuda") is None:
        return {**nothing, "problem": "this version of dslaunch has none"}
    compiler: Any = importlib.import_module(f"{__package__}.cuda.compiler")
    folder = compiler.cache_folder(os.environ)
    sizes = [path.stat().st_size for path in folder.glob("*.cubin")]
    nothing |= {"cache_folder": str(folder), "num_cached": len(sizes), "cached_bytes": sum(sizes)}
    try:
        return {**nothing, "compiler": compiler.Nvrtc().version()}
    except Exception as error:  # its own class is in a module that may be missing
        return {**nothing, "problem": str(error)}


# ---- disk ------------------------------------------------------------------------------------------------


def disk(nvme_path: str, test_bytes: int) -> dict[str, Any]:
    """Try direct I/O in a folder of its own below `nvme_path`, and time it if `test_bytes` is above 0."""
    result: dict[str, Any] = {"path": nvme_path, "problem": "", "is_direct": False, "why_not_direct": ""}
    try:
        place = os.statvfs(nvme_path)
        result["free_bytes"] = place.f_bavail * place.f_frsize
        folder = DiskFolder.claim(nvme_path, f"report-env-{os.getpid()}", 0)
    except OSError as error:
        return {**result, "problem": error.strerror or str(error)}
    try:
        with warnings.catch_warnings(), DiskEngine() as engine:
            warnings.simplefilter("ignore", RuntimeWarning)  # the report has it
            with engine.create(folder.path / "probe", test_bytes or PROBE_BYTES) as file:
                result |= {"is_direct": file.is_direct, "why_not_direct": file.why_not_direct or ""}
                result |= _tried(file, engine, test_bytes)
    except (OSError, ValueError, MemoryError) as error:
        result["problem"] = (error.strerror if isinstance(error, OSError) else None) or str(error)
    finally:
        folder.close()
    return result


def _tried(file: DiskFile, engine: DiskEngine, test_bytes: int) -> dict[str, Any]:
    speed = measure(file)
    if not test_bytes:
        return {}
    per_second = {f"{name}_bytes_per_s": value for name, value in asdict(speed).items()}
    return {
        "test_bytes": test_bytes,
        "num_threads": engine.num_threads,
        "block_bytes": engine.block_bytes,
    } | per_second


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m dslaunch.kernels.report", description=__doc__)
    parser.add_argument("--nvme_path", help="folder to try direct I/O in")
    parser.add_argument("--disk_test", type=int, default=0, metavar="BYTES", help="bytes to time it with")
    given = parser.parse_args(argv)
    print(
        "\ndslaunch facts: " + json.dumps(report(given.nvme_path, given.disk_test))
    )  # the launcher looks there


if __name__ == "__main__":
    main()
