"""The axes of a model in stages, by the names that they have in a topology."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ...shared.axes import ORDER, Axes
from ..errors import ConfigError

# DeepSpeed's names, and "sequence", for which it has no name in a model with stages.
AXIS_OF = {"pipe": "pp", "data": "dp", "sequence": "sp", "model": "tp"}


class Topology(Protocol):
    """Argument of a PipelineModule that says where its ranks lie, such as a ProcessTopology."""

    def get_axis_names(self) -> Sequence[str]:
        """Return the names of the axes, the outermost first."""

    def get_dim(self, axis: str) -> int:
        """Return the size of an axis."""

    def world_size(self) -> int:
        """Return the number of ranks."""


def dimensions_of(axes: Axes) -> dict[str, int]:
    """Return the names of a job's axes with their sizes, the outermost first. Axes other than those of stages
    and data are left out if their size is 1.
    """
    sizes = {name: getattr(axes, axis) for name, axis in AXIS_OF.items()}
    names = sorted(sizes, key=lambda name: axes.order.index(AXIS_OF[name]))
    return {name: sizes[name] for name in names if name in ("pipe", "data") or sizes[name] > 1}


def axes_of(topology: Topology, world_size: int) -> Axes:
    """Return the axes of a topology's ranks.

    Errors: ConfigError for other axes than DeepSpeed's, or another number of ranks
    """
    names = topology.get_axis_names()
    if not set(names) <= set(AXIS_OF):
        raise ConfigError(
            f"PipelineModule(topology=...) has the axes {', '.join(names)}; give pipe, data, sequence if "
            "sequences are divided, and model if layers are, the outermost first"
        )
    sizes: dict[str, Any] = {AXIS_OF[name]: topology.get_dim(name) for name in names}
    if topology.world_size() != world_size:
        raise ConfigError(
            f"PipelineModule(topology=...) has {topology.world_size()} ranks, and the job has {world_size}"
        )
    order = [AXIS_OF[name] for name in names]
    return Axes(**sizes, order=(*(name for name in ORDER if name not in order), *order))
