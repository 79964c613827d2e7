"""Rows of a look at hosts, one for each fact: its values, and their hosts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

from ..wording import shown_ms, shown_size
from .check_facts import ClusterFacts, HostFacts
from .check_gpus import GPU_WORDS

CLOCK_SAME_S = 0.1
NUM_VALUES_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class FactRow:
    """One fact: its values, the most frequent first, each with its hosts and whether it differs from most."""

    label: str
    values: tuple[tuple[str, tuple[str, ...], bool], ...]

    @property
    def is_same(self) -> bool:
        return len(self.values) == 1


def rows_of(cluster: ClusterFacts) -> Iterable[FactRow]:
    """Yield a row for each fact that some host gave."""
    for label, show in _WORDS.items():
        values = {host.name: show(host) for host in cluster.hosts}
        row = _row_of_words(label, {name: value for name, value in values.items() if value is not None})
        if row is not None:
            yield row
    for label, question, key in _QUANTITIES:
        sizes = {
            host.name: _get(host, question, key)
            for host in cluster.hosts
            if not _get(host, question, "problem")
        }
        row = _row_of_sizes(label, {name: size for name, size in sizes.items() if size is not None})
        if row is not None:
            yield row


def _row_of_words(label: str, values: dict[str, str]) -> FactRow | None:
    counts = Counter(values.values()).most_common()
    if not counts:
        return None
    has_majority = len(counts) > 1 and counts[0][1] > counts[1][1]
    shown = [
        (value, tuple(name for name, one in values.items() if one == value), has_majority and place > 0)
        for place, (value, _) in enumerate(counts)
    ]
    if len(shown) > NUM_VALUES_SHOWN:
        rest = tuple(name for _, names, _ in shown[NUM_VALUES_SHOWN:] for name in names)
        more = f"{len(shown) - NUM_VALUES_SHOWN} more values"
        shown = [*shown[:NUM_VALUES_SHOWN], (more, rest, has_majority)]
    return FactRow(label=label, values=tuple(shown))


def _row_of_sizes(label: str, sizes: dict[str, int]) -> FactRow | None:
    """Return a row with the range of the sizes and the host with the least: sizes differ a little on every
    host.
    """
    if not sizes:
        return None
    least, most = min(sizes.values()), max(sizes.values())
    if shown_size(least) == shown_size(most):
        return FactRow(label=label, values=((shown_size(least), tuple(sizes), False),))
    smallest = tuple(name for name, size in sizes.items() if shown_size(size) == shown_size(least))
    others = tuple(name for name in sizes if name not in smallest)
    low = min(sizes[name] for name in others)
    rest = (
        shown_size(low) if shown_size(low) == shown_size(most) else f"{shown_size(low)} to {shown_size(most)}"
    )
    is_odd = least < median(sizes.values()) / 2
    return FactRow(label=label, values=((rest, others, False), (shown_size(least), smallest, is_odd)))


def _hostname(host: HostFacts) -> str | None:
    name = _get(host, "system", "hostname")
    is_same = isinstance(name, str) and name.partition(".")[0] == host.name.partition(".")[0]
    return "as in the hostfile" if is_same else name


def _torch(host: HostFacts) -> str | None:
    found = host.answers.get("torch")
    if found is None:
        return None
    return ", ".join(filter(None, (found["version"], found["platform"]))) or "none"


def _nccl(host: HostFacts) -> str | None:
    """Return torch's NCCL. A torch without CUDA has none, which is no fact about NCCL."""
    return _get(host, "torch", "nccl") or None


def _gpus(host: HostFacts) -> str | None:
    found = host.answers.get("gpu")
    if found is None:
        return None
    kinds = Counter(found["names"])
    if sum(kinds.values()) != found["num"]:
        return str(found["num"] or "none")
    return ", ".join(f"{number} x {name}" for name, number in kinds.items()) or "none"


def _links(host: HostFacts) -> str | None:
    return ", ".join(_get(host, "link", "names") or ()) or None


def _clock(host: HostFacts) -> str | None:
    if host.clock_offset_s is None:
        return None
    if abs(host.clock_offset_s) - host.clock_error_s < CLOCK_SAME_S:
        return f"within {CLOCK_SAME_S:g} s of this machine's"
    return f"{host.clock_offset_s:+.1f} s (+- {shown_ms(host.clock_error_s)})"


def _text_of(question: str, key: str) -> Callable[[HostFacts], str | None]:
    def show(host: HostFacts) -> str | None:
        value = _get(host, question, key)
        return None if value is None else str(value) or "none"

    return show


def _limit_of(key: str, *, in_bytes: bool) -> Callable[[HostFacts], str | None]:
    def show(host: HostFacts) -> str | None:
        value = _get(host, "system", key)
        if value is None:
            return None
        return "unlimited" if value < 0 else shown_size(value) if in_bytes else str(value)

    return show


def _get(host: HostFacts, question: str, key: str) -> Any:
    return host.answers.get(question, {}).get(key)


_WORDS: dict[str, Callable[[HostFacts], str | None]] = {
    "host name": _hostname,
    "Python": _text_of("python", "version"),
    "PyTorch": _torch,
    "NCCL": _nccl,
    "NVIDIA driver": _text_of("gpu", "driver"),
    "GPUs": _gpus,
    **GPU_WORDS,
    "CPUs": _text_of("system", "num_cpus"),
    "machine": _text_of("system", "machine"),
    "kernel": _text_of("system", "kernel"),
    "numactl": _text_of("system", "numactl"),
    "ulimit -l": _limit_of("memlock", in_bytes=True),
    "ulimit -n": _limit_of("nofile", in_bytes=False),
    "links": _links,
    "clock": _clock,
}
_QUANTITIES = (
    ("memory", "system", "memory_bytes"),
    ("memory free", "system", "memory_free_bytes"),
    ("/dev/shm", "shm", "size_bytes"),
    ("/dev/shm free", "shm", "free_bytes"),
    ("/tmp free", "tmp", "free_bytes"),
    ("folder free", "cwd", "free_bytes"),
)
