"""`dslaunch check`: options only. The look itself is in launcher/fleet/check.py."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from ..inputs.selection import Selected
from ..options import HOST_OPTIONS, Options
from ..options.number import PORT, Seconds
from .prefix_command import SETTINGS, PrefixCommand

if TYPE_CHECKING:
    from ..fleet.check_facts import HostFacts
    from ..output.console import Console

DEFAULT_TIMEOUT_S = 60.0
EPILOG = """
\b
Example:
  dslaunch check -H hosts
      prints what keeps hosts from being used, what differs, and what is the same everywhere

More about each NVIDIA GPU is told by NVML, where the Python of jobs has nvidia-ml-py on that host.
The exit code is 0 if every host can be used, 3 if one cannot, and 2 for a mistake in what was given;
with --bandwidth and --gpu it is 1 if a link, a host or a GPU is slow, or does not work.
"""


@click.command(cls=PrefixCommand, epilog=EPILOG, context_settings=SETTINGS)
@click.option(
    "--master_port",
    type=PORT,
    metavar="PORT",
    help="Port of rank 0 to try.  [default: 29500]",
)
@click.option("--no_torch", is_flag=True, help="Do not ask for PyTorch: importing it takes seconds.")
@click.option(
    "--timeout",
    type=Seconds(1, 86400),
    default=DEFAULT_TIMEOUT_S,
    metavar="S",
    help="Seconds for one host to answer everything.  [default: 60]",
)
@click.option(
    "--bandwidth",
    "--nccl",
    "asks_network",
    is_flag=True,
    help=(
        "Then measure the network: with one rank on each host, over NCCL if all have GPUs, else gloo, "
        "all_reduce, all_gather and reduce_scatter of all, and how fast every pair of hosts sends both ways. "
        "Last, with a rank on each slot, what a rank reaches while all others work: `dslaunch plan` times a "
        "step by it from then on."
    ),
)
@click.option(
    "--gpu",
    "asks_gpus",
    is_flag=True,
    help=(
        "Then have every GPU compute, one rank on each: how fast it multiplies and copies, and whether its "
        "products are right."
    ),
)
@click.option("--force_multi", is_flag=True, help="Reach every host by SSH, this machine too.")
@click.option("--json", "is_json", is_flag=True, help="Print all facts as JSON.")
def command(**given: Any) -> int:
    """Look at all hosts at the same time: what is missing, what differs, who reaches whom. Starts no
    processes of a job, except with --bandwidth and --gpu.
    """
    from ..backends.choose import direct_connect
    from ..fleet.check import Check, CheckSettings
    from ..fleet.check_summary import as_dict, as_text, summary_of
    from ..options.process import ProcessOptions
    from ..output.console import Console
    from ..run.host_pool import choose_hosts, host_options, nodes_of
    from ..run.make_plan import DEFAULT_PORT, current_folder, exact

    options = host_options(given, process=ProcessOptions(gives_stdin=False))
    if given["asks_network"]:
        from ..run.speeds_folder import check_speeds_place

        check_speeds_place()  # before minutes of measuring
    settings = CheckSettings(
        python=exact(sys.executable),
        cwd=exact(current_folder()),
        port=given["master_port"] or DEFAULT_PORT,
        is_port_fixed=given["master_port"] is not None,
        asks_torch=not given["no_torch"],
        timeout_s=given["timeout"],
    )
    console = Console(log_level="info")
    chosen = choose_hosts(options, console)
    nodes = nodes_of(chosen, options)
    num_slots = [one for _, one in chosen]
    check = Check(
        nodes, num_slots, settings, connect=direct_connect(options, nodes, say=console.say), console=console
    )
    facts = check.run()
    summary = summary_of(facts)
    console.drain()
    told = as_dict(facts, summary)
    if not given["is_json"]:
        _print(as_text(facts, summary))
    for name in _asked(given, num_hosts=len(chosen)):
        if summary.exit_code:
            console.warn(f"not measured, because not all hosts can be used: {_NAMES[name]}")
            continue
        hosts = [
            one if slots is not None else one._replace(devices=_found_gpus(host))
            for (one, slots), host in zip(chosen, facts.hosts, strict=True)
        ]
        code, told[name] = _MEASURES[name](options, hosts, console, shows=not given["is_json"])
        told["exit_code"] = told["exit_code"] or code
        if told[name] is None and name == "network":
            break  # the reason is reported, and the next job would fail for it, too
    console.drain()
    if given["is_json"]:
        _print(json.dumps(told, indent=2) + "\n")
    return int(told["exit_code"])


def _asked(given: Mapping[str, Any], *, num_hosts: int) -> list[str]:
    """Return what is to be measured, in order. One host has no network."""
    found = ["gpus"] if given["asks_gpus"] else []
    if given["asks_network"]:
        found += ["network", "speeds"] if num_hosts > 1 else ["speeds"]
    return found


def _found_gpus(host: HostFacts) -> tuple[str, ...]:
    """Return the devices of a host whose slots are not given."""
    return tuple(map(str, range(host.answers.get("gpu", {}).get("num", 0))))


def _network(
    options: Options, hosts: Sequence[Selected], console: Console, *, shows: bool
) -> tuple[int, dict[str, Any] | None]:
    """Measure the network; return the exit code, and the result, or None if the measurement failed, which is
    reported.
    """
    from ..fleet.network import faults_of, network_as_dict, network_as_text
    from ..run.measure import Unmeasured, measure_network

    network = measure_network(options, hosts, console)
    if isinstance(network, Unmeasured):
        return network.exit_code, None
    if shows:
        _print(network_as_text(network))
    return (1 if faults_of(network) else 0), network_as_dict(network)


def _gpus(
    options: Options, hosts: Sequence[Selected], console: Console, *, shows: bool
) -> tuple[int, dict[str, Any] | None]:
    """Measure the GPUs; return the exit code, and the results."""
    from ..fleet.gpu_speed import faults_of_speed, gpus_as_dict, gpus_as_text
    from ..run.measure import Unmeasured, measure_gpus

    measured = measure_gpus(options, hosts, console)
    if isinstance(measured, Unmeasured):
        return measured.exit_code, None
    if shows:
        _print(gpus_as_text(measured))
    is_without = not any(gpu.name or gpu.problem for gpu in measured)
    return (1 if is_without or faults_of_speed(measured) else 0), gpus_as_dict(measured)


def _speeds(
    options: Options, hosts: Sequence[Selected], console: Console, *, shows: bool
) -> tuple[int, dict[str, Any] | None]:
    """Measure what a rank reaches while all others work, and keep it; return as _network() does."""
    from ..fit.measured_speeds import speeds_as_dict
    from ..fit.speeds_text import speeds_as_text
    from ..run.measure import Unmeasured, measure_speeds
    from ..run.speeds_folder import keep

    measured = measure_speeds(options, hosts, console)
    if isinstance(measured, Unmeasured):
        return measured.exit_code, None
    path = keep(measured)
    if shows:
        _print(speeds_as_text(measured, path))
    return 0, {**speeds_as_dict(measured), "file": str(path)}


_MEASURES = {"gpus": _gpus, "network": _network, "speeds": _speeds}
_NAMES = {"gpus": "the GPUs", "network": "the network", "speeds": "the speeds of ranks"}


def _print(text: str) -> None:
    click.echo(text.encode("utf-8", "backslashreplace"), nl=False)


command.params[:0] = HOST_OPTIONS
