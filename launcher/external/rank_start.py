"""The request to MPI or Slurm, before it becomes a command line of one of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStart:
    """One process for each rank, on these hosts in this order."""

    program: str  # name or path of mpirun or srun
    slots: tuple[tuple[str, int], ...]  # each host, and how many ranks it gets
    words: tuple[str, ...]  # the command of every rank
    names: tuple[str, ...]  # names of the variables that the command needs
    launcher_args: tuple[str, ...] = ()

    @property
    def num_ranks(self) -> int:
        return sum(number for _, number in self.slots)

    @property
    def hosts_by_rank(self) -> str:
        """Return one line for each rank: the rank's host."""
        return "".join(f"{host}\n" * number for host, number in self.slots)
