"""The `dslaunch` command: options only. What it does with them is in run.py."""

from __future__ import annotations

import contextlib
import os
import sys
from importlib import import_module
from typing import Any

import click

from ..errors import EXIT_HOST, EXIT_MISTAKE, LaunchError
from ..inputs.host import MAX_SLOTS
from ..options import SUBJECT_OPTIONS, Options, read_subjects
from ..options.hosts import CHOICE_OPTIONS, NODE_RANGE, SSH_OPTIONS, read_ssh
from ..options.number import PORT, Seconds, Whole
from ..options.text import address
from ..output.writer import EXIT_NOT_READ
from ..wording import cleaned
from .absent_options import ABSENT
from .prefix_command import PROGRAM_SETTINGS, PrefixCommand

VARIABLE = "_DSLAUNCH_COMPLETE"  # set by the shell where a line is to be completed

# A larger number is a slip, which would start that many processes here; of fewer, the limits of the host
# itself decide: see node/system/limits.py.
NUM_GPUS = Whole(0, MAX_SLOTS, absent=-1, meaning=", the most that one host may have (0: no limit)")


class JobCommand(PrefixCommand):
    """Its --help is one screen; `dslaunch help TOPIC` has the rest."""

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from .job_help import write_first_page  # here: few runs show it

        write_first_page(formatter, ctx, self)


@click.command(cls=JobCommand, absent=ABSENT, context_settings=PROGRAM_SETTINGS)
@click.option(
    "--num_gpus",
    "--num_accelerators",
    type=NUM_GPUS,
    default=-1,
    metavar="N",
    help="Use the first N slots of each host.",
)
@click.option(
    "--master_addr",
    callback=address,
    metavar="ADDR",
    help="Address of rank 0.  [default: node 0's, as the others reach it]",
)
@click.option(
    "--master_port",
    type=PORT,
    metavar="PORT",
    help="Port of rank 0.  [default: 29500, or another if that is in use]",
)
@click.option("--venv_script", metavar="FILE", help="Shell script to source on every host first.")
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a Python module, as with `python -m`.")
@click.option("--no_python", is_flag=True, help="SCRIPT is a program to run as it is.")
@click.option("--no_local_rank", is_flag=True, help="Do not add --local_rank=N to the script's arguments.")
@click.option("--force_multi", is_flag=True, help="Reach every host by SSH, this machine too.")
@click.option("--dry_run", is_flag=True, help="Print what would run where, and stop.")
@click.option(
    "--kill_grace",
    type=Seconds(),
    default=30.0,
    metavar="S",
    help="Seconds between SIGTERM and SIGKILL when the job is stopped.  [default: 30]",
)
@click.option(
    "--heartbeat",
    type=Seconds(1),
    default=30.0,
    metavar="S",
    help="Seconds of silence after which a host counts as lost.  [default: 30]",
)
@click.option("--report", metavar="FILE", help="Write how the job ended, and its phases, to FILE as JSON.")
@click.option(
    "--log_level",
    type=click.Choice(["debug", "info", "warning", "error", "critical"], case_sensitive=False),
    default="info",
    help="What dslaunch itself prints.  [default: info]",
)
@click.option("-q", "--quiet", is_flag=True, help="The same as --log_level=error.")
@click.option(
    "--profile",
    metavar="FILE",
    expose_value=False,  # its options stand in front of the others when these are read: see prefix_command.py
    help="Read options, script and args from a YAML file; what is typed wins.",
)
@click.option("--version", is_flag=True, help="Print the version and stop.")
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
        raise click.UsageError("which script? Write: dslaunch [options] script.py [its arguments]")
    options = job_options(given)
    if options.detach.is_watched and not options.dry_run:
        from .watch import watch  # here: few jobs are

        return watch(options)
    from ..run.run_job import run  # here, so that --help does not load what only a job needs

    return run(options)


_place = [one.name for one in dslaunch.params].index("venv_script")
dslaunch.params[-2:-2] = SUBJECT_OPTIONS  # before the script and its arguments
dslaunch.params[_place:_place] = SSH_OPTIONS
dslaunch.params[:0] = CHOICE_OPTIONS


def job_options(given: dict[str, Any]) -> Options:
    """What the options of a job mean, by parameter name."""
    node_range = click.get_current_context().meta.get(NODE_RANGE)
    if node_range is not None:
        given = {**given, "min_nodes": node_range[0], "max_nodes": node_range[1]}
    arguments = given["arguments"]
    if arguments[:1] == ("--",):  # `dslaunch a.py -- --b` means `a.py --b`, as with DeepSpeed
        arguments = arguments[1:]
    return Options(
        hostfile=given["hostfile"],
        include=given["include"],
        exclude=given["exclude"],
        num_nodes=given["num_nodes"],
        num_gpus=given["num_gpus"],
        exec_prefix=given["exec_prefix"],
        master_addr=given["master_addr"],
        master_port=given["master_port"],
        ssh=read_ssh(given),
        venv_script=given["venv_script"],
        is_module=given["module"],
        no_python=given["no_python"],
        no_local_rank=given["no_local_rank"],
        force_multi=given["force_multi"],
        dry_run=given["dry_run"],
        kill_grace_s=given["kill_grace"],
        heartbeat_s=given["heartbeat"],
        log_level="error" if given["quiet"] else given["log_level"].lower(),
        report=given["report"],
        **read_subjects(given),
        program=given["script"],
        arguments=arguments,
    )


# Other commands than running a job: the module with the click command, loaded when it is called. What
# each is for is in help_topics.py.
COMMANDS: dict[str, str] = {
    "check": ".check",
    "exec": ".exec",
    "env": ".env",
    "jobs": ".jobs",
    "logs": ".logs",
    "attach": ".attach",
    "stop": ".stop",
    "stacks": ".stacks",
    "top": ".top",
    "trace": ".trace",
    "report": ".report",
    "checkpoint": ".checkpoint",
    "report-env": ".report_env",
    "drop-in": ".drop_in",
    "completion": ".completion",
    "man": ".man",
    "help": ".help",
}


def _command(words: list[str]) -> tuple[click.Command, str, list[str]]:
    """The command that is meant, its name and its words.

    A script that is called like a command is `./name`.
    """
    if words and words[0] in COMMANDS:
        module = import_module(COMMANDS[words[0]], __package__)
        command: click.Command = module.command
        return command, f"dslaunch {words[0]}", words[1:]
    if words and _is_word(words[0]) and not os.path.exists(words[0]):
        import difflib  # here: it takes 1 ms

        near = difflib.get_close_matches(words[0].lower(), COMMANDS, n=1, cutoff=0.7)
        if near:
            raise click.UsageError(
                f"{words[0]!r} is no command, and no script of that name is here; did you mean `dslaunch "
                f"{near[0]}`? A script that is on the hosts only is ./{words[0]}"
            )
    return dslaunch, "dslaunch", words


def _is_word(word: str) -> bool:
    """Neither an option nor a path."""
    return word[0:1] != "-" and word.replace("-", "_").isidentifier()


def _for_terminal(message: str) -> str:
    """With line breaks between words if stderr is a terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        return message
    from shutil import get_terminal_size  # here: few runs end with a mistake

    from ..wording import wrapped

    return wrapped(message, get_terminal_size().columns, first=len("dslaunch: "))


def _tell(message: str) -> None:
    """One line on stderr. Where that is closed or full, the exit code alone says how the command ended."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            print(f"dslaunch: {message}", file=sys.stderr)


def _takes_output() -> bool:
    """Whether stdout takes anything; if not, what is printed from now on vanishes."""
    try:
        os.write(1, b"\n")
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return False
    return True


def _limit_met(error: OSError | RuntimeError) -> str:
    """The sentence for an error that says that a limit of this machine was met; empty for another one."""
    from ..node.system.limits import why_not_started  # here: few runs end so

    return why_not_started("the threads and processes of dslaunch itself", error)


def main(argv: list[str] | None = None) -> None:
    """Run the command and end the program with its exit code.

    The one place that turns errors into exit codes.
    """
    is_debugging, is_job = False, True
    try:
        command, name, words = _command(list(sys.argv[1:] if argv is None else argv))
        is_job = command is dslaunch
        with command.make_context(name, words) as context:
            is_debugging = context.params.get("log_level", "").lower() == "debug"
            code = command.invoke(context)
        if sys.stdout is not None:
            sys.stdout.flush()
    except click.exceptions.Exit as error:  # --help
        code = error.exit_code
    except (LaunchError, click.ClickException) as error:
        if is_debugging and isinstance(error, LaunchError) and sys.stderr is not None:
            import traceback  # here: most runs end without, and it takes 2 ms

            with contextlib.suppress(OSError):
                traceback.print_exc()
        message = str(error)
        if isinstance(error, click.ClickException):
            from .mistakes import in_our_words  # here: few runs end with a mistake

            message = in_our_words(error)
        _tell(_for_terminal(cleaned(message)))
        code = error.exit_code if isinstance(error, LaunchError) else EXIT_MISTAKE
    except BrokenPipeError:  # the reader of our output went away
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
