"""The jobs of `dslaunch check --bandwidth` and `--gpu`: speeds of the network, of ranks, and of the GPUs at
work.
"""

from __future__ import annotations

import io
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ...shared import marks
from ..backends.choose import choose_access
from ..backends.refused_before import RefusedBefore
from ..controller.controller import Controller
from ..errors import LaunchError
from ..fit.measured_speeds import ClusterSpeeds, cluster_of
from ..fleet.gpu_speed import MeasuredGpu, read_gpus
from ..fleet.network import Network, read_network
from ..inputs.selection import Selected
from ..job.plan import Plan
from ..job.restart import Attempt
from ..job.verdict import HostFailure, RankFailure, Verdict, signal_name
from ..options import Options
from ..options.logs import LogOptions
from ..options.mesh import MeshOptions
from ..options.process import ProcessOptions
from ..options.restart import RestartOptions
from ..output.console import Console
from .make_plan import make_plan
from .speeds_folder import hosts_of

STEP_TIMEOUT_S = 10.0
_PACKAGE = __package__.partition(".")[0]
NETWORK_PROGRAM = f"{_PACKAGE}.runtime.comm.network_check"
GPU_PROGRAM = f"{_PACKAGE}.runtime.metrics.gpu_check"
SPEEDS_PROGRAM = f"{_PACKAGE}.runtime.metrics.speed_check"


class Unmeasured(NamedTuple):
    """A job that failed; the reason was reported. `at_fault`: hosts that were lost meanwhile, or whose rank
    was killed, each with the reason; the others are without fault.
    """

    exit_code: int
    interrupted_by: int | None
    at_fault: Mapping[str, str]


def measure_network(
    options: Options, hosts: Sequence[Selected], console: Console, refused: RefusedBefore | None = None
) -> Network | Unmeasured:
    """Measure the network; return the result, or how the job that measures failed.

    `options` are those of the check, or of the job that it comes before; `refused`: as for
    backends.choose.choose_access. Errors: LaunchError if the answer cannot be read
    """
    once = tuple(one._replace(devices=one.devices[:1] or ("0",)) for one in hosts)
    arguments = (f"{STEP_TIMEOUT_S:g}",)
    told, plan, verdict = _run(
        options, once, NETWORK_PROGRAM, arguments, mark=marks.NETWORK, console=console, refused=refused
    )
    if not told:
        return _unmeasured(verdict)
    try:
        return read_network(told[0], plan.host_names, timeout_s=STEP_TIMEOUT_S)
    except ValueError as error:
        raise _unreadable(error) from None


def measure_gpus(
    options: Options,
    hosts: Sequence[Selected],
    console: Console,
    *,
    size: tuple[str, ...] = (),
    refused: RefusedBefore | None = None,
) -> tuple[MeasuredGpu, ...] | Unmeasured:
    """Do the same for each GPU. `size` of a matrix is for tests."""
    once = tuple(one._replace(devices=one.devices or ("0",)) for one in hosts)
    told, plan, verdict = _run(
        options, once, GPU_PROGRAM, size, mark=marks.GPU, console=console, refused=refused
    )
    if len(told) < plan.world_size:
        return _unmeasured(verdict)
    slots = {
        rank.rank: (node.host.name, device)
        for node in plan.nodes
        for rank, device in zip(node.ranks, node.devices, strict=True)
    }
    try:
        return read_gpus(told, slots)
    except ValueError as error:
        raise _unreadable(error) from None


def measure_speeds(
    options: Options, hosts: Sequence[Selected], console: Console
) -> ClusterSpeeds | Unmeasured:
    """Do the same with all ranks of all hosts at work, for what plans compute with."""
    once = tuple(one._replace(devices=one.devices or ("0",)) for one in hosts)
    told, plan, verdict = _run(
        options, once, SPEEDS_PROGRAM, (), mark=marks.SPEEDS, console=console, refused=None
    )
    if len(told) < plan.world_size:
        return _unmeasured(verdict)
    try:
        return cluster_of(told, hosts_of(plan.nodes))
    except ValueError as error:
        raise _unreadable(error) from None


def _run(
    options: Options,
    hosts: tuple[Selected, ...],
    program: str,
    arguments: tuple[str, ...],
    *,
    mark: str,
    console: Console,
    refused: RefusedBefore | None,
) -> tuple[list[str], Plan, Verdict]:
    """Return the ranks' text behind the mark, and how the job ended; report it if text is missing."""
    job = options._replace(
        program=program,
        arguments=arguments,
        is_module=True,
        no_python=False,
        no_local_rank=True,
        logs=LogOptions(),
        mesh=MeshOptions(),
        process=ProcessOptions(gives_stdin=False),
        restart=RestartOptions(),
        start=options.start._replace(preload=(), shows_timings=False),
    )
    plan = make_plan(job, Attempt(hosts=hosts, run_id=""))
    heard, said = io.BytesIO(), io.BytesIO()
    own = Console(log_level="warning", out=heard, err=said)
    began = time.monotonic()
    access = choose_access(job, plan.nodes, (), say=console.say, refused=refused)
    try:
        verdict = Controller(plan, connect=access.connect, console=own, window=access.window).run()
    finally:
        access.close()
    own.drain()
    lines = [line.partition(mark) for line in heard.getvalue().decode("utf-8", "replace").splitlines()]
    told = [text for _, found, text in lines if found]
    if verdict.exit_code or not told:
        own.report(verdict, took_s=time.monotonic() - began)
        own.drain()
    words = said.getvalue().decode("utf-8", "replace").splitlines()
    if words:
        console.show("the ranks that measure:", [line.removeprefix("dslaunch: ") for line in words])
    return told, plan, verdict


def _unmeasured(verdict: Verdict) -> Unmeasured:
    at_fault = {}
    for one in filter(None, (verdict.culprit, *verdict.others)):
        if isinstance(one, HostFailure) and one.is_host_at_fault:
            at_fault[one.host] = one.message
        elif isinstance(one, RankFailure) and one.signal:
            at_fault[one.host] = f"what measures was killed by {signal_name(one.signal)} there"
    return Unmeasured(verdict.exit_code or 1, verdict.interrupted_by, at_fault)


def _unreadable(error: ValueError) -> LaunchError:
    return LaunchError(f"what the ranks measured cannot be read: {error}; report it")
