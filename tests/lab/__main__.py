"""The lab by hand: `python -m tests.lab --help`."""

from __future__ import annotations

import argparse
import difflib
import inspect
import os
import signal
import sys
import time
from collections.abc import Sequence

from .entry import LOGIN_ENV
from .host import Host
from .lab import CHECKOUT, SLOTS, Lab
from .place import LabError, Place

ARGUMENTS: dict[str, type[int] | type[float] | type[str]] = {  # of the faults that take one
    "drop-port": int,
    "refuse-port": int,
    "limit-cpu": float,
    "slow-down": float,
    "receive-slowly": float,
    "limit-memory": int,
    "drop-from": str,  # an address
}
FAULTS = (
    *("link-down", "link-up", "unplug", "plug", "freeze", "thaw", "die", "poweroff", "boot", "restore"),
    *("sshd-stop", "sshd-continue", "sshd-kill", "sshd-start", "new-host-key", "clear", *ARGUMENTS),
)
EXAMPLES = """\
Hosts to play with, all on this machine: each has its own network card, processes, home folder and sshd.
It needs root; nothing leaves this machine.

a first walk:
  python -m tests.lab up 4                       # head (where you type) and node1 ... node4
  python -m tests.lab exec head -- bash          # a shell on the head; `ssh node2` works from there
  python -m tests.lab exec node1 -- hostname -I  # one command on one host; exits with its status
  python -m tests.lab fault node2 unplug         # cut its cable, silently
  python -m tests.lab status                     # who is up, frozen, unplugged, and how busy
  python -m tests.lab fault node2 plug
  python -m tests.lab fault node2 --help         # everything that can go wrong
  python -m tests.lab ps                         # what jobs have left running, on all hosts
  python -m tests.lab down
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the command line says; the result is the exit status."""
    arguments = _parser().parse_args(argv)
    try:
        status: int = arguments.command(arguments)
    except LabError as error:
        print(f"lab: {error}", file=sys.stderr)
        return 1
    return status


def _up(arguments: argparse.Namespace) -> int:
    if arguments.num_hosts == 0:
        return _down(arguments)
    start = time.monotonic()
    lab = Lab.up(arguments.num_hosts, name=arguments.name, wait_s=0, replace=True, report=_report)
    lab.detach()
    print(f"up in {time.monotonic() - start:.1f} s; it stays up until you take it down\n")
    print(f"{'host':<10}{'address':<14}what is its own, seen from outside")
    for host in lab.hosts:
        print(f"{host.name:<10}{host.address:<14}{host.home.parent}")
    me = f"{os.path.relpath(sys.executable)} -m tests.lab"
    if arguments.name != Place().name:
        me += f" --name {arguments.name}"
    print(f"\nhostfile  {lab.hostfile}   ({SLOTS} slots for each node)")
    print(f"shared    {lab.shared}   (same path on all hosts, writable; emptied by `down`)")
    print(f"checkout  {CHECKOUT}   (same path on all hosts, read-only)")
    (lab.hosts[0].home / "hosts").write_text(lab.hostfile.read_text())
    first = CHECKOUT / "docs/examples/check_collectives.py"
    print("\nwhat to type next")
    print(f"  {me} exec head -- dslaunch -H hosts {first}   a first job, on all nodes")
    print(f"  {me} exec head -- bash   a shell on the head; from there: ssh {lab.nodes[0].name}")
    print(
        f"  {me} fault {lab.nodes[-1].name} unplug   something goes wrong; `fault HOST --help` lists what can"
    )
    print(f"  {me} status              how the hosts are")
    print(f"  {me} down                take everything down")
    return 0


def _report(line: str) -> None:
    print(f"  {line}", flush=True)


def _down(arguments: argparse.Namespace) -> int:
    try:
        lab = Lab.attach(arguments.name)
    except LabError:
        print("no lab was up")
        return 0
    lab.down()
    print(f"down: {len(lab.hosts)} hosts")
    return 0


def _exec(arguments: argparse.Namespace) -> int:
    argv = arguments.argv[1:] if arguments.argv[:1] == ["--"] else arguments.argv
    if not argv:
        raise LabError("no command given; say what to run on the host, e.g. exec head -- bash")
    # The environment's commands are at hand, `dslaunch` first of all: this is where a person types.
    env = {"PATH": f"{os.path.dirname(os.path.abspath(sys.executable))}:{LOGIN_ENV['PATH']}"}
    if "TERM" in os.environ:
        env["TERM"] = os.environ["TERM"]
    process = Lab.attach(arguments.name).host(arguments.host).popen(argv, env=env)
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the command itself: it is in the same terminal
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, lambda received, frame: process.send_signal(received))
    status = process.wait()
    return 128 - status if status < 0 else status


def _ps(arguments: argparse.Namespace) -> int:
    lab = Lab.attach(arguments.name)
    for host in [lab.host(arguments.host)] if arguments.host else lab.hosts:
        for process in host.processes():
            print(f"{host.name:<10}{process.pid:>8}  {process.argv}")
    return 0


def _fault(arguments: argparse.Namespace) -> int:
    kind, value = arguments.kind, arguments.argument
    if kind not in FAULTS:
        nearest = difflib.get_close_matches(kind, FAULTS) or FAULTS
        raise LabError(f"{kind!r}: no such fault; nearest: {', '.join(nearest)}; see `fault HOST --help`")
    if (value is not None) != (kind in ARGUMENTS):
        raise LabError(
            f"{kind}: takes {'one argument' if kind in ARGUMENTS else 'no argument'}, given {value!r}"
        )
    method = getattr(Lab.attach(arguments.name).host(arguments.host), kind.replace("-", "_"))
    if kind not in ARGUMENTS:
        method()
        return 0
    try:
        number = ARGUMENTS[kind](value)
    except ValueError:
        raise LabError(f"{kind} {value}: must be a number; write e.g. `fault node1 {kind} 22`") from None
    method(number)
    return 0


def _status(arguments: argparse.Namespace) -> int:
    lab = Lab.attach(arguments.name)
    print(f"{'host':<10}{'address':<14}{'is':<12}{'processes of jobs':<18}")
    for host in lab.hosts:
        print(f"{host.name:<10}{host.address:<14}{host.condition():<12}{len(host.processes()):<18}")
    kind = (
        "left up by hand"
        if lab.is_detached
        else f"made by {Place(name=arguments.name).lock.read_text() or 'a process that crashed'}"
    )
    print(f"\n{kind}; hostfile {lab.hostfile}")
    return 0


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m tests.lab", description=EXAMPLES, formatter_class=raw)
    name_help = "of another lab than the usual one; the tests use `tests`"
    parser.add_argument("--name", default=Place().name, help=name_help)
    named = argparse.ArgumentParser(add_help=False)  # the same behind the command
    named.add_argument("--name", default=argparse.SUPPRESS, help=name_help)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    up = commands.add_parser(
        "up", parents=[named], help="make a head and N nodes; 0 is `down`; replaces a lab made by hand"
    )
    up.add_argument("num_hosts", type=int, metavar="N")
    up.set_defaults(command=_up)
    down = commands.add_parser(
        "down", parents=[named], help="take the lab down, with everything that runs in it"
    )
    down.set_defaults(command=_down)
    execute = commands.add_parser("exec", parents=[named], help="run a command on a host, in your terminal")
    execute.add_argument("host", metavar="HOST")
    execute.add_argument("argv", nargs=argparse.REMAINDER, metavar="-- CMD ...")
    execute.set_defaults(command=_exec)
    ps = commands.add_parser("ps", parents=[named], help="list the processes of jobs, of one host or of all")
    ps.add_argument("host", nargs="?", metavar="HOST")
    ps.set_defaults(command=_ps)
    kinds = "\n".join(
        f"  {kind:<15}{inspect.getdoc(getattr(Host, kind.replace('-', '_')))}" for kind in FAULTS
    )
    fault = commands.add_parser(
        "fault", parents=[named], help="make something go wrong on a host", epilog=kinds, formatter_class=raw
    )
    fault.add_argument("host", metavar="HOST")
    fault.add_argument("kind", metavar="KIND")
    fault.add_argument("argument", nargs="?", metavar="ARG")
    fault.set_defaults(command=_fault)
    status = commands.add_parser("status", parents=[named], help="list the hosts and how they are")
    status.set_defaults(command=_status)
    return parser


if __name__ == "__main__":
    sys.exit(main())
