"""DeepSpeed's `ds_report`, also as `python -m deepspeed.env_report`: dslaunch's report on this machine."""

from __future__ import annotations

from ..launcher.command_line.cli import main as run


def main(hide_operator_status: bool = False, hide_errors_and_warnings: bool = False) -> None:
    """Print the report, and end the program."""
    run(["report-env"])


cli_main = main
