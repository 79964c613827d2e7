"""`dslaunch exec`: options only. Running the command is in launcher/fleet/each_host.py."""

from __future__ import annotations

from typing import Any

import click

from ..options import HOST_OPTIONS
from ..options.number import Seconds
from .prefix_command import PROGRAM_SETTINGS, PrefixCommand

EPILOG = """
\b
Examples:
  dslaunch exec -H hosts -- nvidia-smi -L
      on every host; hosts that print the same are shown together: node[1-4]: ...
  dslaunch exec -H hosts --no_fold -- sh -c 'tail -f /tmp/train.log | grep loss'
      every line as it comes; what a shell is to do needs a shell

The command gets exactly these arguments, and the environment and folder that a job would get. Its output is
passed on byte for byte, with a newline at the end if there was none. When it ends, what it left running on a
host is ended too. The exit code is 0 if it ended with 0 on every host, else that of the first failure that
was heard of: the command's (128 + n after signal n), or 3 if a host could not be used. Other hosts go on
after a failure, unless --fail_fast is given.
"""


@click.command(cls=PrefixCommand, epilog=EPILOG, context_settings=PROGRAM_SETTINGS)
@click.option("--no_fold", is_flag=True, help="Show every line as it comes, with the host it is from.")
@click.option("--fail_fast", is_flag=True, help="At the first failure, end the command on all other hosts.")
@click.option("--cwd", metavar="FOLDER", help="Run in this folder of every host.  [default: the present one]")
@click.option("--venv_script", metavar="FILE", help="Shell script to source on every host first.")
@click.option(
    "--kill_grace",
    type=Seconds(),
    default=5.0,
    metavar="S",
    help="Seconds between SIGTERM and SIGKILL when it is stopped.  [default: 5]",
)
@click.option("--force_multi", is_flag=True, help="Reach every host by SSH, this machine too.")
@click.argument("program", required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...")
def command(**given: Any) -> int:
    """Run PROGRAM once on every host."""
    if not given["program"]:
        raise click.UsageError("which command? Write: dslaunch exec [options] -- command [its arguments]")
    from ..backends.choose import direct_connect
    from ..fleet.each_host import CONNECT_TIMEOUT_S, EachHost, describe_failures
    from ..fleet.host_output import HostOutput
    from ..job.restart import Attempt
    from ..options.process import ProcessOptions
    from ..output.console import Console
    from ..run.host_pool import choose_hosts, host_options
    from ..run.make_plan import exact, make_plan

    options = host_options(
        given,
        program=given["program"],
        arguments=given["arguments"],
        no_python=True,
        no_local_rank=True,
        process=ProcessOptions(gives_stdin=False),
    )
    console = Console(log_level="info")
    once = tuple(one._replace(devices=("0",)) for one, _ in choose_hosts(options, console))
    plan = make_plan(options, Attempt(hosts=once, run_id=""))
    if given["cwd"] is not None:
        own = (node._replace(host=node.host._replace(cwd=None)) for node in plan.nodes)
        plan = plan._replace(nodes=tuple(own), cwd=exact(given["cwd"]))
    output = HostOutput([node.host.name for node in plan.nodes], console.put, is_folding=not given["no_fold"])
    ended = EachHost(
        plan,
        connect=direct_connect(options, plan.nodes, say=console.say),
        console=console,
        output=output,
        fails_fast=given["fail_fast"],
        connect_timeout_s=options.ssh.all_steps_s(CONNECT_TIMEOUT_S),
    ).run()
    output.finish()
    for line in describe_failures(ended, plan):
        console.error(line)
    console.drain()
    if console.failure is not None:
        raise console.failure
    return ended.exit_code


command.params[:0] = HOST_OPTIONS
