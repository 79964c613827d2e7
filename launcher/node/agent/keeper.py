"""The keeper: starts the agent, outlives it, and leaves nothing of it behind.

It adopts every process that loses its parent; the agent, its only child, does the work. Each is told when the
other dies: if the agent is killed, the keeper kills everything below itself; if the keeper is killed, the
agent ends the job.
"""

from __future__ import annotations

import errno
import os

from ..system.background import print_traceback
from ..system.lean_stdlib import name_of_signal, signal, suppress
from ..system.private_folder import PrivateFolder
from ..system.process_tree import become_subreaper, die_with_parent, end_descendants
from .agent import Agent

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main() -> None:
    """Be the keeper of an agent."""
    with suppress(OSError):
        os.setsid()
    become_subreaper()
    keeper = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)  # until there is an agent: the folder would be left
    try:
        folder = PrivateFolder()
        child = os.fork()
    except OSError as error:
        _say_why_not("the agent", error)
        os._exit(1)
    if child == 0:
        status = 1
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
            become_subreaper()
            die_with_parent(keeper, signal.SIGTERM)
            Agent(folder).run()
            status = 0
        except BaseException as error:
            _say_why_not("the agent", error)
        finally:
            folder.remove()
            with suppress(OSError):
                os.kill(keeper, signal.SIGCONT)  # in case it was stopped
            os._exit(status)
    _keep(child, folder)


def _say_why_not(what: str, error: BaseException) -> None:
    """Report an error to the launcher as the end of this host's stderr: a limit in one line, else the
    traceback of the exception that is being handled.
    """
    why = ""
    with suppress(OSError):  # printing may load a module of Python, which takes a file descriptor
        from ..system.limits import why_not_started

        why = why_not_started(what, error)
    if why:
        os.write(2, why.encode() + b"\n")
    else:
        print_traceback()


def _keep(child: int, folder: PrivateFolder) -> None:
    """Outlive the agent, then leave nothing of it behind."""

    def pass_on(signum: int, frame: object) -> None:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGTERM)

    for signum in _PASSED_ON:
        signal.signal(signum, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
    os.close(0)
    os.close(1)
    folder.remove_abandoned()
    status = 1
    while True:
        try:
            pid, ended_with = os.waitpid(-1, os.WUNTRACED)
        except ChildProcessError:
            break
        except OSError as error:
            if error.errno != errno.EINTR:
                raise
            continue
        if os.WIFSTOPPED(ended_with):
            # A stopped agent would not notice that its launcher is gone, and no user stops one on purpose.
            if pid == child:
                os.kill(child, signal.SIGCONT)
        elif pid == child:
            status = ended_with
            if os.WIFSIGNALED(status):  # otherwise the agent itself said why it ended
                with suppress(OSError):
                    os.write(2, b"it was killed by %s\n" % name_of_signal(os.WTERMSIG(status)).encode())
            end_descendants()
            folder.remove()  # again, in case the agent was killed before it did
    os._exit(1 if status else 0)
