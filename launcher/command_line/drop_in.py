"""`dslaunch drop-in`: options only. The work is in the drop-in package's installation.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from .command_group import CommandGroup
from .prefix_command import SETTINGS, PrefixCommand

EPILOG = """
\b
Examples:
  dslaunch drop-in install
      from now on `import deepspeed` gets dslaunch in every program of this Python, under any launcher, and
      its environment has the commands deepspeed, ds, ds_ssh, ds_report and zero_to_fp32.py
  dslaunch drop-in status
      what is installed, and which deepspeed a program gets
  dslaunch drop-in uninstall
      remove what was installed; call it before `pip uninstall dslaunch`

Jobs that dslaunch starts need none of this: see --drop_in of `dslaunch help start`. Nothing of another
program is changed: where DeepSpeed is installed, or a command of one of those names is there already, nothing
is installed.
"""


@click.group(
    cls=CommandGroup, example="install", epilog=EPILOG, context_settings=SETTINGS, no_args_is_help=False
)
def command(**given: Any) -> None:
    """Make `import deepspeed` and DeepSpeed's commands use dslaunch in this Python's environment, or undo
    that.
    """


def _show(lines: Iterator[str]) -> int:
    for line in lines:
        click.echo(line)
    return 0


@command.command(
    "install", cls=PrefixCommand, short_help="Have programs find dslaunch.", context_settings=SETTINGS
)
@click.option("--dry_run", is_flag=True, help="Only show what would be written.")
def _install(**given: Any) -> int:
    """Write what makes programs find dslaunch by `import deepspeed`, and DeepSpeed's commands."""
    from ...drop_in.installation import install, place_of_this_python

    return _show(install(place_of_this_python(), is_dry_run=given["dry_run"]))


@command.command("uninstall", cls=PrefixCommand, short_help="Undo that.", context_settings=SETTINGS)
@click.option("--dry_run", is_flag=True, help="Only show what would be removed.")
def _uninstall(**given: Any) -> int:
    """Remove what `install` has written, where it is unchanged; what was changed is named, and stays."""
    from ...drop_in.installation import place_of_this_python, uninstall

    return _show(uninstall(place_of_this_python(), is_dry_run=given["dry_run"]))


@command.command("status", cls=PrefixCommand, short_help="Show what is installed.", context_settings=SETTINGS)
def _status(**given: Any) -> int:
    """Show what is installed, from where, and which deepspeed programs and shells get."""
    from ...drop_in.installation import place_of_this_python, status

    return _show(status(place_of_this_python()))
