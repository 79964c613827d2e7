"""The domain of a parameter: which ranks share it, how it is divided over other ranks, and by what number
sums of its gradients are divided.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from ...shared.axes import HOLDERS, SAMPLES, Axes
from ..comm.collectives import Collectives
from ..comm.flight_recorder import DATA_LANE, Line
from ..comm.mesh import ALONE, Axis, Lines, make_axis, make_mesh, make_shard_axis
from ..comm.rank_group import Job, RankGroup
from ..comm.wire import Wire
from .cut import Cut
from .names import NamesByRank
from .parts import Cuts, Parts

DENSE = "dense"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Domain:
    """Ranks and parts of one kind of parameter of a model; a sub-buffer holds parameters of one domain."""

    name: str
    comm: Collectives  # among the ranks that share its parameters and buffers
    sharers: Lines  # all ranks: those that share such parameters are in one line
    shard_size: int | None = None  # ranks of a shard axis; None: the whole line
    parts: Parts | None = None  # set if each of its parameters is divided over other ranks
    names: NamesByRank | None = None  # set if other ranks use the same names for other parameters

    def cuts_of(self, param: nn.Parameter) -> Cuts | None:
        """Return how all parts of a parameter are cut, by rank; None if this rank holds the whole
        parameter.
        """
        return None if self.parts is None else self.parts.of(param)

    def cut_of(self, param: nn.Parameter) -> Cut | None:
        """Return how this rank's part of a parameter is cut; None if this rank holds the whole."""
        return None if self.parts is None else self.parts.own(param)

    def true_name(self, name: str) -> str:
        """Return the name in the whole model of the parameter that this rank calls `name`."""
        return name if self.names is None else self.names.own(name)

    def true_names(self, name: str) -> tuple[str, ...]:
        """Return the names in the whole model of the parameters that any rank calls `name`."""
        return (name,) if self.names is None else self.names.all(name)

    def label(self, unit: str) -> str:
        """Return the name of this domain's part of a unit, in messages and on the wire."""
        return f"unit '{unit}'" if self.name == DENSE else f"unit '{unit}' ({self.name})"


class Domains:
    """Domains of one engine, and all ranks of its job."""

    def __init__(
        self, axes: Axes, *, shard_size: int, states_by_chunk: bool = False, divisor: int = 0
    ) -> None:
        """`shard_size`: how many of the ranks that share dense parameters are in one shard axis. `divisor`:
        by what sums of gradients are divided. See `make_mesh`.

        Order:  every rank must call this in the same order: it may create process groups
        Errors: ValueError if `shard_size` does not divide those ranks
        """
        self.axes = axes
        self.wire = Wire()
        self.job = Job(self.wire, leaders=axes.leaders, places=axes.places)
        self._all: list[Domain] = []
        self._groups: list[RankGroup] = []
        # axis -> all ranks in lines, along which they send each other activations
        self.data_lines: dict[str, Lines] = {
            name: axes.lines((name,)) for name in ("sp", "tp") if getattr(axes, name) > 1
        }
        # DeepSpeed's name -> the ranks that hold all experts together, and those that hold the same ones
        self.of_experts: dict[str, tuple[Axis, Axis]] = {}
        self._of: dict[int, Domain] = {}  # id of a parameter or buffer -> domain; the others are dense
        # the ranks that hold equal copies of parameters which are not divided over tp
        self.copies: Lines | None = None if axes.tp == 1 else axes.lines(("tp",))
        self.dense = self.add(
            DENSE,
            sharers=axes.lines(SAMPLES),
            copies=self.copies,
            shard_size=shard_size,
            states_by_chunk=states_by_chunk,
            divisor=divisor,
        )
        self._stage: RankGroup | None = None  # all ranks of this rank's stage, where there are several stages
        if axes.pp > 1:
            self._stage = self.dense.comm.sharers
            if axes.tp > 1:
                line = Line("", axes.line_of(self.job.index, HOLDERS))
                self._stage = RankGroup(make_axis(axes.lines(HOLDERS)), self.wire, line=line)
        self.sequence = ALONE if axes.sp == 1 else make_axis(axes.lines(("sp",)))
        self.data = self.dense.comm.mesh.sharers if axes.sp == 1 else make_axis(axes.lines(("dp",)))

    def add(  # noqa: PLR0913
        self,
        name: str,
        *,
        sharers: Lines,
        shard_size: int | None,
        copies: Lines | None = None,
        states_by_chunk: bool = False,
        divisor: int = 0,
        params: Iterable[Tensor] = (),
        parts: Parts | None = None,
        names: NamesByRank | None = None,
    ) -> Domain:
        """Make a domain of these parameters and buffers. `parts` tells how they are divided, `names` what
        they are called in the whole model; see `make_mesh`.

        Order: every rank must call this in the same order: it may create process groups
        """
        mesh = make_mesh(
            shard_size=shard_size,
            states_by_chunk=states_by_chunk,
            sharers=sharers,
            copies=copies,
            divisor=divisor,
        )
        domain = Domain(
            name=name,
            comm=Collectives(mesh, self.wire, line=self._line_of(name, sharers)),
            sharers=sharers,
            shard_size=shard_size,
            parts=parts,
            names=names,
        )
        self._all.append(domain)
        self._of |= {id(tensor): domain for tensor in params}
        return domain

    def _line_of(self, name: str, sharers: Lines) -> Line:
        """Return the ranks that share its parameters; an empty line if the same ranks share the
        dense ones.
        """
        if name == DENSE or list(map(tuple, sharers)) == list(map(tuple, self.dense.sharers)):
            return Line()
        return Line("", tuple(next(line for line in sharers if self.job.index in line)))

    def add_group(self, lines: Lines, *, axis: str) -> RankGroup:
        """Make a process group of each line, for activations that its ranks send each other. `axis` is what
        the lines are called.

        Order: every rank must call this in the same order: it may create process groups
        """
        self.data_lines[axis] = lines
        line = Line(axis, tuple(next(line for line in lines if self.job.index in line)))
        made = make_shard_axis(shard_size=len(lines[0]), sharers=lines)
        group = RankGroup(made, self.wire, line=line, lane=DATA_LANE)
        self._groups.append(group)
        return group

    @property
    def exchanges_tokens(self) -> bool:
        """True if ranks with different samples send each other tokens in the middle of a backward."""
        return bool(self._groups)

    def of(self, tensor: Tensor) -> Domain:
        """Return the domain of a parameter or buffer of the model."""
        return self._of.get(id(tensor), self.dense)

    def join(self, param: Tensor, others: Iterable[Tensor]) -> None:
        """Let other tensors be shared by those that share the parameter."""
        if id(param) in self._of:
            self._of |= {id(one): self._of[id(param)] for one in others}

    def tie(self, name: str, *, stages: Sequence[int], params: Iterable[Tensor], is_sharded: bool) -> None:
        """Let the ranks of several stages of the pipeline share some parameters and buffers. `params` are
        this rank's, empty if it is in another stage. Their gradients are averaged over the data in each stage
        and summed over the stages, as if one stage had all the uses.

        Order: every rank must call this in the same order: it may create process groups
        """
        places = [self.axes.coordinates(line[0])["pp"] for line in self.dense.sharers]
        shared: dict[int, tuple[int, ...]] = {}  # place in the stage -> ranks
        apart = []
        per_stage = len(places) // self.axes.pp
        for index, (place, line) in enumerate(zip(places, self.dense.sharers, strict=True)):
            if place in stages:
                shared[index % per_stage] = (*shared.get(index % per_stage, ()), *line)
            else:
                apart.append(tuple(line))
        self.add(
            name,
            sharers=[*shared.values(), *apart],
            shard_size=None if is_sharded else 1,
            copies=self.copies,
            divisor=self.dense.comm.mesh.divisor or self.dense.comm.sharers.size,
            params=params,
        )

    @property
    def all(self) -> tuple[Domain, ...]:
        """Return the domains so far, the dense one first."""
        return tuple(self._all)

    @property
    def together(self) -> tuple[str, int] | None:
        """Return an axis along which ranks compute each forward together, each with tokens of its own, and
        its size; None if there is none.
        """
        experts = [together.size for together, _ in self.of_experts.values()]
        sizes = {"pp": self.axes.pp, "sp": self.axes.sp, "ep": max(experts, default=1)}
        return next((one for one in sizes.items() if one[1] > 1), None)

    @property
    def holders(self) -> RankGroup:
        """Return the ranks that hold this rank's model or parts of it, and so do together what a program does
        with the model. In a pipeline these are the ranks of this rank's stage.
        """
        return self._stage or self.job

    @property
    def holder_ranks(self) -> tuple[int, ...]:
        """Return the holders as ranks of the job, in their order."""
        if self._stage is None:
            return tuple(range(self.job.size))
        return self.axes.line_of(self.job.index, HOLDERS)

    def place_among_sharers(self, domain: Domain, holder: int) -> int | None:
        """Return the index, among the ranks that share a domain's parameters with this one, of holder number
        `holder` or of the rank whose copy it holds; None if that holder shares them with other ranks.
        """
        rank = self.holder_ranks[holder]
        copies = {rank} if self.copies is None else set(self.axes.line_of(rank, ("tp",)))
        line = next(line for line in domain.sharers if self.job.index in line)
        return next((place for place, one in enumerate(line) if one in copies), None)

    @property
    def leads(self) -> bool:
        """True if this rank is the first of the ranks that hold the same layers or parts of them."""
        return self.job.index in self.stage_leaders

    @property
    def stage_leaders(self) -> tuple[int, ...]:
        """Return the first rank of each stage, which reports and writes for the stage."""
        return self.axes.line_of(0, ("pp",))

    @property
    def copies_group(self) -> RankGroup:
        """Return the ranks that hold copies of this rank's dense parameters: its axis tp."""
        line = Line("tp", self.axes.line_of(self.job.index, ("tp",)))
        return RankGroup(self.dense.comm.mesh.copies, self.wire, line=line, lane=DATA_LANE)

    @property
    def summands(self) -> tuple[int, ...]:
        """Return all ranks in the order in which their parts of a sum are added; ranks that share parameters
        follow in the order of their chunks.
        """
        chunks = self.dense.comm.mesh.chunks
        return tuple(
            rank for line in self.dense.sharers for _, rank in sorted(zip(chunks, line, strict=True))
        )

    def gather_beside(self) -> None:
        """Let parameters be gathered concurrently with other collectives, in an order of their own.

        Order: every rank must call this in the same order: it may create process groups
        """
        for domain in self._all:
            domain.comm.gather_beside(make_shard_axis(shard_size=domain.shard_size, sharers=domain.sharers))

    @property
    def is_divided(self) -> bool:
        """True if some parameters are divided over ranks."""
        return any(domain.parts is not None for domain in self._all)

    def close(self) -> None:
        """Give up the process groups of all domains."""
        for domain in self._all:
            domain.comm.close()
        if self._stage is not None and self.axes.tp > 1:
            self._stage.axis.without_group()
        for group in self._groups:
            group.axis = group.axis.without_group()
        self.sequence = self.sequence.without_group()
        self.data = self.data.without_group() if self.axes.sp > 1 else self.data.place
