"""The files that make an environment find `deepspeed` for good: where they go, and what is in them.

See installation.py.
"""

from __future__ import annotations

import os
import shlex
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from . import BIN, FOLDER, PYTHON_VARIABLE

PTH = "deepspeed_from_dslaunch.pth"
"""Read before dslaunch_drop_in.pth, which obeys DSLAUNCH_DROP_IN: Python reads them in the
order of their names.
"""
RECORD = "deepspeed_from_dslaunch.json"
COMMANDS = ("deepspeed", "ds", "ds_report", "ds_ssh")
CONVERTER = "zero_to_fp32.py"

_LONGEST_FIRST_LINE = 127  # bytes that Linux reads of it

_COMMAND = """\
#!/bin/sh
# Made by `dslaunch drop-in install`, and removed by `dslaunch drop-in uninstall`.
command={command}
{variable}={python}
if ! [ -x "$command" ] || ! [ -x "${variable}" ]; then
    echo "{name}: $command or ${variable} is not there any more: install dslaunch again, or remove $0" >&2
    exit 127
fi
export {variable}
exec "$command" "$@"
"""

_CONVERTER = '''\
#!{python}
"""Float32 weights from a checkpoint.

Made by `dslaunch drop-in install`, and removed by `dslaunch drop-in uninstall`.
"""

import sys

try:
    from dslaunch.utils.zero_to_fp32 import main
except ModuleNotFoundError as error:
    if str(error.name).partition(".")[0] != "dslaunch":
        raise
    advice = f"install it again for {{sys.executable}}, or remove {{__file__}}"
    sys.exit(f"{name}: dslaunch is not there any more: {{advice}}")

if __name__ == "__main__":
    main()
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallPlace:
    """An environment: its Python, the folder where that looks for packages,
    and the folder of its commands.
    """

    python: Path
    packages: Path
    scripts: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """One file to make."""

    path: Path
    data: bytes
    is_command: bool


def place_of_this_python() -> InstallPlace:
    return InstallPlace(
        python=Path(sys.executable),
        packages=Path(sysconfig.get_path("purelib")),
        scripts=Path(sysconfig.get_path("scripts")),
    )


def files_for(place: InstallPlace, *, folder: str = FOLDER, commands: str = BIN) -> tuple[File, ...]:
    """Return the files to be made in an environment.

    `folder` and `commands`: where dslaunch has the package and the commands.
    """
    files = [File(path=place.packages / PTH, data=os.fsencode(folder) + b"\n", is_command=False)]
    for name in COMMANDS:
        text = _COMMAND.format(
            name=name,
            command=shlex.quote(os.path.join(commands, name)),
            python=shlex.quote(str(place.python)),
            variable=PYTHON_VARIABLE,
        )
        files.append(File(path=place.scripts / name, data=os.fsencode(text), is_command=True))
    text = _CONVERTER.format(name=CONVERTER, python=_after_hash_bang(place.python))
    files.append(File(path=place.scripts / CONVERTER, data=os.fsencode(text), is_command=True))
    return tuple(files)


def _after_hash_bang(python: Path) -> str:
    """Return the start of a script that runs this Python: a first line can hold neither spaces nor long
    paths.
    """
    text = str(python)
    is_fit = not any(letter.isspace() for letter in text) and len(os.fsencode(text)) + 2 < _LONGEST_FIRST_LINE
    return text if is_fit else "/usr/bin/env python3"
