"""`python -m dslaunch.launcher.fit.rehearsal_keeper PARENT COMMAND...`: run a rehearsal, and leave nothing.

Programs start others, such as services for logs, some of them in sessions of their own. The keeper adopts all
that lose their parent; when the rehearsal ends, or PARENT, the launcher, it kills what is left. Its own end
is the rehearsal's.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time

from ..node.system.process_tree import become_subreaper, descendants, die_with_parent, kill_descendants, reap
from ..node.workers.stack_dump import catches
from ..node.workers.worker_hook import SIGNAL

END_TIMEOUT_S = 5.0  # for the kernel to end processes that were killed


def main(parent: int, command: list[str]) -> None:
    """Be the keeper."""
    child = 0

    def end(signum: int, frame: object) -> None:
        _end_all()
        os._exit(128 + signum)

    def pass_on(signum: int, frame: object) -> None:
        if child and catches(child, signum):
            os.kill(child, signum)

    signal.signal(SIGNAL, pass_on)
    signal.signal(signal.SIGTERM, end)
    become_subreaper()
    die_with_parent(parent, signal.SIGTERM)
    child = os.fork()
    if child == 0:
        for signum in (SIGNAL, signal.SIGTERM):
            signal.signal(signum, signal.SIG_DFL)
        os.execv(command[0], command)
    pid = status = 0
    while pid != child:
        pid, status = os.waitpid(-1, 0)
    _end_all()
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signum = os.WTERMSIG(status)
        if signum != signal.SIGKILL:
            signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)
    os._exit(os.waitstatus_to_exitcode(status))


def _end_all() -> None:
    own, deadline = os.getpid(), time.monotonic() + END_TIMEOUT_S
    while (kill_descendants(own) or descendants(own)) and time.monotonic() < deadline:
        reap()
        time.sleep(0.01)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
