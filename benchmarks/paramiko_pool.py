"""The floor of a start over SSH: threads that log in on every host with paramiko and run a command.

Run: python benchmarks/paramiko_pool.py COMMAND HOST...      (a file stamp-HOST says when each was done)
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import paramiko

NUM_THREADS = 64


def run(command: str, host: str) -> None:
    with paramiko.SSHClient() as client:
        client.load_system_host_keys()
        client.connect(host)
        _, out, _ = client.exec_command(command)
        if out.channel.recv_exit_status():
            raise AssertionError(f"{host}: {command} failed")
    Path(f"stamp-{host}").write_text(str(time.time()))


if __name__ == "__main__":
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        list(pool.map(partial(run, sys.argv[1]), sys.argv[2:]))
