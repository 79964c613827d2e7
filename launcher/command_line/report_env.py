"""`dslaunch report-env`: options only. The facts are found in launcher/fleet/env_report.py."""

from __future__ import annotations

import json
import os
import re
from typing import Any

import click

from .prefix_command import SETTINGS, PrefixCommand

UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
EPILOG = """
\b
Examples:
  dslaunch report-env
      versions, and for the kernels and CUDA "yes" or "no" with the reason
  dslaunch report-env --nvme_path /local_nvme --disk_test 8G
      also whether files there can go past the page cache, and how fast 8 GiB are written and read
  dslaunch exec -H hosts -- dslaunch report-env
      the same on every host, equal output shown once

\b
What the lines mean:
  CUDA          whether torch can use a GPU; without one, training runs on the CPU
  kernels       the optimizer steps in host memory, each tried beside a plain loop; they need no compiler
                here. They are compiled for several instruction sets, and the newest that the processor
                has is used
  CUDA kernels  compiled at first use, and kept in the folder that is shown; DSLAUNCH_CACHE_DIR names another
  direct I/O    what offload to NVMe wants: without it, files fill the page cache, and speed is that of memory
                until this is full

Nothing is left behind. The exit code is 0 whatever was found, and 2 for a mistake in what was given.
"""

MAX_DISK_TEST = 16 << 40


def _bytes(context: click.Context, parameter: click.Parameter, value: str | None) -> int:
    if value is None:
        return 0
    match = re.fullmatch(r"([1-9][0-9]{0,15})([KMGT]?)", value)
    if match is None:
        raise click.BadParameter(
            f"{value!r} is no number of bytes; write e.g. 8G: a number above 0, with K, M, G "
            "or T for 2^10 to 2^40"
        )
    number = int(match[1]) << UNITS[match[2]]
    if number > MAX_DISK_TEST:
        raise click.BadParameter(
            f"{value!r} is not allowed: it would take days; give at most {MAX_DISK_TEST >> 40}T"
        )
    return number


@click.command(cls=PrefixCommand, epilog=EPILOG, context_settings=SETTINGS)
@click.option("--nvme_path", metavar="DIR", help="Try direct I/O in this folder, as offload to NVMe uses it.")
@click.option(
    "--disk_test",
    metavar="BYTES",
    callback=_bytes,
    help="Write and read so many bytes there, and show the speed; 8G is 8 GiB.  [default: no test]",
)
@click.option("--no_torch", is_flag=True, help="Do not ask for PyTorch: importing it takes seconds.")
@click.option("--json", "is_json", is_flag=True, help="Print everything as JSON.")
def command(**given: Any) -> int:
    """Show what works on this machine and what does not, with the reasons: for bug reports,
    and before a first job.
    """
    if given["disk_test"] and given["nvme_path"] is None:
        raise click.UsageError("--disk_test has no effect without --nvme_path, the folder to test")
    from ..fleet.env_report import as_text, find_out

    nvme_path = given["nvme_path"] and os.path.abspath(os.path.expanduser(given["nvme_path"]))
    found = find_out(
        nvme_path=nvme_path, disk_test_bytes=given["disk_test"], asks_torch=not given["no_torch"]
    )
    text = json.dumps(found, indent=2) + "\n" if given["is_json"] else as_text(found)
    click.echo(text.encode("utf-8", "backslashreplace"), nl=False)
    return 0
