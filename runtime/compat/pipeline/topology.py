"""Places of ranks under DeepSpeed's names: for programs that ask.

Source: DeepSpeed 0.19.8 runtime/pipe/topology.py, the same names and numbers
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ....shared.axes import Axes
from ...comm.mesh import make_axis
from ...errors import ConfigError
from ...pipeline.topology import AXIS_OF, axes_of, dimensions_of

# Along which axes the ranks of a group lie.
_LINES = {
    "pipe": ("pp",),
    "data": ("dp",),
    "sequence": ("sp",),
    "slice": ("tp",),
    "model": ("pp", "tp"),  # all ranks that hold one copy of the model together
}


class ProcessTopology:
    """Ranks on a grid with named axes; the last axis is the innermost."""

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        if len(axes) != len(dims):
            raise ConfigError(f"ProcessTopology: {len(axes)} axes and {len(dims)} sizes; give one for each")
        self.axes, self.dims = list(axes), list(dims)
        # The class is made per topology, since its fields are the axes.
        self.ProcessCoord: Any = namedtuple("ProcessCoord", axes)  # type: ignore[misc]
        places: Any = product(*(range(size) for size in dims))
        self.mapping: dict[Any, int] = {self.ProcessCoord(*place): rank for rank, place in enumerate(places)}

    def get_rank(self, **coord_kwargs: int) -> int:
        """Return the rank with this index along every axis.

        Errors: ValueError if an axis is left out; KeyError if there is no such rank
        """
        if len(coord_kwargs) != len(self.axes):
            raise ValueError(f"get_rank() was given {coord_kwargs}; it wants {', '.join(self.axes)}")
        return self.mapping[self.ProcessCoord(**coord_kwargs)]

    def get_axis_names(self) -> list[str]:
        """Return the names of the axes, the outermost first."""
        return self.axes

    def get_rank_repr(
        self,
        rank: int,
        omit_axes: Sequence[str] = ("data", "pipe"),
        inner_sep: str = "_",
        outer_sep: str = "-",
    ) -> str:
        """Return the rank's place along the other axes as a text, "model_00"."""
        coord = self.get_coord(rank)
        kept = [axis for axis in self.axes if axis not in set(omit_axes)]
        return outer_sep.join(f"{axis}{inner_sep}{getattr(coord, axis):02d}" for axis in kept)

    def get_dim(self, axis: str) -> int:
        """Return the size of an axis; 0 if there is no such axis."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_coord(self, rank: int) -> Any:
        """Return the rank's index along every axis, as a named tuple.

        Errors: ValueError if there is no such rank
        """
        for coord, mapped in self.mapping.items():
            if mapped == rank:
                return coord
        raise ValueError(f"rank {rank} is not in this topology of {self.world_size()} ranks")

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Return all lines of ranks that differ along this axis alone; none if there is no such axis."""
        if axis not in self.axes:
            return []
        lines: dict[tuple[int, ...], list[int]] = {}
        for coord, rank in self.mapping.items():
            rest = tuple(getattr(coord, one) for one in self.axes if one != axis)
            lines.setdefault(rest, []).append(rank)
        return [lines[rest] for rest in sorted(lines)]

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """Return the ranks with these indices."""
        return [
            rank
            for coord, rank in self.mapping.items()
            if all(getattr(coord, axis) == index for axis, index in filter_kwargs.items())
        ]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Return the ranks with this index along the axis."""
        return self.filter_match(**{axis: idx})

    def world_size(self) -> int:
        """Return the number of ranks."""
        return len(self.mapping)

    def __str__(self) -> str:
        return str(self.mapping)


class PipeDataParallelTopology(ProcessTopology):
    """Topology of stages, each trained by so many ranks on data of their own."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data"], dims=[num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Topology of pipeline and data in which each layer is divided over neighbours."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data", "model"], dims=[num_pp, num_dp, num_mp])


def topology_of(axes: Axes) -> ProcessTopology:
    """Return the topology of a job."""
    dims = dimensions_of(axes)
    if list(dims) == ["pipe", "data"]:
        return PipeDataParallelTopology(num_pp=axes.pp, num_dp=axes.dp)
    if list(dims) == ["pipe", "data", "model"]:
        return PipeModelDataParallelTopology(num_pp=axes.pp, num_mp=axes.tp, num_dp=axes.dp)
    return ProcessTopology(axes=list(dims), dims=list(dims.values()))


class PipelineParallelGrid:
    """This rank's place in the topology, and its groups: what DeepSpeed calls an mpu.

    For each name of `_LINES` it has get_NAME_parallel_rank(), get_NAME_parallel_world_size() and
    get_NAME_parallel_group(), which is None where this rank is the only one. The NAMEs "tensor_model" and
    "slice" mean the same.
    """

    def __init__(self, topology: ProcessTopology, process_group: object | None = None) -> None:
        """Order: every rank must call this: it makes process groups"""
        self._topo, self.global_rank = topology, dist.get_rank()
        self._axes = axes = axes_of(topology, dist.get_world_size())
        self._place = axes.coordinates(self.global_rank)
        self.world_size = axes.world_size
        self.pipe_parallel_size, self.data_parallel_size = axes.pp, axes.dp
        self.model_parallel_size = self.slice_parallel_size = axes.tp
        self.stage_id, self.data_parallel_id = self._place["pp"], self._place["dp"]
        self._lines = {name: make_axis(axes.lines(along)) for name, along in _LINES.items()}

    @property
    def topology(self) -> ProcessTopology:
        """The topology of the job."""
        return self._topo

    def close(self) -> None:
        """Give up its groups."""
        self._lines = {name: axis.without_group() for name, axis in self._lines.items()}

    def get_stage_id(self) -> int:
        """Return the number of this rank's stage."""
        return self.stage_id

    def get_data_parallel_id(self) -> int:
        """Return which part of the data this rank has."""
        return self.data_parallel_id

    def get_global_rank(self) -> int:
        """Return the rank in the job."""
        return self.global_rank

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Return the ranks that train the same layers on data of their own."""
        return list(self._axes.line_of(self.global_rank, ("dp",)))

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """Return the rank that has this place in another stage."""
        known = {name: self._place[axis] for name, axis in AXIS_OF.items() if name != "pipe"} | kwargs
        places = {AXIS_OF[name]: index for name, index in known.items()}
        return self._axes.rank_at(pp=stage_id, **places)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[[], Any]: ...


def _getter(line: str, attribute: str) -> Callable[[PipelineParallelGrid], Any]:
    def get(self: PipelineParallelGrid) -> Any:
        return getattr(self._lines[line], attribute)

    return get


for _name in (*_LINES, "tensor_model"):
    for _what, _attribute in (("rank", "index"), ("world_size", "size"), ("group", "group")):
        _getter_of_line = _getter("slice" if _name == "tensor_model" else _name, _attribute)
        _getter_of_line.__name__ = f"get_{_name}_parallel_{_what}"
        setattr(PipelineParallelGrid, _getter_of_line.__name__, _getter_of_line)
