"""DeepSpeed's command `deepspeed` as a call: programs that build its arguments call
`deepspeed.launcher.runner.main` with them.

Source: DeepSpeed 0.19.8 launcher/runner.py, `main`
"""

from __future__ import annotations

from collections.abc import Sequence

from ..launcher.command_line.cli import main as run


def main(args: Sequence[str] | None = None) -> None:
    """Run the job that `args` describe, sys.argv if None, and return when it has gone well.

    Errors: SystemExit with dslaunch's exit code, after one line on stderr, for a mistake in the arguments and
            for a job that failed
    """
    try:
        run(None if args is None else list(args))
    except SystemExit as end:
        if end.code:
            raise
