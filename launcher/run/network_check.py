"""The job of `dslaunch check --nccl`: one rank on each host, which measure the network between them."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence

from ..backends.choose import choose_access
from ..controller.controller import Controller
from ..errors import LaunchError
from ..fleet.network import MARK, Network, read_network
from ..inputs.selection import Selected
from ..job.restart import Attempt
from ..options import Options
from ..output.console import Console
from .make_plan import make_plan

STEP_TIMEOUT_S = 10.0
PROGRAM = f"{__package__.partition('.')[0]}.runtime.comm.network_check"


def measure_network(options: Options, hosts: Sequence[Selected]) -> Network | int:
    """What was measured, or the exit code of a job that failed; why it did is said then.

    `options` are those of a job without a program. Errors: LaunchError if the job's answer cannot be read
    """
    job = options._replace(
        program=PROGRAM, arguments=(f"{STEP_TIMEOUT_S:g}",), is_module=True, no_local_rank=True
    )
    once = tuple(one._replace(devices=one.devices[:1] or ("0",)) for one in hosts)
    plan = make_plan(job, Attempt(hosts=once, run_id=""))
    heard = io.BytesIO()
    console = Console(log_level="warning", out=heard)
    began = time.monotonic()
    access = choose_access(job, plan.nodes, (), say=console.say)
    try:
        verdict = Controller(plan, connect=access.connect, console=console, window=access.window).run()
    finally:
        access.close()
    console.drain()
    for line in heard.getvalue().decode("utf-8", "replace").splitlines():
        _, mark, told = line.partition(MARK)
        if mark:
            try:
                return read_network(told, plan.host_names, timeout_s=STEP_TIMEOUT_S)
            except ValueError as error:
                raise LaunchError(f"what the ranks measured cannot be read: {error}; report it") from None
    console.report(verdict, took_s=time.monotonic() - began)
    console.drain()
    return verdict.exit_code or 1
