"""Devices that `--gpu` names: memory, speeds and links. A row says where its speeds come from.

Units: `memory_bytes` as torch reports the device's total, which is less than the name of the device says;
TFLOP/s are dense, for bf16 and fp16 with sums in float32; links count both directions together

Links: PCIe with 16 lanes has 32 GB/s in generation 3, 64 in generation 4 and 128 in generation 5; NVLink has
300 GB/s in its generation 2 (V100), 600 in 3 (A100), 900 in 4 (H100, H200) and 1,800 in 5 (B200). Source:
Machine Learning Engineering by S. Bekman (2026), network/README.md. A bridge between two cards of a pair, as
RTX3090 can have (112.5 GB/s, NVIDIA's GA102 white paper), is not counted.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from ..errors import LaunchError

_GIB = 2**30
CPU = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One model of GPU. A speed that its vendor does not name is 0."""

    name: str
    memory_bytes: int
    bf16_tflops: float
    fp16_tflops: float
    fp32_tflops: float
    memory_gb_per_s: float
    pcie_gb_per_s: float
    link_gb_per_s: float  # between GPUs of one host, beside PCIe; 0 without
    source: str


def _row(
    name: str,
    memory_gib: float,
    speeds: tuple[float, float, float],
    links: tuple[float, float, float],
    source: str,
) -> Gpu:
    bf16, fp16, fp32 = speeds
    memory, pcie, link = links
    return Gpu(
        name=name,
        memory_bytes=int(memory_gib * _GIB),
        bf16_tflops=bf16,
        fp16_tflops=fp16,
        fp32_tflops=fp32,
        memory_gb_per_s=memory,
        pcie_gb_per_s=pcie,
        link_gb_per_s=link,
        source=source,
    )


_OF_TABLES = "tables of others, which agree"  # the vendor's data sheet itself has not been seen
# Name; GiB; TFLOP/s in bf16, fp16, fp32; GB/s of memory, PCIe, link; source of the speeds.
GPUS: tuple[Gpu, ...] = (
    _row("A10", 22.06, (125, 125, 31.2), (600, 64, 0), "NVIDIA A10 data sheet"),
    _row("A100-40", 39.49, (312, 312, 19.5), (1555, 64, 600), "NVIDIA A100 data sheet"),
    _row("A100-80", 79.15, (312, 312, 19.5), (2039, 64, 600), "NVIDIA A100 data sheet, SXM"),
    _row("H100", 79.11, (989, 989, 67), (3350, 128, 900), "NVIDIA H100 data sheet, SXM"),
    _row("H200", 139.72, (989, 989, 67), (4800, 128, 900), "NVIDIA H200 data sheet, SXM"),
    _row("L4", 22.03, (121, 121, 30.3), (300, 64, 0), _OF_TABLES),
    _row("L40S", 44.40, (362, 362, 91.6), (864, 64, 0), "NVIDIA L40S data sheet"),
    _row("V100-16", 15.77, (0, 125, 15.7), (900, 32, 300), "NVIDIA V100 data sheet, SXM2"),
    _row("V100-32", 31.73, (0, 125, 15.7), (900, 32, 300), "NVIDIA V100 data sheet, SXM2"),
    _row("T4", 14.57, (0, 65, 8.1), (320, 32, 0), "NVIDIA T4 data sheet"),
    _row("RTX3090", 23.57, (71, 71, 35.6), (936, 64, 0), _OF_TABLES),
    _row("RTX4090", 23.52, (165.2, 165.2, 82.6), (1008, 64, 0), _OF_TABLES),
    _row(
        "RTX6000Ada",
        47.40,
        (364.2, 364.2, 91.1),
        (960, 64, 0),
        "tables of others; in bf16 and fp16 they have 182 or 364, and no data sheet was found",
    ),
    _row(
        "B200",
        178.35,
        (2250, 2250, 80),
        (8000, 128, 1800),
        "NVIDIA DGX B200 data sheet, by Machine Learning Engineering (2026), compute/accelerator/README.md",
    ),
    # A device is one of the two dies of a module. A die reaches each neighbour by a link of 100 GB/s or more.
    _row("MI250", 63.98, (181, 181, 45.3), (1638, 64, 100), "ROCm documentation, MI250 microarchitecture"),
    _row("MI300X", 191.69, (1307.4, 1307.4, 163.4), (5300, 128, 896), "AMD Instinct MI300X data sheet"),
)


def find_gpu(name: str) -> Gpu:
    """Return the GPU of this name; case, blanks and dashes make no difference.

    Errors: LaunchError that names the nearest, and all
    """
    wanted = _plain(name)
    found = next((one for one in GPUS if _plain(one.name) == wanted), None)
    if found is not None:
        return found
    names = [one.name for one in GPUS]
    near = difflib.get_close_matches(wanted, [_plain(one) for one in names], n=1, cutoff=0.5)
    meant = [one for one in names if _plain(one).startswith(wanted)]  # with several sizes of memory
    meant = meant or [one for one in names if _plain(one) in near]
    nearest = f"did you mean {' or '.join(meant)}? " if meant else ""
    raise LaunchError(
        f"--gpu={name}: no GPU of this name is known; {nearest}there are {', '.join(names)}, and {CPU} for "
        "hosts without GPUs; for another write --gpu_memory=24GB"
    )


def gpu_of_model(model: str) -> Gpu | None:
    """Return the GPU that its driver calls so, as "NVIDIA A100-SXM4-80GB"; None if the table lacks it."""
    words = re.findall("[a-z0-9]+", model.lower().replace("gb", ""))
    joined = {"".join(words[at : at + number]) for at in range(len(words)) for number in (1, 2, 3)}
    if "laptop" in joined:  # another chip by the same name
        return None
    found = [one for one in GPUS if joined.issuperset(one.name.lower().split("-"))]
    return max(found, key=lambda one: len(one.name), default=None)


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace(" ", "").removesuffix("gb")
