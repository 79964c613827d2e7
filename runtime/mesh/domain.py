"""The domain of a parameter: which ranks share it, how it is divided over others, and what its gradients are
divided by.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from ..comm.collectives import Collectives
from ..comm.mesh import ALONE, Lines, make_axis, make_mesh, make_shard_axis
from ..comm.rank_group import Job, RankGroup
from ..comm.wire import Wire
from .axes import SAMPLES, Axes
from .cut import Cut
from .parts import Cuts, Parts

DENSE = "dense"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Domain:
    """One for each kind of parameter of a model; a sub-buffer holds parameters of one domain."""

    name: str
    comm: Collectives  # of the ranks that share its parameters and buffers
    sharers: Lines  # of all ranks: those that share such parameters are in one line
    parts: Parts | None = None  # of its parameters, each of which is divided over other ranks

    def cuts_of(self, param: nn.Parameter) -> Cuts | None:
        """Return how all parts of a parameter are cut, by rank; None if it is here as a whole."""
        return None if self.parts is None else self.parts.of(param)

    def cut_of(self, param: nn.Parameter) -> Cut | None:
        """Return how this rank's part of it is cut; None if it is here as a whole."""
        return None if self.parts is None else self.parts.own(param)

    def label(self, unit: str) -> str:
        """Return the name of its part of a unit, in messages and on the wire."""
        return f"unit '{unit}'" if self.name == DENSE else f"unit '{unit}' ({self.name})"


class Domains:
    """Those of one engine, and all ranks of its job."""

    def __init__(
        self, axes: Axes, *, shard_size: int, states_by_chunk: bool = False, divisor: int = 0
    ) -> None:
        """`shard_size` of the ranks that share dense parameters are in one shard axis; sums of gradients are
        divided by `divisor`; see `make_mesh`.

        Order:  every rank must call this in the same order: it may create process groups
        Errors: ValueError if `shard_size` does not divide those ranks
        """
        self.axes = axes
        self.wire = Wire()
        self.job = Job(self.wire, leaders=axes.leaders)
        self._all: list[Domain] = []
        self._of: dict[int, Domain] = {}  # by id of a parameter or buffer; the others are dense
        self.dense = self.add(
            DENSE,
            sharers=axes.lines(SAMPLES),
            copies=None if axes.tp == 1 else axes.lines(("tp",)),
            shard_size=shard_size,
            states_by_chunk=states_by_chunk,
            divisor=divisor,
        )
        self.sequence = ALONE if axes.sp == 1 else make_axis(axes.lines(("sp",)))
        self.data = self.dense.comm.mesh.sharers if axes.sp == 1 else make_axis(axes.lines(("dp",)))

    def add(
        self,
        name: str,
        *,
        sharers: Lines,
        shard_size: int,
        copies: Lines | None = None,
        states_by_chunk: bool = False,
        divisor: int = 0,
        params: Iterable[Tensor] = (),
        parts: Parts | None = None,
    ) -> Domain:
        """Make one, of these parameters and buffers, of which `parts` tells how they are divided; see
        `make_mesh`.

        Order: every rank must call this in the same order: it may create process groups
        """
        mesh = make_mesh(
            shard_size=shard_size,
            states_by_chunk=states_by_chunk,
            sharers=sharers,
            copies=copies,
            divisor=divisor,
        )
        domain = Domain(name=name, comm=Collectives(mesh, self.wire), sharers=sharers, parts=parts)
        self._all.append(domain)
        self._of |= {id(tensor): domain for tensor in params}
        return domain

    def of(self, tensor: Tensor) -> Domain:
        """Return the domain of a parameter or buffer of the model."""
        return self._of.get(id(tensor), self.dense)

    @property
    def holders(self) -> RankGroup:
        """The ranks that hold the model that this rank has, or parts of it: what a program does with it, they
        do together. Where stages of a pipeline are divided over tp, those at this rank's place along tp.
        """
        return self.job if self.axes.pp == 1 else self.dense.comm.sharers

    @property
    def holder_ranks(self) -> tuple[int, ...]:
        """Return them as ranks of the job, in their order."""
        return tuple(range(self.job.size)) if self.axes.pp == 1 else self.job.peers

    @property
    def copies_group(self) -> RankGroup:
        """Return the ranks that hold copies of dense parameters: this one's axis tp."""
        return RankGroup(self.dense.comm.mesh.copies, self.wire)

    @property
    def summands(self) -> tuple[int, ...]:
        """Return all ranks in the order in which what each has of a sum is added: of those that share
        parameters, in the order of their chunks.
        """
        chunks = self.dense.comm.mesh.chunks
        return tuple(
            rank for line in self.dense.sharers for _, rank in sorted(zip(chunks, line, strict=True))
        )

    def gather_beside(self) -> None:
        """Let parameters be gathered beside the rest, in an order of their own.

        Order: every rank must call this in the same order: it may create process groups
        """
        for domain in self._all:
            size = domain.comm.mesh.shard.size
            domain.comm.gather_beside(make_shard_axis(shard_size=size, sharers=domain.sharers))

    @property
    def is_divided(self) -> bool:
        """Whether some parameters are divided over ranks."""
        return any(domain.parts is not None for domain in self._all)

    def close(self) -> None:
        """Give up their process groups."""
        for domain in self._all:
            domain.comm.close()
        self.sequence = self.sequence.without_group()
        self.data = self.data.without_group() if self.axes.sp > 1 else self.data.place
