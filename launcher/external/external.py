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

    # Returns the program's name; LaunchError if it must be on this machine and is not
    find_program: Callable[[bool], str]
    # Makes the command, and the text of its file with the hosts.
    command: Callable[[RankStart], tuple[tuple[str, ...], str | None]]
    # For each field of the shim's ProcessIdentity, the variables that may hold it.
    says_who: tuple[tuple[str, ...], ...]
    settings: tuple[tuple[str, str], ...] = ()  # variables that the command itself needs
    # Reads the command's stderr, for programs whose exit code does not tell enough
    tells_failures: TellsFailures | None = None
    how_to_restart: str = "the batch system start the job again, or a loop in its script"
    # LaunchError for a plan that the program cannot carry out
    check: Callable[[Plan], None] = lambda plan: None
    must_be_told: bool = False  # a worker that failed must tell the program: [Note: Hydra and failures]
    gives_devices: bool = False  # the program itself gives each process some of the host's devices
