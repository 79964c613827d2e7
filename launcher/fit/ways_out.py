"""Ways out for a job that does not fit: another configuration, or more hosts, in words and as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..wording import count
from .candidates import Candidate
from .verdict import gib


@dataclass(frozen=True, slots=True, kw_only=True)
class WayOut:
    """A configuration, on the job's own hosts or on more of their kind.

    Units: bytes of the fullest GPU with what is outside of torch, and of the fullest host; expected ones
    where it was not rehearsed
    """

    candidate: Candidate
    num_hosts: int | None  # None: the hosts of the job
    is_rehearsed: bool
    device_bytes: int
    host_bytes: int

    def text(self, given: Candidate) -> str:
        """Return what changes: "with stage 3 and the optimizer on cpu (118 GiB of each host)"."""
        changes = changes_of(given, self.candidate)
        words = [f"with {_joined(changes)}"] if changes else []
        if changes and self.candidate.placing.on_host:
            words.append(f"({gib(self.host_bytes)} of each host)")
        return " ".join([*words, *(["on " + count(self.num_hosts, "host")] if self.num_hosts else [])])

    def as_data(self) -> dict[str, Any]:
        """Return it for JSON."""
        return candidate_data(self.candidate) | {
            "hosts": self.num_hosts,
            "rehearsed": self.is_rehearsed,
            "device_bytes": self.device_bytes,
            "host_bytes": self.host_bytes,
        }


def ways_text(given: Candidate, ways: Sequence[WayOut]) -> str:
    """Return the end of the verdict's line: "fits with ..., or on 6 hosts"; empty without a way."""
    found = []
    for is_rehearsed, verb in ((True, "fits"), (False, "would fit by its bounds")):
        texts = [one.text(given) for one in ways if one.is_rehearsed == is_rehearsed]
        if texts:
            found.append(f"{verb} {', or '.join(texts)}")
    return "; ".join(found)


def changes_of(given: Candidate, other: Candidate) -> list[str]:
    """Return in words what another configuration changes."""
    before, after = given.placing, other.placing
    changes = [f"stage {after.stage}"] if after.stage != before.stage else []
    for there, here, where in (
        (after.on_host, before.on_host, "on cpu"),
        (before.on_host, after.on_host, "on the GPUs"),
    ):
        names = [f"the {name}" for name in there if name not in here]
        if names:
            changes.append(f"{' and '.join(names)} {where}")
    if other.setup.is_checkpointed != given.setup.is_checkpointed:
        changes.append(("" if other.setup.is_checkpointed else "no ") + "activation checkpointing")
    sizes = other.setup.mesh_sizes
    if sizes != given.setup.mesh_sizes:
        changes.append(f"--mesh={','.join(f'{name}={size}' for name, size in sizes.items()) or 'dp alone'}")
    if other.micro_batch_size != given.micro_batch_size:
        changes.append(f"micro batches of {other.micro_batch_size}")
    return changes


def candidate_data(candidate: Candidate) -> dict[str, Any]:
    """Return a configuration for JSON."""
    setup = candidate.setup
    return {
        "stage": setup.placing.stage,
        "offload_optimizer": setup.placing.has_optimizer_on_host,
        "offload_param": setup.placing.has_parameters_on_host,
        "gradient_checkpointing": setup.is_checkpointed,
        "mesh": setup.mesh_sizes,
        "micro_batch_size": candidate.micro_batch_size,
        "num_micro_batches": candidate.num_micro_batches,
    }


def _joined(words: Sequence[str]) -> str:
    """Return "a", "a and b", "a, b and c"."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))
