"""The look at all hosts before a job starts (--check): unfit hosts are named, and left out where the job may
go on without them.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence

from ..backends.choose import direct_connect
from ..backends.refused_before import RefusedBefore
from ..errors import EXIT_HOST, LaunchError
from ..fleet.check import Check, CheckSettings
from ..fleet.check_facts import Finding
from ..fleet.check_page import page_of
from ..fleet.check_summary import summary_of
from ..fleet.gpu_speed import faults_of_speed
from ..fleet.network import faults_of
from ..inputs.selection import Selected
from ..job.restart import Attempt, without_unfit
from ..options import Options
from ..output.console import Console
from ..wording import count
from .host_pool import nodes_of
from .make_plan import DEFAULT_PORT, current_folder, exact
from .measure import Unmeasured, measure_gpus, measure_network
from .no_workers_yet import interruption

TIMEOUT_S = 60.0  # lower limit of the time for one host to answer everything
TIMEOUT_PART = 0.1  # part of --prepare_timeout: a slow host has all of that for more work
_Unfit = dict[str, str]  # hosts by name, each with the first reason


def check_first(options: Options, attempt: Attempt, console: Console, refused: RefusedBefore) -> Attempt:
    """Return the attempt with the fit hosts; report the faults of the others. `refused`: as for
    backends.choose.choose_access.

    Errors: LaunchError if too few hosts are fit
    """
    if not options.check.is_on:
        return attempt
    steps = [_look]
    if options.check.measures_gpus:
        steps.append(_measure_gpus)
    if options.check.measures_network:
        steps.append(_measure_network)
    for step in steps:
        while unfit := step(options, attempt, console, refused):
            decision = without_unfit(attempt, unfit, options.restart)
            if decision.attempt is None:
                raise LaunchError(decision.why, exit_code=EXIT_HOST)
            console.warn(decision.why)
            first, attempt = attempt.hosts[0], decision.attempt
            # otherwise look again: do all reach the host that is the first one now?
            if attempt.hosts[0] == first:
                break
    return attempt


def _all_hosts(attempt: Attempt) -> tuple[Selected, ...]:
    return (*attempt.hosts, *attempt.spares)


def _and_servers(attempt: Attempt) -> tuple[Selected, ...]:
    return (*_all_hosts(attempt), *(one.host for one in attempt.servers))


def _look(options: Options, attempt: Attempt, console: Console, refused: RefusedBefore) -> _Unfit:
    hosts = _and_servers(attempt)
    nodes = nodes_of(tuple((one, len(one.devices)) for one in hosts), options)
    settings = CheckSettings(
        python=exact(sys.executable),
        cwd=exact(current_folder()),
        port=options.master_port or DEFAULT_PORT,
        is_port_fixed=options.master_port is not None and attempt.number == 0,
        asks_torch=not options.no_python,
        timeout_s=options.ssh.all_steps_s(max(TIMEOUT_S, TIMEOUT_PART * options.start.prepare_timeout_s)),
        timeout_option="--prepare_timeout",
    )
    num_slots = [len(one.devices) for one in hosts]
    connect = direct_connect(options, nodes, say=console.say, refused=refused)
    facts = Check(nodes, num_slots, settings, connect=connect, console=console).run()
    summary = summary_of(facts)
    for one in summary.findings:
        if not one.is_problem:
            console.warn(f"{', '.join(one.hosts)}: {one.text}")
    unfit = _first_reasons(one for one in summary.findings if one.is_problem)
    if unfit:
        console.show(*page_of(facts, summary))
    else:
        console.say(f"{_all(len(hosts))} can be used (looked at in {facts.took_s:.1f} s)")
    return unfit


def _measure_gpus(options: Options, attempt: Attempt, console: Console, refused: RefusedBefore) -> _Unfit:
    measured = measure_gpus(options, _all_hosts(attempt), console, refused=refused)
    if isinstance(measured, Unmeasured):
        return _of_unmeasured(measured, "--check_gpu", attempt, console)
    if not any(gpu.name or gpu.problem for gpu in measured):
        raise LaunchError(
            "--check_gpu has every GPU compute, and no host has one that PyTorch can use; leave it out"
        )
    faults = faults_of_speed(measured)
    if not faults:
        console.say(f"{count(len(measured), 'GPU')} measured: none is wrong or slow")
    return _said(faults, console)


def _measure_network(options: Options, attempt: Attempt, console: Console, refused: RefusedBefore) -> _Unfit:
    hosts = _all_hosts(attempt)
    if len(hosts) < 2:
        console.debug("--check_bandwidth: there is one host, and no network to measure")
        return {}
    network = measure_network(options, hosts, console, refused)
    if isinstance(network, Unmeasured):
        return _of_unmeasured(network, "--check_bandwidth", attempt, console)
    faults = faults_of(network)
    if not faults:
        console.say(f"the network of {count(len(hosts), 'host')} is measured: no link is slow")
    elif any(not one.hosts for one in faults):
        _said(faults, console)
        raise LaunchError("--check_bandwidth: not all hosts work together", exit_code=EXIT_HOST)
    return _said(_blamed(faults), console)


def _of_unmeasured(failed: Unmeasured, option: str, attempt: Attempt, console: Console) -> _Unfit:
    """Return the hosts that were lost during a measurement, which is repeated without them.

    Errors: LaunchError if it failed for another reason
    """
    if failed.interrupted_by is not None:
        raise interruption(failed.interrupted_by, is_first=attempt.number == 0)
    if not failed.at_fault:
        raise LaunchError(f"{option}: nothing was measured, for the reason above", exit_code=failed.exit_code)
    return _said(
        (Finding(hosts=(h,), text=why, is_problem=True) for h, why in failed.at_fault.items()), console
    )


def _blamed(faults: Sequence[Finding]) -> Iterable[Finding]:
    """Turn each fault of a link into one of a host: the one with the most faults, else the later one.

    Without that host the link is not used.
    """
    left = list(faults)
    while left:
        num_faults = Counter(host for one in left for host in one.hosts)
        worst = max(left, key=lambda one: max(num_faults[host] for host in one.hosts))
        host = max(reversed(worst.hosts), key=lambda name: num_faults[name])
        for one in left:
            if host in one.hosts:
                yield Finding(hosts=(host,), text=_of_link(one, host), is_problem=True)
        left = [one for one in left if host not in one.hosts]


def _of_link(fault: Finding, host: str) -> str:
    others = [one for one in fault.hosts if one != host]
    return f"with {others[0]}: {fault.text}" if others else fault.text


def _said(faults: Iterable[Finding], console: Console) -> _Unfit:
    found = list(faults)
    for one in found:
        console.warn(f"{', '.join(one.hosts) or 'all'}: {one.text}")
    return _first_reasons(found)


def _first_reasons(problems: Iterable[Finding]) -> _Unfit:
    unfit: _Unfit = {}
    for one in problems:
        for host in one.hosts:
            unfit.setdefault(host, one.text)
    return unfit


def _all(num_hosts: int) -> str:
    return "the host" if num_hosts == 1 else f"all {num_hosts} hosts"
