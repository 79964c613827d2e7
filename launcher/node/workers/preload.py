"""Workers that do not import everything again: one process imports, and each worker is a fork of it.

[Note: How preloading works]
The preloader is the job's Python in the job's environment, started with the words of a worker, and with a
`sitecustomize` of ours, which Python runs before the script. That imports the modules and then waits for
requests on a socket. For each it forks twice: the process in between ends at once, so the worker is a child
of the agent, which is a subreaper, like any worker that was executed. The worker makes a session, takes its
environment, arguments, output and CPUs, and returns from the sitecustomize: then Python itself runs the
script, so its `__main__`, its outermost frame and its end are those of any program. Its command line in /proc
is overwritten with its own.

A Python that runs no sitecustomize (`-S`, `-I` and `-E` in a script around it) would run the program at once.
So it is first tried with `-c ""` for a program.

What Python runs at its start, lines of `.pth` files and the sitecustomize and usercustomize of the site, has
run before the workers have their variables. If one of these files names a rank's variable, nothing is shared.

A fork keeps only the thread that calls it, and a CUDA context does not survive it. So after the imports the
preloader forks once on trial, because libraries such as OpenBLAS end their threads at a fork. It gives up if
threads are left or if torch has initialized CUDA: the workers are then started without sharing, and a note
says so. The thread of jemalloc, which comes with pyarrow and so with pandas, does no harm: it only gives
memory back, and a forked jemalloc does so itself.

The workers share PYTHONHASHSEED, and the state of any generator of random numbers that a module seeded when
it was imported. `random` seeds itself again after a fork; we seed NumPy's global generator and torch's again,
differently in each process. torch's keeps a seed that a module gave it: torch chooses seeds of 64 bits, and a
shorter one was given.
"""

from __future__ import annotations

import fcntl
import os
import struct

from ...wire import fast_json
from ...wire.frames import text_of
from ..system.lean_stdlib import suppress
from ..system.process_tree import kill_descendants
from .worker import Worker, start_worker
from .worker_hook import add_hook, install_hook

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    import subprocess
    from collections.abc import Callable, Iterable
    from typing import Any, BinaryIO, NamedTuple
else:
    from ...wire.fast_tuple import Record as NamedTuple

FORK_S = 30.0


class PreloadTimes(NamedTuple):
    """Time limits of the preloading, all within the time after which the launcher gives the host up."""

    start_s: float  # time for Python to start
    import_s: float
    fork_s: float
    end_s: float  # time for a killed Python to be gone

    @classmethod
    def within(cls, *, prepare_timeout_s: float, heartbeat_s: float) -> PreloadTimes:
        """Divide the time. A fork stops the agent, so it ends before a heartbeat is missed."""
        start_s, import_s, end_s = (part * prepare_timeout_s for part in (0.1, 0.5, 0.02))
        return cls(start_s, import_s, min(FORK_S, heartbeat_s / 4), end_s)


class Imports(NamedTuple):
    """Lines of a program, to be imported in this order: each a module, and the names that it takes from it.

    `later`: variables that only a worker has; then each line is looked at, and the imports end before one
    that is not installed, or that workers could not share. None: all of them are to be imported. `script` is
    the program's file, None for a module; `watched` as in worker_hook.py.
    """

    lines: list[list[str]]
    script: str | None
    watched: str = ""
    later: list[str] | None = None

    @property
    def names(self) -> str:
        return ", ".join(line[0] for line in self.lines)


MAX_NOTES = 3  # lines that the modules printed while they were imported
_F_SETPIPE_SZ = 1031
PRELOAD_VARIABLE = b"DSLAUNCH_PRELOAD"  # a socket and a file to print to, or a pipe: see _runs_hook


class Unpreloaded(Exception):
    """An import fails, or no preloader can be started; the message says why."""


class Preloader:
    """A process of the job's Python that has imported modules.

    `why_not` says why no worker can be forked from it, and `num_fit` how many lines of its imports could be
    imported all the same, as far as known.
    """

    def __init__(
        self,
        imports: Imports,
        *,
        argv: list[bytes],
        num_options: int,
        env: dict[bytes, bytes],
        folder: str | None,
        times: PreloadTimes,
        start: Callable[..., subprocess.Popen[bytes]] | None = None,
    ) -> None:
        """Wait for the imports. `argv` is the longest command line of a worker; its first `num_options` words
        stand before the script, or before -m. `folder` is a folder to make and to write to, None if there can
        be none. `start` starts processes as subprocess.Popen does.

        Errors: Unpreloaded
        """
        import socket

        from .preload_server import SERVER

        self.imports = imports
        self.notes: list[str] = []
        self.why_not = ""
        self.num_fit = self.pid = 0
        self._start = start
        self._link, theirs = socket.socketpair()
        self._link.settimeout(times.import_s)
        try:
            printed = _prepared(folder, SERVER)
        except OSError:  # a full disk
            printed = None
        env = dict(env)
        try:
            if printed is None or folder is None:
                self.why_not = "no temporary file can be made, in which that is done"
                self.close()
                return
            add_hook(env, folder=folder)
            if not _runs_hook(argv[:num_options], env, times, start):
                self.why_not = "this Python runs no sitecustomize, in which that is done"
                self.close()
                return
            words = {
                "lines": imports.lines,
                "later": imports.later,
                "script": imports.script,
                "watched": imports.watched,
            }
            lines, answer = self._import(words, theirs, printed, argv=argv, env=env, times=times)
        except OSError as error:
            raise Unpreloaded(f"{text_of(argv[0])}: {os.strerror(error.errno or 0)}") from None
        finally:
            theirs.close()
            if printed is not None:
                printed.close()
        if "problem" in answer:
            self.close()
            raise Unpreloaded(answer["problem"])
        if not answer:
            raise Unpreloaded(
                "Python ended: " + next((one for one in reversed(lines) if one), "without a word")
            )
        self.notes = [line for line in lines if line.strip()][:MAX_NOTES]
        self.why_not, self.num_fit = _why_not(answer), answer.get("num_fit", 0)
        self._link.settimeout(times.fork_s)
        if self.why_not:
            self.close()

    def _import(
        self,
        words: dict[str, Any],
        theirs: socket.socket,
        printed: BinaryIO,
        *,
        argv: list[bytes],
        env: dict[bytes, bytes],
        times: PreloadTimes,
    ) -> tuple[list[str], dict[str, Any]]:
        """Return the printed lines and the answer. Errors: OSError if Python cannot be run"""
        import subprocess

        early, to_early = os.pipe()  # output of Python before the hook runs
        try:
            try:
                with suppress(OSError):
                    fcntl.fcntl(to_early, _F_SETPIPE_SZ, 1 << 20)  # PYTHONVERBOSE prints much
                process = (self._start or subprocess.Popen)(
                    argv,
                    env={**env, PRELOAD_VARIABLE: b"%d %d" % (theirs.fileno(), printed.fileno())},
                    stdin=subprocess.DEVNULL,
                    stdout=to_early,
                    stderr=to_early,
                    pass_fds=[theirs.fileno(), printed.fileno()],
                )
            finally:
                os.close(to_early)
            self.pid = process.pid
            theirs.close()
            self._send(words, ())
            answer = self._receive()
            if "problem" in answer:
                _end(process, times.end_s)
            os.set_blocking(early, False)
            data = b""
            with suppress(BlockingIOError):
                data = os.read(early, 1 << 16)
        finally:
            os.close(early)
        printed.seek(0)
        return text_of(data + printed.read()).split("\n"), answer

    def spawn(
        self,
        *,
        rank: int,
        argv: list[bytes],
        num_arguments: int,
        env: dict[bytes, bytes],
        cores: Iterable[int] | None = None,
    ) -> Worker:
        """Fork a worker, as worker.spawn() starts one. The last `num_arguments` of `argv` are the program's
        sys.argv.

        Errors: Unpreloaded
        """
        request = {
            "argv": [text_of(one) for one in argv],
            "num_arguments": num_arguments,
            "env": [[text_of(name), text_of(value)] for name, value in env.items()],
            "cores": None if cores is None else [*cores],
            "agent": os.getpid(),
            "cwd": text_of(os.getcwdb()),
        }

        def fork(out: int, err: int) -> int:
            self._send(request, (out, err))
            answer = self._receive()
            if "pid" not in answer:
                raise Unpreloaded("it ended before the worker started")
            return int(answer["pid"])

        return start_worker(rank, fork)

    def close(self) -> None:
        """End the process: no more workers are needed."""
        self._link.close()

    @property
    def is_there(self) -> bool:
        """Tell whether the process waits for requests."""
        import select

        if self._link.fileno() < 0:
            return False
        poll = select.poll()
        poll.register(self._link.fileno(), select.POLLIN)
        return not poll.poll(0)

    def _send(self, message: dict[str, Any], fds: tuple[int, ...]) -> None:
        import array
        import socket

        body = fast_json.write(message).encode("utf-8", "surrogatepass")
        data = struct.pack(">I", len(body)) + body
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        with suppress(BrokenPipeError, ConnectionResetError):  # the missing answer shows it
            sent = self._link.sendmsg([data], rights)
            self._link.sendall(data[sent:])

    def _receive(self) -> dict[str, Any]:
        """The next answer; empty if the process ended, a `problem` if it is silent for too long."""

        data = b""
        try:
            while len(data) < 4 or len(data) < 4 + struct.unpack(">I", data[:4])[0]:
                more = self._link.recv(1 << 16)
                if not more:
                    return {}
                data += more
            answer: dict[str, Any] = fast_json.read(data[4:].decode("utf-8", "surrogatepass"))
            return answer
        except TimeoutError:  # Python 3.8 has another class for it
            within_s = self._link.gettimeout()
            return {"problem": f"nothing was heard of it for {within_s:g} s, a part of --prepare_timeout"}
        except OSError:
            return {}


def _prepared(folder: str | None, text: str) -> BinaryIO | None:
    """Install the hook in the folder, and open the file for printed lines. Errors: OSError"""
    if folder is None:
        return None
    install_hook(folder, text)
    return open(os.path.join(folder, "printed"), "w+b")


def _end(process: subprocess.Popen[bytes], within_s: float) -> None:
    """End a Python that was given up, with its children; do not wait if no signal ends it."""
    import subprocess

    if process.poll() is None:
        kill_descendants(process.pid)  # processes that its imports started; they would become the agent's
        process.kill()
    with suppress(subprocess.TimeoutExpired):
        process.wait(within_s)


def _runs_hook(
    python: list[bytes],
    env: dict[bytes, bytes],
    times: PreloadTimes,
    start: Callable[..., subprocess.Popen[bytes]] | None,
) -> bool:
    """Tell whether this Python, with these options, runs our sitecustomize: it then says so and ends.

    Errors: OSError if it cannot be run
    """
    import select
    import subprocess

    told, tell = os.pipe()
    try:
        process = (start or subprocess.Popen)(
            [*python, b"-c", b""],
            env={**env, PRELOAD_VARIABLE: b"%d" % tell},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[tell],
        )
        os.close(tell)
        tell = -1
        try:
            runs = bool(select.select([told], [], [], times.start_s)[0] and os.read(told, 1))
        finally:
            _end(process, times.end_s)
        return runs
    finally:
        os.close(told)
        if tell >= 0:
            os.close(tell)


def _why_not(answer: dict[str, Any]) -> str:
    """Return why no worker can be forked from a process after these imports."""
    if answer["why_not"]:
        return str(answer["why_not"])
    if answer["num_threads"] > 1:
        return f"importing starts {answer['num_threads'] - 1} threads, which a fork would lose"
    if answer["has_cuda"]:
        return "importing initializes CUDA, which a fork cannot use"
    return ""
