"""The program that starts the processes, and its arguments if it is MPI, Slurm or ssh."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import click

from ..errors import LaunchError
from .option import option, record


class Launcher(NamedTuple):
    """A value of --launcher. `program` runs on this machine and takes --launcher_args; empty: none."""

    name: str
    program: str = ""
    # The program itself starts and watches the processes; see launcher/external/runner.py, EXTERNAL
    starts_itself: bool = False
    is_local: bool = False  # it starts processes on this machine only


SSH = Launcher("ssh")
OPENSSH = Launcher("openssh", program="ssh")
PDSH = Launcher("pdsh")  # the same as OPENSSH; see launcher/run/pdsh.py
SLURM = Launcher("slurm", program="srun", starts_itself=True)
_ROWS = (
    SSH,
    OPENSSH,
    Launcher("local", is_local=True),
    PDSH,
    Launcher("openmpi", program="mpirun", starts_itself=True),
    Launcher("mpich", program="mpirun", starts_itself=True),
    Launcher("impi", program="mpirun", starts_itself=True),
    Launcher("mvapich", program="mpirun", starts_itself=True),
    SLURM,
)
LAUNCHERS = {one.name: one for one in _ROWS}
# Options of ssh that take a value; source: OpenSSH 9.2p1 ssh.c, and its manual page
_WITH_VALUE = "BbcDEeFIiJLlmOoPpQRSWw"
WAYS = {one.name: one for one in (SSH, OPENSSH)}  # the launchers that reach hosts by SSH from here


def _launcher(value: str) -> Launcher:
    launcher = LAUNCHERS.get(value.lower())
    if launcher is None:
        raise ValueError(f"{value!r} is not a launcher; choose {', '.join(LAUNCHERS)}")
    return launcher


def _way(context: click.Context, parameter: click.Parameter, value: str) -> Launcher:
    if value.lower() not in WAYS:
        raise click.BadParameter(f"{value!r} is no way to reach a host; choose {', '.join(WAYS)}")
    return WAYS[value.lower()]


def _split(value: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(value))
    except ValueError as error:
        raise ValueError(f"{value!r} cannot be split into words: {error}; quote it as for a shell") from None


def check_ssh_options(words: Iterable[str], given_by: str) -> None:
    """Refuse what ssh would misread.

    Errors: LaunchError for a word that ssh would take for its host, or an option without its value
    """
    rest = iter(words)
    for word in rest:
        flags = word.removeprefix("-")
        if flags in (word, "", "-"):
            raise LaunchError(
                f"{given_by}: {word!r} is no option of ssh, which would take it for a host or a command; "
                "leave it out, or write it behind the option whose value it is"
            )
        with_value = next((place for place, flag in enumerate(flags) if flag in _WITH_VALUE), None)
        if with_value == len(flags) - 1 and next(rest, None) is None:
            raise LaunchError(f"{given_by}: ssh's option {word} has no value; write it behind the option")


def _beginning(names: Iterable[str], start: str) -> list[str]:
    return [name for name in names if name.startswith(start)]


def _either(words: list[str]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}"


_NAMES = [one.name + " (on this machine only)" * one.is_local for one in _ROWS]
_PROGRAMS = [*dict.fromkeys(one.program for one in _ROWS if one.program)]


@record
class BackendOptions(NamedTuple):
    """The program that starts the processes, and its arguments."""

    launcher: Launcher = option(
        "--launcher",
        topic="launchers",
        default=SSH,
        read=_launcher,
        shell_complete=lambda context, parameter, start: _beginning(LAUNCHERS, start),
        metavar="NAME",
        help=f"Who starts the processes: {_either(_NAMES)}.  [default: {SSH.name}]",
    )
    launcher_args: tuple[str, ...] = option(  # words for the launcher's program, as a shell would split them
        "--launcher_args",
        topic="launchers",
        may_be_empty=True,
        default=(),
        read=_split,
        metavar="WORDS",
        help=f"Options for {_either(_PROGRAMS)}, in one word: --launcher_args='--mca btl tcp,self'.",
    )

    def settled(self, given: Mapping[str, Any]) -> BackendOptions:
        """Settle the options. Errors: click.UsageError for words if there is no program to take them;
        LaunchError
        """
        if self.launcher_args and self.launcher == PDSH:
            raise click.UsageError(
                "--launcher_args has no effect with --launcher=pdsh, which runs ssh in the place of pdsh: "
                "write --ssh_user, --connect_timeout and --connect_window for pdsh's -l, -t and -f; with "
                "--launcher=openssh they are options of ssh"
            )
        if self.launcher_args and not self.launcher.program:
            raise click.UsageError(
                f"--launcher_args has no effect with --launcher={self.launcher.name}, which runs no other "
                "program; leave it out, or see --ssh_port and the other options for ssh"
            )
        if self.launcher == OPENSSH:
            check_ssh_options(self.launcher_args, "--launcher_args")
        return self


# Options of commands that run no ranks.
WAY_OPTION = click.Option(
    ["--launcher"],
    default=SSH.name,
    callback=_way,
    shell_complete=lambda context, parameter, start: _beginning(WAYS, start),
    metavar="NAME",
    help=f"How hosts are reached: {SSH.name}, or {OPENSSH.name} (the system's ssh).  [default: {SSH.name}]",
)
