"""The `dslaunch` command: options only. The work is in run/run_job.py."""

from __future__ import annotations

import contextlib
import os
import sys
from importlib import import_module
from typing import Any

import click

from ..errors import EXIT_HOST, EXIT_MISTAKE, LaunchError
from ..options import JOB_OPTIONS, Options
from ..options.hosts import NODE_RANGE
from ..options.option import JobOption, read
from ..output.writer import EXIT_NOT_READ
from ..wording import cleaned
from .absent_options import ABSENT
from .prefix_command import PROGRAM_SETTINGS, PrefixCommand

VARIABLE = "_DSLAUNCH_COMPLETE"  # the shell sets this variable when it wants a line completed


class JobCommand(PrefixCommand):
    """The command that starts a job. Its --help is one screen; `dslaunch help TOPIC` has the rest."""

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from .job_help import write_first_page

        write_first_page(formatter, ctx, self)


_PROFILE = JobOption(
    ["--profile"],
    topic="start",
    metavar="FILE",
    # PrefixCommand puts the profile's options in front of the typed ones: see prefix_command.py
    expose_value=False,
    help="Read options, script and args from a YAML file; what is typed wins.",
)
_VERSION = JobOption(["--version"], topic="information", is_flag=True, help="Print the version and stop.")


@click.command(cls=JobCommand, absent=ABSENT, context_settings=PROGRAM_SETTINGS)
@click.argument("script", required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...")
def dslaunch(**given: Any) -> int:
    """Start SCRIPT on every slot of every host, and stop all of it at the first failure. Everything after
    SCRIPT belongs to it.
    """
    if given["version"]:
        from ... import __version__

        click.echo(f"dslaunch {__version__}")
        return 0
    if not given["script"]:
        raise click.UsageError(
            f"which script? Write: dslaunch [options] script.py [its arguments]{_eaten(given)}"
        )
    options = job_options(given)
    if options.autotuning is not None:
        from .autotune import autotune

        return autotune(options)
    if options.detach.is_watched and not options.dry_run:
        from .watch import watch

        return watch(options)
    from ..run.run_job import run

    return run(options)


def _eaten(given: dict[str, Any]) -> str:
    """Return a hint if the script may have become the command of a role; else nothing."""
    servers = [one for one in given["role"] or () if one.command]
    if not servers:
        return ""
    return f"; {servers[-1].command[:80]!r} is the command of {servers[-1].given}, which takes the next word"


_place = 1 + [one.name for one in JOB_OPTIONS].index("exec_prefix")
dslaunch.params[:0] = [*JOB_OPTIONS[:_place], _PROFILE, *JOB_OPTIONS[_place:], _VERSION]


def job_options(given: dict[str, Any]) -> Options:
    """Return the job's options from click's parameters."""
    node_range = click.get_current_context().meta.get(NODE_RANGE)
    if node_range is not None:
        given = {**given, "min_nodes": node_range[0], "max_nodes": node_range[1]}
    arguments = given["arguments"]
    if arguments[:1] == ("--",):  # `dslaunch a.py -- --b` means `a.py --b`, as with DeepSpeed
        arguments = arguments[1:]
    return read(Options, given, program=given["script"], arguments=arguments)


# Commands besides that which runs a job, each with the module of its click command, which is loaded when the
# command is called. Their summaries are in help_topics.py.
COMMANDS: dict[str, str] = {
    "check": ".check",
    "exec": ".exec",
    "env": ".env",
    "plan": ".plan",
    "drill": ".drill",
    "jobs": ".jobs",
    "logs": ".logs",
    "attach": ".attach",
    "stop": ".stop",
    "stacks": ".stacks",
    "top": ".top",
    "trace": ".trace",
    "numerics": ".numerics",
    "report": ".report",
    "checkpoint": ".checkpoint",
    "report-env": ".report_env",
    "drop-in": ".drop_in",
    "completion": ".completion",
    "man": ".man",
    "help": ".help",
}


def _command(words: list[str]) -> tuple[click.Command, str, list[str]]:
    """Return the command that is meant, its name and its words.

    A script with the name of a command must be written `./name`.
    """
    if words and words[0] in COMMANDS:
        module = import_module(COMMANDS[words[0]], __package__)
        command: click.Command = module.command
        return command, f"dslaunch {words[0]}", words[1:]
    if words and _is_word(words[0]) and not os.path.exists(words[0]):
        import difflib

        near = difflib.get_close_matches(words[0].lower(), COMMANDS, n=1, cutoff=0.7)
        if near:
            raise click.UsageError(
                f"{words[0]!r} is no command, and no script of that name is here; did you mean `dslaunch "
                f"{near[0]}`? A script that is on the hosts only is ./{words[0]}"
            )
    return dslaunch, "dslaunch", words


def _is_word(word: str) -> bool:
    """Tell whether the word is neither an option nor a path."""
    return word[0:1] != "-" and word.replace("-", "_").isidentifier()


def _for_terminal(message: str) -> str:
    """Return the message with line breaks between words if stderr is a terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        return message
    from shutil import get_terminal_size

    from ..wording import wrapped

    return wrapped(message, get_terminal_size().columns, first=len("dslaunch: "))


def _tell(message: str) -> None:
    """Print one line on stderr. If stderr is closed or full, only the exit code reports the end."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            print(f"dslaunch: {message}", file=sys.stderr)


def _takes_output() -> bool:
    """Tell whether stdout takes output; if not, replace it by a file that drops all output."""
    try:
        os.write(1, b"\n")
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return False
    return True


def _limit_met(error: OSError | RuntimeError) -> str:
    """Return a sentence if the error says that a limit of this machine was met; empty for any other error."""
    from ..node.system.limits import why_not_started

    return why_not_started("the threads and processes of dslaunch itself", error)


def main(argv: list[str] | None = None) -> None:
    """Run the command and end the program with its exit code.

    Only this function turns errors into exit codes.
    """
    is_debugging, is_job = False, True
    try:
        command, name, words = _command(list(sys.argv[1:] if argv is None else argv))
        is_job = command is dslaunch
        with command.make_context(name, words) as context:
            is_debugging = (context.params.get("log_level") or "").lower() == "debug"
            code = command.invoke(context)
        if sys.stdout is not None:
            sys.stdout.flush()
    except click.exceptions.Exit as error:  # --help
        code = error.exit_code
    except (LaunchError, click.ClickException) as error:
        if is_debugging and isinstance(error, LaunchError) and sys.stderr is not None:
            import traceback

            with contextlib.suppress(OSError):
                traceback.print_exc()
        message = str(error)
        if isinstance(error, click.ClickException):
            from .mistakes import in_our_words

            message = in_our_words(error)
        _tell(_for_terminal(cleaned(message)))
        code = error.exit_code if isinstance(error, LaunchError) else EXIT_MISTAKE
    except BrokenPipeError:  # the reader of our output has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = EXIT_NOT_READ
    except (OSError, RuntimeError) as error:
        why = _limit_met(error)
        if why:
            print(f"dslaunch: {_for_terminal(why)}", file=sys.stderr)
            sys.exit(EXIT_HOST)
        if isinstance(error, RuntimeError) or _takes_output():
            raise
        _tell(f"cannot write to stdout: {error.strerror}; send it to a file or a terminal that takes it")
        code = EXIT_MISTAKE
    except (KeyboardInterrupt, click.Abort):
        _tell(f"interrupted{': nothing was started' if is_job else ''}")
        code = 130
    sys.exit(code)
