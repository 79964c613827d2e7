"""Workers that do not import everything again: one process imports, and each worker is a fork of it.

Standard library only.

[Note: How preloading works]
The preloader is the job's Python in the job's environment. It imports the modules and then waits for requests
on a socket. For each it forks twice: the process in between ends at once, so the worker is a child of the
agent, which is a subreaper, like any worker that was executed. The worker makes a session, takes its
environment, arguments, output and CPUs, and runs the script as `__main__` at the top of the interpreter, so
what happens at the end of a program happens. Its command line in /proc is overwritten with its own.

A fork keeps no thread but the one that calls it, and a CUDA context does not survive it. So after the imports
the preloader forks once for nothing, for libraries such as OpenBLAS end their threads at that, and gives up
if threads are left or if torch has initialized CUDA: the workers are then started as ever, and that is said.
The thread of jemalloc, which comes with pyarrow and so with pandas, does no harm: it only gives memory back,
and a forked jemalloc does so itself.

What the workers share: PYTHONHASHSEED, and the state of any generator of random numbers that a module seeded
when it was imported. `random` seeds itself again after a fork; NumPy's global generator and torch's are
seeded again by us, for each process has others. torch's is not if a module gave it a seed: what torch chooses
has 64 bits, and what is given has not.
"""

from __future__ import annotations

import os
import struct

from ..wire import fast_json
from ..wire.frames import text_of
from .lean_stdlib import suppress
from .worker import Worker, start_worker
from .worker_hook import STACKS, TIMINGS

TYPE_CHECKING = False  # typing is slow to import
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

FORK_TIMEOUT_S = 30.0
IMPORT_TIMEOUT_S = 300.0
MAX_NOTES = 3  # lines that the modules printed while they were imported

# What the preloader runs. Its text is the process's command line, which must be long enough for a worker's.
SERVER = (
    STACKS
    + TIMINGS
    + r'''
def _serve(link):
    """Import, then fork for each request; returns only in a worker, with what it is to run."""
    import array, ctypes, gc, importlib, json, os, socket, struct, sys, types
    def receive():
        size = socket.CMSG_SPACE(2 * array.array("i").itemsize)
        data, extra, _, _ = link.recvmsg(4, size)
        fds = array.array("i")
        for _, _, one in extra:
            fds.frombytes(one[: len(one) - len(one) % fds.itemsize])
        while data and (len(data) < 4 or len(data) < 4 + struct.unpack(">I", data[:4])[0]):
            more = link.recv(1 << 16)
            data = data + more if more else b""
        return (json.loads(data[4:]) if data else None), list(fds)
    def answer(**words):
        body = json.dumps(words).encode()
        link.sendall(struct.pack(">I", len(body)) + body)
    def encoded(text):
        return text.encode("utf-8", "surrogateescape")
    with open("/proc/self/environ", "rb") as file:
        given = {item.partition(b"=")[0] for item in file.read().split(b"\0")}
    added = {name: value for name, value in os.environb.items() if name not in given}  # by Python: LC_CTYPE
    job, _ = receive()
    if job["timings"]:
        _watch_collectives(job["timings"])
    script = job["script"]
    folder = os.getcwd() if script is None else os.path.dirname(os.path.realpath(encoded(script)))
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.fsdecode(folder)
    main = types.ModuleType("__main__")
    main.__builtins__ = __builtins__
    sys.modules["__main__"] = main
    gc.disable()  # what is imported stays: to search it for garbage takes a fifth of the time
    try:
        for name in job["modules"]:
            importlib.import_module(name)
    except BaseException as error:
        answer(problem=f"{type(error).__name__}: {error}")
        os._exit(1)
    gc.freeze()
    gc.enable()
    for_nothing = os.fork()
    if for_nothing == 0:
        os._exit(0)
    os.waitpid(for_nothing, 0)
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    has_cuda = cuda is not None and cuda.is_initialized()
    num_threads = 0
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/comm") as file:
                num_threads += file.read() != "jemalloc_bg_thd\n"
        except OSError:  # it has just ended
            pass
    answer(num_threads=num_threads, has_cuda=has_cuda)
    while True:
        request, fds = receive()
        if request is None:
            os._exit(0)
        between = os.fork()
        if between:
            os.waitpid(between, 0)
            for fd in fds:
                os.close(fd)
            continue
        parent = os.getpid()
        if os.fork():
            os._exit(0)
        while os.getppid() == parent:
            os.sched_yield()
        if os.getppid() != request["agent"]:
            os._exit(1)
        os.setsid()
        libc = ctypes.CDLL(None)
        libc.prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGKILL
        if os.getppid() != request["agent"]:
            os._exit(1)
        if request["cores"] is not None:
            os.sched_setaffinity(0, request["cores"])
        null = os.open(os.devnull, os.O_RDONLY)
        for place, fd in enumerate((null, *fds)):
            os.dup2(fd, place)
            os.close(fd)
        words = [encoded(one) for one in request["argv"]]
        with open("/proc/self/stat", "rb") as file:
            begin, end = (int(one) for one in file.read().rpartition(b")")[2].split()[45:47])
        line = (b"\0".join(words) + b"\0")[: end - begin]
        ctypes.memset(begin, 0, end - begin)
        ctypes.memmove(begin, line, len(line))
        # PR_SET_MM, ARG_END; root only, else zeros follow
        libc.prctl(35, 9, ctypes.c_ulong(begin + len(line)), 0, 0)
        env = {encoded(name): encoded(value) for name, value in request["env"]}
        env.update(added)
        stacks = env.pop(b"DSLAUNCH_STACKS", b"")
        for name in set(os.environb) - set(env):
            del os.environb[name]
        os.environb.update(env)
        answer(pid=os.getpid())
        link.close()
        if stacks:
            _register_stacks(os.fsdecode(stacks))
        if "numpy.random" in sys.modules:
            sys.modules["numpy.random"].seed()
        torch_random = getattr(sys.modules.get("torch"), "default_generator", None)
        if torch_random is not None and torch_random.initial_seed() >= 1 << 32:
            torch_random.seed()
        if "threading" in sys.modules:  # before Python 3.13 it keeps the number of the process forked from
            sys.modules["threading"].main_thread()._set_native_id()
        sys.orig_argv[:] = [os.fsdecode(one) for one in words]
        sys.argv[:] = [os.fsdecode(one) for one in words[len(words) - request["num_arguments"] :]]
        return main, script and os.fsdecode(encoded(script)), job["module"]

def _hide_ourselves():
    """Let a traceback begin where the program begins."""
    import sys
    hook = sys.excepthook
    def show(kind, error, trace):
        while trace is not None and trace.tb_frame.f_globals is globals():
            trace = trace.tb_next
        hook(kind, error.with_traceback(trace), trace)
    sys.excepthook = show

def _run(main, script, module):
    import importlib.machinery, os, runpy, sys
    if module is not None:
        runpy._run_module_as_main(module)
        return
    if os.path.isdir(script) or not script.endswith(".py"):
        with open(script, "rb") if os.path.isfile(script) else open(os.devnull, "rb") as file:
            is_archive = os.path.isdir(script) or file.read(4) == b"PK\3\4"
        if is_archive:
            runpy.run_path(script, run_name="__main__")
            return
    path = os.path.abspath(script)
    main.__file__ = path
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    main.__spec__ = main.__cached__ = None
    with open(path, "rb") as file:
        source = file.read()
    try:
        exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)
    except SystemExit:
        raise
    except BaseException:
        _hide_ourselves()
        raise

import socket, sys
_run(*_serve(socket.socket(fileno=int(sys.argv[1]))))
'''
)


class Unpreloaded(Exception):
    """The modules cannot be imported, or no preloader could be started; the message says why."""


class Preloader:
    """A process of the job's Python that has imported modules.

    `why_not` says why no worker can be forked from it.
    """

    def __init__(
        self,
        modules: Iterable[str],
        *,
        python: str,
        env: dict[bytes, bytes],
        script: str | None,
        module: str | None,
        timings_pipe: str | None,
    ) -> None:
        """Waits for the imports. `script` is a file, `module` what follows -m; one of them is None.

        Errors: Unpreloaded
        """
        import socket  # here and below: agents of jobs that preload nothing start sooner
        import subprocess
        import tempfile

        ours, theirs = socket.socketpair()
        self._link = ours
        self._link.settimeout(IMPORT_TIMEOUT_S)
        self.notes: list[str] = []

        with tempfile.TemporaryFile() as printed:
            try:
                subprocess.Popen(
                    [python, "-u", "-c", SERVER, str(theirs.fileno())],
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=printed,
                    stderr=printed,
                    pass_fds=[theirs.fileno()],
                )
            except OSError as error:
                raise Unpreloaded(f"{python}: {os.strerror(error.errno or 0)}") from None
            finally:
                theirs.close()
            self._send(
                {"modules": [*modules], "script": script, "module": module, "timings": timings_pipe or ""}, ()
            )
            answer = self._receive()
            printed.seek(0)
            lines = text_of(printed.read()).split("\n")
        if "problem" in answer:
            raise Unpreloaded(answer["problem"])
        if not answer:
            raise Unpreloaded(
                "Python ended: " + next((one for one in reversed(lines) if one), "without a word")
            )
        self.notes = [line for line in lines if line.strip()][:MAX_NOTES]
        self.why_not = ""
        if answer["num_threads"] > 1:
            self.why_not = f"importing starts {answer['num_threads'] - 1} threads, which a fork would lose"
        elif answer["has_cuda"]:
            self.why_not = "importing initializes CUDA, which a fork cannot use"
        self._link.settimeout(FORK_TIMEOUT_S)
        if self.why_not:
            self.close()

    def spawn(
        self,
        *,
        rank: int,
        argv: list[bytes],
        num_arguments: int,
        env: dict[bytes, bytes],
        cores: Iterable[int] | None = None,
    ) -> Worker:
        """As worker.spawn(). The last `num_arguments` of `argv` are the program's sys.argv.

        Errors: Unpreloaded
        """
        request = {
            "argv": [text_of(one) for one in argv],
            "num_arguments": num_arguments,
            "env": [[text_of(name), text_of(value)] for name, value in env.items()],
            "cores": None if cores is None else [*cores],
            "agent": os.getpid(),
        }

        def fork(out: int, err: int) -> int:
            self._send(request, (out, err))
            answer = self._receive()
            if "pid" not in answer:
                raise Unpreloaded("it ended before the worker started")
            return int(answer["pid"])

        return start_worker(rank, fork)

    def close(self) -> None:
        """No more workers: the process ends."""
        self._link.close()

    def _send(self, message: dict[str, Any], fds: tuple[int, ...]) -> None:
        import array
        import socket

        body = fast_json.write(message).encode("utf-8", "surrogatepass")
        data = struct.pack(">I", len(body)) + body
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        with suppress(BrokenPipeError, ConnectionResetError):  # noticed when the answer is read
            sent = self._link.sendmsg([data], rights)
            self._link.sendall(data[sent:])

    def _receive(self) -> dict[str, Any]:
        """The next answer; empty if the process ended or is silent for too long."""
        data = b""
        with suppress(OSError):
            while len(data) < 4 or len(data) < 4 + struct.unpack(">I", data[:4])[0]:
                more = self._link.recv(1 << 16)
                if not more:
                    return {}
                data += more
            answer: dict[str, Any] = fast_json.read(data[4:].decode("utf-8", "surrogatepass"))
            return answer
        return {}
