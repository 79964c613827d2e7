"""`dslaunch report`: a run as a page for a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..errors import LaunchError
from ..wording import shown_size
from .prefix_command import SETTINGS, PrefixCommand

EPILOG = """
\b
Examples:
  dslaunch report logs
      the latest run below `logs`, which --log_dir named, as train.html
  dslaunch report logs/20260801-141503 -o first.html --open
      one run, shown in the browser of this desktop
  dslaunch report train
      the job train of this user, that runs or has ended
  dslaunch report logs/20260801-141503 logs/20260802-090000
      what differs between the two, and their curves over each other

RUN is the folder of a run, the folder that --log_dir named (the latest run in it), a file of events, a
report.json, or the name of a job. The page is one file, loads nothing from any network, and can be sent to
others. It shows what the job wrote when it failed: give it to those only who may read the logs.

It is drawn by Bokeh: pip install ".[report]" in a clone of dslaunch
"""


@click.command(cls=PrefixCommand, epilog=EPILOG, context_settings=SETTINGS)
@click.argument("run", required=False, metavar="RUN")
@click.argument("other", required=False, metavar="[RUN]")
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    help="Where to write the page.  [default: ./NAME.html, with a job's exact name]",
)
@click.option("--open", "is_opened", is_flag=True, help="Show it in the browser of this desktop.")
def command(**given: Any) -> int:
    """Write a page on a run for a browser: how the run went, its curves, where its time went, and why it
    ended. For two runs it shows the differences.
    """
    if given["run"] is None:
        raise LaunchError(
            "which run? Write: dslaunch report RUN, with the folder of --log_dir or the name of a job"
        )
    if given["output"] == "":
        raise LaunchError("--output '': is no file; give the name of one, or leave it out for ./NAME.html")
    from ..run.find_run import find_run

    sources = [find_run(word) for word in (given["run"], given["other"]) if word is not None]
    try:
        from ..page.page import comparison_page, page_of
        from ..page.page_file import check_page_place, default_place, write_page
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("bokeh", "numpy"):
            raise
        raise LaunchError(
            f'dslaunch report needs the package {package}; install it: pip install ".[report]" in a clone '
            "of dslaunch"
        ) from None
    from ..page.read_run import read_run

    runs = [read_run(one) for one in sources]
    label = "-".join(dict.fromkeys(run.label for run in runs))
    place = default_place(label) if given["output"] is None else Path(given["output"]).expanduser()
    check_page_place(place)
    size = write_page(place, page_of(runs[0]) if len(runs) == 1 else comparison_page(runs[0], runs[1]))
    click.echo(f"dslaunch: wrote {place} ({shown_size(size)})", err=True)
    if given["is_opened"]:
        _open(place)
    return 0


def _open(place: Path) -> None:
    """Open the page in a browser. Errors: LaunchError if there is none"""
    import webbrowser

    if not webbrowser.open(place.absolute().as_uri()):
        raise LaunchError(f"there is no browser here that could show {place}; copy it to where one is")
