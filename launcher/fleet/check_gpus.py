"""NVML's facts about GPUs of hosts: rows of a report, and faults of single GPUs.

GPUs have the numbers that nvidia-smi gives them. A number that a GPU does not give is below zero.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..node.observe.core_binding import format_ranges
from ..wording import count, shown_size
from .check_facts import ClusterFacts, Finding, HostFacts
from .nvml_program import NO_LIBRARY, NO_MODULE

Gpu = Mapping[str, Any]

# Source: NVML API reference, nvmlClocksThrottleReasons. The reasons for idle GPUs, power caps and clocks set
# by somebody are left out: these are not faults.
_HEAT_BY_DRIVER, _HEAT, _POWER_BRAKE, _HARDWARE = 0x20, 0x40, 0x80, 0x08
_THROTTLING = {
    _HEAT: "heat",
    _HEAT_BY_DRIVER: "heat (limited by the driver)",
    _POWER_BRAKE: "the power brake",
    _HARDWARE: "the hardware",  # this bit is also set for heat and for the power brake
}
_THROTTLING_ADVICE = (
    "look at the cooling and the power supply of the host, and at nvidia-smi -q -d PERFORMANCE"
)


def faults_of_gpus(cluster: ClusterFacts) -> Iterable[Finding]:
    """Yield the faults host by host. Values are compared with the GPUs of all hosts."""
    everywhere = [gpu for host in cluster.hosts for gpu in _gpus(host)]
    usual_size = Counter(shown_size(gpu["memory_bytes"]) for gpu in everywhere if gpu["memory_bytes"] > 0)
    num_links: dict[str, int] = {}
    for gpu in everywhere:
        num_links[gpu["name"]] = max(num_links.get(gpu["name"], 0), gpu["num_nvlinks_up"])
    for host in cluster.hosts:
        problem = _problem_of_nvml(host)
        if problem not in ("", NO_MODULE, NO_LIBRARY):
            yield Finding(
                hosts=(host.name,),
                text=f"NVML does not answer: {problem}; look at nvidia-smi and the kernel's log there",
            )
        yield from _lost(host)
        yield from _memory_errors(host)
        yield from _throttled(host)
        yield from _narrow_links(host)
        yield from _nvlinks_down(host, num_links)
        if len(usual_size) > 1:
            yield from _other_sizes(host, usual_size.most_common(1)[0][0])


def _lost(host: HostFacts) -> Iterable[Finding]:
    for problem, named in _by_value(host, lambda gpu: gpu["problem"]):
        text = (
            f"{named} cannot be used: {problem}; look for it in the kernel's log (Xid), and restart the host"
        )
        yield Finding(hosts=(host.name,), text=text, is_problem=True)


def _memory_errors(host: HostFacts) -> Iterable[Finding]:
    for number, named in _by_value(host, lambda gpu: max(0, gpu["ecc_errors"])):
        errors = count(number, "uncorrected memory error")
        yield Finding(
            hosts=(host.name,),
            text=f"{named}: {errors} (ECC) since the driver was loaded; reset it (nvidia-smi --gpu-reset), "
            "leave it out with --exclude, and have it replaced if they come back",
        )


def _throttled(host: HostFacts) -> Iterable[Finding]:
    for why, named in _by_value(host, _why_throttled):
        yield Finding(hosts=(host.name,), text=f"{named}: clocks are lowered by {why}; {_THROTTLING_ADVICE}")


def _narrow_links(host: HostFacts) -> Iterable[Finding]:
    """Find PCIe links that are too narrow. Only the width is compared: an idle GPU lowers the generation to
    save power.
    """

    def narrow(gpu: Gpu) -> str:
        width, widest = gpu["pcie_width"], gpu["max_pcie_width"]
        return f"a PCIe link of x{width} where x{widest} is possible" if 0 < width < widest else ""

    for link, named in _by_value(host, narrow):
        yield Finding(
            hosts=(host.name,),
            text=f"{named}: {link}; seat the card or riser again, or move it to another slot",
        )


def _nvlinks_down(host: HostFacts, num_links: Mapping[str, int]) -> Iterable[Finding]:
    """Find GPUs with fewer working NVLinks than others of the same kind: a card without bridges has links
    that lead nowhere.
    """

    def down(gpu: Gpu) -> str:
        most = num_links[gpu["name"]]
        return f"{gpu['num_nvlinks_up']} NVLinks are up, of {most}" if gpu["num_nvlinks_up"] < most else ""

    for links, named in _by_value(host, lambda gpu: "" if gpu["problem"] else down(gpu)):
        text = f"{named}: {links}; look at nvidia-smi nvlink --status, and at the log of nvidia-fabricmanager"
        yield Finding(hosts=(host.name,), text=text)


def _other_sizes(host: HostFacts, usual: str) -> Iterable[Finding]:
    def other(gpu: Gpu) -> str:
        size = shown_size(gpu["memory_bytes"]) if gpu["memory_bytes"] > 0 else usual
        return "" if size == usual else size

    for size, named in _by_value(host, other):
        text = f"{named}: {size} of memory, where most GPUs have {usual}; the smallest one decides what fits"
        yield Finding(hosts=(host.name,), text=text)


def _by_value(host: HostFacts, value_of: Callable[[Gpu], Any]) -> list[tuple[Any, str]]:
    """Return each value with its GPUs, such as `GPU 0-3,5`; a value that is empty or 0 is left out."""
    found: dict[Any, list[int]] = {}
    for gpu in _gpus(host):
        found.setdefault(value_of(gpu), []).append(gpu["index"])
    return [(value, f"GPU {format_ranges(sorted(indices))}") for value, indices in found.items() if value]


def _why_throttled(gpu: Gpu) -> str:
    reasons = max(0, gpu["throttling"])
    if reasons & (_HEAT | _POWER_BRAKE):
        reasons &= ~_HARDWARE
    return " and ".join(text for bit, text in _THROTTLING.items() if reasons & bit)


def _gpus(host: HostFacts) -> tuple[Gpu, ...]:
    return tuple(host.answers.get("nvml", {}).get("gpus", ()))


def _problem_of_nvml(host: HostFacts) -> str:
    """Return why NVML gave no facts; empty if it gave some, or if the host has no NVIDIA GPUs or no Python
    for it.
    """
    has_driver = bool(host.answers.get("gpu", {}).get("driver"))
    has_python = not host.answers.get("python", {}).get("problem")
    return str(host.answers.get("nvml", {}).get("problem", "")) if has_driver and has_python else ""


# The rows.


def _why_untold(host: HostFacts) -> str | None:
    problem = _problem_of_nvml(host)
    if problem == NO_MODULE:
        return f"{problem}; for more about GPUs: {host.python} -m pip install nvidia-ml-py"
    return problem or None


def _cuda(host: HostFacts) -> str | None:
    cuda = host.answers.get("nvml", {}).get("cuda", 0)
    return f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda > 0 else None


def _counted(say: Callable[[Gpu], str]) -> Callable[[HostFacts], str | None]:
    """Return a function that makes a host's cell, of the form `8 x TEXT`; GPUs with an empty text do not
    count.
    """

    def show(host: HostFacts) -> str | None:
        found = Counter(filter(None, map(say, _gpus(host))))
        return ", ".join(f"{number} x {text}" for text, number in found.items()) or None

    return show


def _listed(key: str, say: Callable[[Gpu], Any]) -> Callable[[HostFacts], str | None]:
    """Return a function that makes a host's cell: values with their GPUs, else `none`; empty if no GPU gives
    the number `key`.
    """

    def show(host: HostFacts) -> str | None:
        if not any(gpu[key] >= 0 for gpu in _gpus(host)):
            return None
        return ", ".join(f"{value} on {named}" for value, named in _by_value(host, say)) or "none"

    return show


def _pcie(gpu: Gpu) -> str:
    return f"gen {gpu['max_pcie_generation']} x{gpu['pcie_width']}" if gpu["pcie_width"] > 0 else ""


def _nvlinks(gpu: Gpu) -> str:
    return f"{gpu['num_nvlinks_up']} of {gpu['num_nvlinks']} up" if gpu["num_nvlinks"] else ""


GPU_WORDS: dict[str, Callable[[HostFacts], str | None]] = {
    "NVML": _why_untold,
    "driver's CUDA": _cuda,
    "GPU memory": _counted(lambda gpu: shown_size(gpu["memory_bytes"]) if gpu["memory_bytes"] > 0 else ""),
    "GPU PCIe": _counted(_pcie),
    "NVLinks": _counted(_nvlinks),
    "ECC errors": _listed("ecc_errors", lambda gpu: max(0, gpu["ecc_errors"])),
    "throttling": _listed("throttling", _why_throttled),
}
