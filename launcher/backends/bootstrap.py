"""How the agent gets onto a node: a constant command line, and the agent's source as the first bytes of the
stream.

The command line is the same for every job, so `ps` on a node shows nothing of the user's. It must survive any
login shell (sh, bash, zsh, fish, csh), hence one line without quotes or backslashes inside the single-quoted
parts.
"""

from __future__ import annotations

import contextlib
import functools
import marshal
import pkgutil
import re
import shlex
import sys
import threading
import zlib
from collections.abc import Iterator
from importlib import import_module
from importlib.util import MAGIC_NUMBER, find_spec
from types import CodeType
from typing import Any, NamedTuple

from ..errors import LaunchError
from ..inputs.host import Host

_LAUNCHER = __package__.rpartition(".")[0]
_FACADE = _LAUNCHER.rpartition(".")[0]
_PLAIN_PATH = re.compile(r"/[A-Za-z0-9_./+-]+")  # the same word in every login shell

# Errors of a prefix, or of an `ssh`, that is not usable; they stand on a command line.
NO_INPUT = "no input comes through it: podman exec and docker exec need the option -i"
HAS_TERMINAL = "its input is a terminal, which changes bytes: leave out the option -t"
NO_STDIN = "no input comes through ssh: leave out StdinNull, ForkAfterAuthentication, -n or -f for this host"
OTHER_PROC = "/proc there is not that of its processes: mount it, as unshare does with --mount-proc"
NO_FORK = "what it starts is in another PID namespace than itself: let it fork, as unshare does with -f"

# Runs the Python text that is the first line of stdin. Unbuffered, so that no byte after it is taken.
READ_LOADER = 'exec(eval(open(0,"rb",0,closefd=False).readline()))'

# READ_LOADER for a host behind a gateway: the word comes first and tells that the login there worked.
ANNOUNCED = b"dslaunch is here;"
_ANNOUNCE = f'import os;os.write(1,b"{ANNOUNCED.decode()}");'

# READ_LOADER for a way to the host that may give no input.
_READ_IF_ANY = (
    'l=open(0,"rb",0,closefd=False).readline();exec(eval(l)) if l else __import__("os").write(2,b"{}")'
)
_READ_INSIDE = _READ_IF_ANY.format(NO_INPUT)

# For an `ssh` of this machine: after ANNOUNCED comes sshd's variable with the client's address, up to
# FROM_END. It tells the launcher its own address on the way to the host.
FROM_END = b";"
_ANNOUNCE_FROM_AND_READ = (
    f'import os;os.write(1,b"{ANNOUNCED.decode()}"+os.environb.get(b"SSH_CONNECTION",b"")'
    f'+b"{FROM_END.decode()}");{_READ_IF_ANY.format(NO_STDIN)}'
)

_FIND_PYTHON = (
    'for p in "$0" python3 python; do '
    'if command -v "$p" >/dev/null 2>&1; then exec "$p" -I -S -u -c "$1"; fi; done; '
    "echo no python on this host: tried $0, python3 and python >&2; exit 127"
)

# After a prefix. A terminal would change the bytes, and in a wrong /proc the agent would take the processes
# of others for its own.
_LOOK_INSIDE = (
    f"if [ -t 0 ]; then echo {HAS_TERMINAL} >&2; exit 126; fi; p=; read p r </proc/self/stat; "
    f'if [ "$p" != "$$" ]; then echo {OTHER_PROC} >&2; exit 126; fi; '
    # The namespace of children has no inode before there is one. Kernels before 4.12 do not show it.
    'n="/proc/$$/ns/pid"; c="${n}_for_children"; if [ -e "$n" ] && [ -h "$c" ] && ! [ "$n" -ef "$c" ]; then '
    f"echo {NO_FORK} >&2; exit 126; fi; "
)

# Container tools pass on no variables, so SSH_CONNECTION, which has the address that other hosts reach, is
# printed before the container is entered. The word in front shows that the login did not end in a login
# script.
ENTERING = b"dslaunch-enters;"
_ENTER = f'printf %s "{ENTERING.decode()}"; exec "$@" "$SSH_CONNECTION"'
_KEEP_CONNECTION = 'if [ -n "$2" ]; then SSH_CONNECTION="$2"; export SSH_CONNECTION; fi; '

# A node writes this if its Python has another version than the launcher's.
WANTS_TEXT = b"\0dslaunch wants text\n"
_SIZE_DIGITS = 10

# A node's Python that is too old for an agent says so on stderr, and the launcher shows that line.
OLDEST_PYTHON = (3, 8)
NO_AGENT_RUNS_WITH = "no agent runs with "

# The first line of the stream, kept short because it is read byte by byte: reads the loader, and runs it.
_FIRST = """import os
def read(size):
 parts = []
 while size:
  part = os.read(0, min(size, 65536))
  if not part: os._exit(1)
  parts.append(part)
  size -= len(part)
 return b"".join(parts)
exec(read(SIZE))"""

# Compiling the modules takes a host 30 ms of CPU, so they come compiled, for hosts with the launcher's own
# Python. The garbage collector waits until all is loaded: it would take 1 ms here, and 1 ms in each process
# of an agent.
_LOAD = f"""
import gc, marshal, sys, zlib
if sys.version_info < {OLDEST_PYTHON}:  # this must be readable for Python 3.4
    found = (sys.executable or "python", sys.version.split()[0])
    need = "%s, which is Python %s: it needs {OLDEST_PYTHON[0]}.{OLDEST_PYTHON[1]} or newer" % found
    os.write(2, ({NO_AGENT_RUNS_WITH!r} + need).encode())
    os._exit(1)
gc.disable()
compiled = read(SIZE)
if (sys.implementation.cache_tag, sys.modules["_frozen_importlib_external"].MAGIC_NUMBER) == PYTHON:
    install, modules, later = marshal.loads(zlib.decompress(compiled))
else:
    os.write(1, {WANTS_TEXT!r})
    import json
    install, modules, later = json.loads(zlib.decompress(read(int(read({_SIZE_DIGITS})))))
exec(install)
gc.freeze()
gc.enable()
module.main()
"""

# The modules that travel to a node stand in these folders. They import nothing from outside them but the
# standard library and one file of names.
_FOLDERS = ("wire", "node.system", "node.observe", "node.workers", "node.files", "node.memory", "node.agent")
_PACKAGES = ("", ".shared", ".launcher", ".launcher.node", *(f".launcher.{folder}" for folder in _FOLDERS))

# Makes each module from its source or code at once; those of _later() are made when they are imported.
_INSTALL = (
    f"""
packages = {_PACKAGES!r}
"""
    + """
import sys
Module = type(sys)
def run(source, module):
    if isinstance(source, bytes):
        source = marshal.loads(zlib.decompress(source))
    elif isinstance(source, str):
        source = compile(source, module.__name__.replace(".", "/") + ".py", "exec")
    exec(source, module.__dict__)
class Later:
    def find_spec(self, name, path=None, target=None):
        source = later.get(name.partition(".")[2]) if path is folder else None
        return source and sys.modules["_frozen_importlib"].ModuleSpec(name, self, loader_state=source)
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        run(module.__spec__.loader_state, module)
folder = []
for name in packages:
    name = "dslaunch_node" + name
    sys.modules[name] = package = Module(name)
    package.__path__ = folder
sys.meta_path.append(Later())
if is_future_new := "__future__" not in sys.modules:  # `from __future__ import` loads it from disk: 0.3 ms
    sys.modules["__future__"] = Module("__future__")
    sys.modules["__future__"].annotations = None
for name, source in modules:
    module = Module("dslaunch_node." + name)
    module.__package__ = module.__name__.rpartition(".")[0]
    sys.modules[module.__name__] = module
    run(source, module)
if is_future_new:
    del sys.modules["__future__"]
"""
)

_ALL = ("shared.variables", "wire.fast_tuple", "wire.fast_json", "node.system.lean_stdlib", "wire.frames")
# In import order.
_AGENT = (
    *_ALL,
    "wire.job",
    "node.system.line_buffer",
    "node.system.kernel_file",
    "node.system.memory",
    "node.observe.devices",
    "node.observe.evidence",
    "node.system.private_folder",
    "node.system.process_tree",
    "node.workers.worker",
    "node.agent.reach",
    "node.workers.preparation",
    "node.workers.starter",
    "node.workers.worker_group",
    "node.workers.ending",
    "node.agent.uplink",
    "node.system.background",
    "node.agent.agent",
    "node.agent.keeper",
)
_RELAY = (
    *_ALL,
    "wire.mux",
    "node.system.kernel_file",
    "node.system.process_tree",
    "node.agent.gateway_relay",
)
_SHIM = (
    *_ALL,
    "wire.job",
    "node.system.address",
    "node.system.kernel_file",
    "node.observe.devices",
    "node.system.process_tree",
    "node.observe.core_binding",
    "node.observe.gpu_cores",
    "node.workers.preparation",
    "node.workers.worker_shim",
)
_NO_AGENT_LOADS = frozenset(
    {"wire.mux", "node.system.address", "node.agent.gateway_relay", "node.workers.worker_shim"}
)


# Only jobs that move files need these: a quarter of all.
_FOR_FILES = ("wire.manifest", "node.files.")
# Only jobs with snapshots need these.
_FOR_MEMORY = ("node.memory.", "shared.memory_messages")

_BUILDING = threading.Lock()
COMPRESSION = 1  # 3 ms once, and half of the bytes for every host


class AgentParts(NamedTuple):
    """Parts of an agent that only some jobs need."""

    moves_files: bool = False
    holds_memory: bool = False


USUAL = AgentParts()


def agent_python(host: Host) -> str:
    """Return the Python to try first for the agent: any will do, and a host may have only its own."""
    return host.python if host.python and _PLAIN_PATH.fullmatch(host.python) else sys.executable


def remote_command(python: str = sys.executable, prefix: tuple[str, ...] = ()) -> str:
    """Return the command for a login shell on a node; it prefers `python`, then any python on PATH."""
    return _command(_entered(_ENTER, python, prefix) if prefix else node_python(READ_LOADER, python))


def relayed_command(python: str = sys.executable, prefix: tuple[str, ...] = ()) -> str:
    """Return remote_command() for a host behind a gateway: it prints ANNOUNCED before it reads anything, and
    before it enters a container, which may take long.
    """
    if prefix:
        return _command(_entered(f'printf %s "{ANNOUNCED.decode()}"; {_ENTER}', python, prefix))
    return _command(node_python(_ANNOUNCE + READ_LOADER, python))


def inside(python: str, prefix: tuple[str, ...]) -> tuple[str, ...]:
    """Return the command that starts a bootstrap inside the prefix's container; it prints ANNOUNCED before
    it reads anything.
    """
    return (
        *prefix,
        "/bin/sh",
        "-c",
        _LOOK_INSIDE + _KEEP_CONNECTION + _FIND_PYTHON,
        python,
        _ANNOUNCE + _READ_INSIDE,
    )


def _entered(shell: str, python: str, prefix: tuple[str, ...]) -> tuple[str, ...]:
    return "/bin/sh", "-c", shell, "sh", *inside(python, prefix)


def announced_command(python: str = sys.executable, prefix: tuple[str, ...] = ()) -> str:
    """Return remote_command() for an `ssh` of this machine: it prints ANNOUNCED, SSH_CONNECTION and FROM_END
    first.
    """
    if prefix:
        words = f'"{ANNOUNCED.decode()}" "$SSH_CONNECTION" "{FROM_END.decode()}"'
        return _command(_entered(f"printf %s {words}; {_ENTER}", python, prefix))
    return _command(node_python(_ANNOUNCE_FROM_AND_READ, python))


def node_python(code: str, python: str = sys.executable) -> tuple[str, ...]:
    """Return the command that runs `code` with `python`, or with any python on PATH there; it needs no login
    shell.
    """
    return "/bin/sh", "-c", _FIND_PYTHON, python, code


def agent_source(parts: AgentParts = USUAL) -> bytes:
    """Return the bytes before any frame: a loader, and the agent's modules as this Python compiles them.

    A node with another Python writes WANTS_TEXT before anything else; `agent_text` is the answer. Any thread
    may call: the first call makes the bytes, which takes 8 ms; later ones reuse them.
    """
    with _BUILDING, _own_files():
        return _agent_source(parts)


@functools.cache
def _agent_source(parts: AgentParts) -> bytes:
    return _compiled(_AGENT, _later(parts))


def agent_text(parts: AgentParts = USUAL) -> bytes:
    """Return the agent's modules as text."""
    return _text(_AGENT, _later(parts))


def relay_source() -> bytes:
    """Return the bytes that start a relay on a gateway: a loader, and the relay's modules as this Python
    compiles them.
    """
    with _own_files():
        return _compiled(_RELAY)


def relay_text() -> bytes:
    """Return the relay's modules as text."""
    return _text(_RELAY)


def shim_source() -> str:
    """Return the worker shim and its modules as Python text, for processes that MPI or Slurm starts."""
    return f"modules, later = {_sources(_SHIM)!r}, {{}}\n{_INSTALL}module.main()\n"


@contextlib.contextmanager
def _own_files() -> Iterator[None]:
    """Name an installation that was changed or damaged under the launcher as the cause of an error."""
    try:
        yield
    except (OSError, ImportError) as error:
        raise LaunchError(
            f"dslaunch cannot read its own files, which the host needs: {error}; install dslaunch again"
        ) from error


def _later(parts: AgentParts) -> tuple[str, ...]:
    """List the modules that most agents never import: they are sent to all, and loaded only where one is
    imported.
    """
    found = (
        f"{folder}.{info.name}"
        for folder in _FOLDERS
        for info in pkgutil.iter_modules(import_module(f"{_LAUNCHER}.{folder}").__path__)
    )
    names = {*found, "shared.memory_messages"} - set(_AGENT) - _NO_AGENT_LOADS
    if not parts.moves_files:
        names = {name for name in names if not name.startswith(_FOR_FILES)}
    if not parts.holds_memory:
        names = {name for name in names if not name.startswith(_FOR_MEMORY)}
    return tuple(sorted(names))


def _command(words: tuple[str, ...]) -> str:
    return "exec " + " ".join(map(shlex.quote, words))


def _compiled(names: tuple[str, ...], later: tuple[str, ...] = ()) -> bytes:
    modules = [(_place(name), _code(name)) for name in names]
    packed = {_place(name): _packed(marshal.dumps(_code(name))) for name in later}
    code = _packed(marshal.dumps((compile(_INSTALL, "dslaunch_node", "exec"), modules, packed)))
    python = (sys.implementation.cache_tag, MAGIC_NUMBER)
    loader = f"SIZE = {len(code)}\nPYTHON = {python!r}\n{_LOAD}".encode()
    return repr(_FIRST.replace("SIZE", str(len(loader)))).encode() + b"\n" + loader + code


def _text(names: tuple[str, ...], later: tuple[str, ...] = ()) -> bytes:
    import json

    text = _packed(json.dumps((_INSTALL, _sources(names), dict(_sources(later)))).encode())
    return b"%0*d" % (_SIZE_DIGITS, len(text)) + text


def _packed(data: bytes) -> bytes:
    return zlib.compress(data, COMPRESSION)


def _sources(names: tuple[str, ...]) -> list[tuple[str, str]]:
    return [(_place(name), _loader_of(name).get_source(f"{_FACADE}.{_place(name)}")) for name in names]


def _code(name: str) -> CodeType:
    """Return the module's code, compiled now or when the package was installed."""
    code: CodeType = _loader_of(name).get_code(f"{_FACADE}.{_place(name)}")
    return code


def _place(name: str) -> str:
    """Return the module's name below the facade."""
    return name if name.startswith("shared.") else f"launcher.{name}"


# An importlib.abc.InspectLoader, or an editable installation's loader with the same methods
def _loader_of(name: str) -> Any:
    spec = find_spec(f"{_FACADE}.{_place(name)}")
    if spec is None:
        raise ImportError(f"{name}, a module of the agent, is missing from {_LAUNCHER}")
    return spec.loader
