"""How each tool of bench_recovery.py is started on the hosts of a lab."""

from __future__ import annotations

import importlib.machinery
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.launch_peers import DSLAUNCH
from benchmarks.recovery_worker import LIMIT_S
from tests.lab import Lab

WORKER = str(Path(__file__).with_name("recovery_worker.py"))
OURS = str(Path(__file__).with_name("recovery_ours.py"))
PEERS_FOLDER = Path(sys.prefix) / "recovery_peers"  # packages to compare with, apart from what dslaunch needs
PORT, LIGHTHOUSE_PORT = 29541, 29542
SILENCE_S = 10.0  # until a host counts as lost; torchrun's own time for that is 15 s
RESTARTS = 3
SETTLE_S = 15.0  # until the imports that later attempts share are done beside the training
SNAPSHOT_EVERY = 5  # steps
EVENTS = "events"

Started = list[subprocess.Popen[Any]]


class Tool(NamedTuple):
    """`why_missing` is empty if the tool can be used; `about` says how it is run."""

    name: str
    start: Callable[[Lab, Path, Callable[..., subprocess.Popen[Any]]], Started]
    why_missing: str
    about: str
    settle_s: float = 0.0  # time of training before the fault


def job_options(lab: Lab, folder: Path) -> tuple[str, ...]:
    """Return the options of a job of ours on all nodes, which goes on after faults."""
    (folder / "hosts").write_text("".join(f"{node.name} slots=1\n" for node in lab.nodes))
    restarts = (f"--max_restarts={RESTARTS}", "--min_uptime=0", f"--min_nodes={len(lab.nodes) - 1}")
    snapshots = f"--snapshot_every={SNAPSHOT_EVERY}"
    return ("-H", "hosts", *restarts, snapshots, f"--heartbeat={SILENCE_S:g}")


def _ours(lab: Lab, folder: Path, run: Callable[..., subprocess.Popen[Any]]) -> Started:
    words = (*job_options(lab, folder), f"--events={EVENTS}", "--no_local_rank", OURS)
    return [run(lab.head, [DSLAUNCH, *words])]


def _elastic(lab: Lab, folder: Path, run: Callable[..., subprocess.Popen[Any]], *words: str) -> Started:
    """Start torchrun, or a launcher made of it, on every host."""
    nodes = f"{len(lab.nodes) - 1}:{len(lab.nodes)}"
    rendezvous = (
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{lab.nodes[0].name}:{PORT}", "--rdzv-id", "bench"),
        *("--rdzv-conf", "last_call_timeout=5"),
    )
    options = ("--nnodes", nodes, "--nproc-per-node", "1", "--max-restarts", str(RESTARTS), *rendezvous)
    module, *more, tool = words
    # Otherwise workers of a restart find the addresses of the attempt before in the store, and give up.
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    command = [sys.executable, "-m", module, *options, *more, WORKER, tool]
    return [run(node, command, env=env) for node in lab.nodes]


def _torchrun(lab: Lab, folder: Path, run: Callable[..., subprocess.Popen[Any]]) -> Started:
    return _elastic(lab, folder, run, "torch.distributed.run", "ddp")


def _nvrx(lab: Lab, folder: Path, run: Callable[..., subprocess.Popen[Any]]) -> Started:
    limits = (f"--ft-rank-heartbeat-timeout={LIMIT_S:g}", "--ft-initial-rank-heartbeat-timeout=60")
    module = "nvidia_resiliency_ext.fault_tolerance.launcher"
    return _elastic(lab, folder, run, module, *limits, "nvrx")


def _torchft(lab: Lab, folder: Path, run: Callable[..., subprocess.Popen[Any]]) -> Started:
    words = [
        "--min_replicas",
        str(len(lab.nodes) - 1),
        "--quorum_tick_ms",
        "100",
        "--join_timeout_ms",
        "5000",
    ]
    lighthouse = [str(PEERS_FOLDER / "bin" / "torchft_lighthouse"), *words]
    started = [run(lab.head, [*lighthouse, "--bind", f"[::]:{LIGHTHOUSE_PORT}"])]
    address = f"http://{lab.head.name}:{LIGHTHOUSE_PORT}"
    for number, node in enumerate(lab.nodes):
        env = {"TORCHFT_LIGHTHOUSE": address, "REPLICA_GROUP_ID": str(number), "NUM_REPLICA_GROUPS": "4"}
        options = ("--standalone", "--nproc-per-node", "1", "--max-restarts", str(RESTARTS))
        command = [sys.executable, "-m", "torch.distributed.run", *options, WORKER, "torchft"]
        started.append(run(node, command, env=env))
    return started


def tools() -> Sequence[Tool]:
    """Return ours, then the others."""
    return (
        Tool(
            "dslaunch",
            _ours,
            "",
            f"`--max_restarts {RESTARTS} --min_nodes 3 --heartbeat {SILENCE_S:g} --snapshot_every "
            f"{SNAPSHOT_EVERY}` and engine.resume(), at stage 0, after {SETTLE_S:g} s of training",
            SETTLE_S,
        ),
        Tool(
            "torchrun + DCP",
            _torchrun,
            "",
            "torchrun on each host with `--nnodes 3:4`, `last_call_timeout=5` and "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which new workers look for those before them; "
            "DistributedDataParallel and torch.distributed.checkpoint",
        ),
        Tool(
            "NVRx + DCP",
            _nvrx,
            _why_not("nvidia_resiliency_ext"),
            f"NVIDIA's ft_launcher in torchrun's place, with a heartbeat after each step and {LIMIT_S:g} s "
            "for it; its in-process restarts and local checkpoints need CUDA",
        ),
        Tool(
            "torchft",
            _torchft,
            _why_not("torchft"),
            "each host is a replica that the others outlive, over gloo, without checkpoints: the survivors "
            "train on with another batch. Gradients are averaged by Manager.allreduce, for over gloo its "
            "DistributedDataParallel ends the survivors with an AssertionError",
        ),
    )


def _why_not(package: str) -> str:
    found = importlib.machinery.PathFinder.find_spec(package, [str(PEERS_FOLDER)])
    return "" if found else f"{package} is not installed; `make bench-recovery` installs it where pip has it"
