"""Configurations that a job could have: stage, offload, micro batch, activation checkpointing and mesh.

The samples of a step stay the same: a smaller micro batch has more steps of accumulation. Arithmetic only.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..job.mesh import JobMesh

MICRO_BATCH, MICRO_BATCHES = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
AUTO = "auto"  # a trainer fills it in
# Keys of zero_optimization that are on the host, each with its old name, which is a flag.
_ON_HOST = {"offload_optimizer": "cpu_offload", "offload_param": "cpu_offload_param"}
_INNER = ("pp", "sp", "tp")  # ranks along these axes have parts of the same samples, or of their layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Placing:
    """The ZeRO stage, and what of it lies in host memory."""

    stage: int
    has_optimizer_on_host: bool = False
    has_parameters_on_host: bool = False

    @property
    def on_host(self) -> tuple[str, ...]:
        """Return the names of what is in host memory."""
        return (
            *(("optimizer",) if self.has_optimizer_on_host else ()),
            *(("parameters",) if self.has_parameters_on_host else ()),
        )

    @property
    def text(self) -> str:
        """Return it in words: "stage 3, optimizer and parameters on cpu"."""
        parts = self.on_host
        return f"stage {self.stage}" + (f", {' and '.join(parts)} on cpu" if parts else "")


# The fastest first, where more than one fits: each sends or copies more than the one before.
PLACINGS = (
    Placing(stage=1),
    Placing(stage=2),
    Placing(stage=3),
    Placing(stage=2, has_optimizer_on_host=True),
    Placing(stage=3, has_optimizer_on_host=True),
    Placing(stage=3, has_optimizer_on_host=True, has_parameters_on_host=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A configuration without its batch. `is_checkpointed` and `mesh` are the job's where nothing changes
    them; `mesh` is None where the job has none.
    """

    placing: Placing
    is_checkpointed: bool = False
    mesh: JobMesh | None = None
    says_mesh: bool = False  # the mesh is another than the job's, and its ds_config says it

    @property
    def mesh_sizes(self) -> dict[str, int]:
        """Return the axes of more than one rank, dp left out."""
        sizes = {name: 1 if self.mesh is None else self.mesh.size(name) for name in _INNER}
        return {name: size for name, size in sizes.items() if size > 1}

    @property
    def num_stages(self) -> int:
        """Return the stages of the pipeline."""
        return self.mesh_sizes.get("pp", 1)

    @property
    def num_holders(self) -> int:
        """Return the ranks that hold one copy of the model together, before ZeRO shares it."""
        return self.num_stages * self.mesh_sizes.get("tp", 1)

    @property
    def num_together(self) -> int:
        """Return the ranks that compute the same samples together."""
        return self.num_holders * self.mesh_sizes.get("sp", 1)

    @property
    def text(self) -> str:
        """Return it in words: "stage 2, checkpointing, tp=2"."""
        parts = [self.placing.text, *(["checkpointing"] if self.is_checkpointed else [])]
        return ", ".join([*parts, *(f"{name}={size}" for name, size in self.mesh_sizes.items())])


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A configuration. `num_micro_batches` are those of a rank in one step."""

    setup: Setup
    micro_batch_size: int
    num_micro_batches: int

    @property
    def placing(self) -> Placing:
        """Return the stage and the offload."""
        return self.setup.placing

    @property
    def text(self) -> str:
        """Return it in words: "stage 2, micro batch 8 x 4"."""
        return f"{self.setup.text}, micro batch {self.micro_batch_size} x {self.num_micro_batches}"

    def config(self, base: Mapping[str, Any]) -> dict[str, Any]:
        """Return the ds_config with this configuration; sizes of batches that a trainer fills in stay so."""
        made = copy.deepcopy(dict(base))
        for key, number in ((MICRO_BATCH, self.micro_batch_size), (MICRO_BATCHES, self.num_micro_batches)):
            if made.get(key) != AUTO:
                made[key] = number
        zero = dict(_zero_section(made))
        zero["stage"] = self.placing.stage
        are_on_host = (self.placing.has_optimizer_on_host, self.placing.has_parameters_on_host)
        for (key, old_name), is_on_host in zip(_ON_HOST.items(), are_on_host, strict=True):
            zero.pop(old_name, None)
            if not is_on_host:
                zero.pop(key, None)
            elif not isinstance(zero.get(key), dict) or zero[key].get("device") == "none":
                zero[key] = {"device": "cpu", "pin_memory": True}
        made["zero_optimization"] = zero
        if self.setup.says_mesh and self.setup.mesh_sizes:
            made["mesh"] = {**(made.get("mesh") or {}), **self.setup.mesh_sizes}
        return made


def placing_of(config: Mapping[str, Any]) -> Placing:
    """Return the placing that a ds_config asks for; a file on a disk counts as host memory."""
    given = _zero_section(config)

    def is_offloaded(key: str) -> bool:
        found = given.get(key)
        by_old_name = given.get(_ON_HOST[key]) is True
        return by_old_name or (isinstance(found, dict) and found.get("device", "none") != "none")

    stage = given.get("stage", 0)
    return Placing(
        stage=stage if isinstance(stage, int) else 0,
        has_optimizer_on_host=is_offloaded("offload_optimizer"),
        has_parameters_on_host=is_offloaded("offload_param"),
    )


def _zero_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return zero_optimization; its old form is true or false."""
    given = config.get("zero_optimization")
    return given if isinstance(given, dict) else {"stage": int(given is True)}


def has_own_batch(config: Mapping[str, Any]) -> bool:
    """Tell whether a trainer fills in the sizes of batches, which the ds_config cannot change then."""
    return AUTO in (config.get(MICRO_BATCH), config.get(MICRO_BATCHES))


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, the largest first."""
    return [one for one in range(number, 0, -1) if number % one == 0]
