"""DeepSpeed's program for one node, `python -m deepspeed.launcher.launch`: dslaunch without SSH,
told by --world_info.

Source: DeepSpeed 0.19.8 launcher/launch.py, `parse_args`
"""

from __future__ import annotations

import argparse
import base64
import binascii
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ..launcher.command_line.cli import main as run
from ..launcher.errors import EXIT_MISTAKE, LaunchError

_SWITCHES = ("module", "no_python", "no_local_rank", "bind_cores_to_rank")
_VALUES = ("bind_core_list", "enable_each_rank_log")


def main(argv: Sequence[str] | None = None) -> None:
    """Run this node's part of the job; ends the program with its exit code."""
    parser = argparse.ArgumentParser(
        prog="deepspeed.launcher.launch", description=main.__doc__, allow_abbrev=False
    )
    parser.add_argument("--node_rank", type=int, default=0)
    parser.add_argument("--master_addr", default="127.0.0.1")
    parser.add_argument("--master_port", type=int, default=29500)
    parser.add_argument("--world_info", default="None", help="base64 of JSON: host -> its device ids")
    parser.add_argument("--save_pid", type=int, default=0)
    for name in _SWITCHES:
        parser.add_argument(f"--{name}", action="store_true")
    for name in _VALUES:
        parser.add_argument(f"--{name}")
    parser.add_argument("training_script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    given = parser.parse_args(argv)
    try:
        hosts = read_world_info(given.world_info)
    except LaunchError as error:
        parser.exit(EXIT_MISTAKE, f"deepspeed.launcher.launch: {error}\n")
    if os.environ.get("DSLAUNCH_DROP_IN") is None:
        os.environ["DSLAUNCH_DROP_IN"] = "always"
    with tempfile.TemporaryDirectory() as folder:
        hostfile = Path(folder) / "hosts"
        hostfile.write_text("".join(f"{host} slots={max(ids) + 1}\n" for host, ids in hosts.items()))
        run([*_words(given, hosts, hostfile), given.training_script, *given.arguments])


def read_world_info(text: str) -> dict[str, list[int]]:
    """Return host -> device ids.

    Errors: LaunchError for a text that is no base64 of such a JSON object
    """
    try:
        hosts = json.loads(base64.urlsafe_b64decode(text))
    except (binascii.Error, ValueError):
        hosts = None
    is_whole = isinstance(hosts, dict) and all(
        isinstance(ids, list) and ids and all(isinstance(one, int) and one >= 0 for one in ids)
        for ids in hosts.values()
    )
    if not hosts or not is_whole:
        raise LaunchError(
            f'--world_info={text}: must be base64 of a JSON object such as {{"node1": [0, 1]}}, as '
            "`deepspeed` writes it"
        )
    return {str(host): ids for host, ids in hosts.items()}


def _words(given: argparse.Namespace, hosts: dict[str, list[int]], hostfile: Path) -> list[str]:
    include = "@".join(f"{host}:{','.join(map(str, ids))}" for host, ids in hosts.items())
    words = ["--no_ssh", f"--hostfile={hostfile}", f"--include={include}", f"--node_rank={given.node_rank}"]
    words += [f"--master_addr={given.master_addr}", f"--master_port={given.master_port}"]
    words += ["--save_pid"] if given.save_pid else []
    words += [f"--{name}" for name in _SWITCHES if getattr(given, name)]
    words += [
        f"--{name}={getattr(given, name)}" for name in _VALUES if getattr(given, name) not in (None, "None")
    ]
    return words
