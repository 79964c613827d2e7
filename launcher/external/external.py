"""Description of a program that starts the processes of a job by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ..job.plan import Plan
from .rank_start import RankStart

HOSTFILE = "<hostfile>"  # in a command or a variable: the temporary file that will hold the hosts
TellsFailures = Callable[[str], tuple[str, int] | None]  # returns the failure in a line, and the exit code


class External(NamedTuple):
    """mpirun, srun or another one."""

    find_program: Callable[[bool], str]  # its name; LaunchError if it must be on this machine and is not
    # Makes the command, and the text of its file with the hosts.
    command: Callable[[RankStart], tuple[tuple[str, ...], str | None]]
    # The variables that give each field of the shim's ProcessIdentity.
    says_who: tuple[tuple[str, ...], ...]
    settings: tuple[tuple[str, str], ...] = ()  # variables for the command itself
    tells_failures: TellsFailures | None = None  # reads its stderr, where its exit code is not enough
    how_to_restart: str = "the batch system start the job again, or a loop in its script"
    check: Callable[[Plan], None] = lambda plan: None  # LaunchError for a plan that it cannot carry out
    must_be_told: bool = False  # it must hear of a worker that failed: [Note: Hydra and failures]
    gives_devices: bool = False  # it gives each process some of the host's devices
