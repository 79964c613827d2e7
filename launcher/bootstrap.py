"""How the agent gets onto a node: a constant command line, and the agent's source as the first bytes of the stream.

The command line is the same for every job, so `ps` on a node shows nothing of the user's. It must survive any login
shell (sh, bash, zsh, fish, csh), hence one line without quotes or backslashes inside the single-quoted parts.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from importlib.resources import files

from .host import Host

_PLAIN_PATH = re.compile(r"/[A-Za-z0-9_./+-]+")  # the same word in every login shell

# Runs the Python text that is the first line of stdin. Unbuffered, so that not a byte of what follows is taken.
READ_LOADER = 'exec(eval(open(0,"rb",0,closefd=False).readline()))'

# The same for a host that is reached through a gateway: its first word tells that the login there worked.
ANNOUNCED = b"dslaunch is here;"
_ANNOUNCE_AND_READ = f'import os;os.write(1,b"{ANNOUNCED.decode()}");{READ_LOADER}'

_FIND_PYTHON = (
    'for p in "$0" python3 python; do '
    'if command -v "$p" >/dev/null 2>&1; then exec "$p" -I -S -u -c "$1"; fi; done; '
    "echo no python on this host: tried $0, python3 and python >&2; exit 127"
)

_READ = """
import json, os, sys, types
def read(size):
    parts = []
    while size:
        part = os.read(0, min(size, 1 << 16))
        if not part: sys.exit(1)
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
modules = json.loads(read(SIZE))
"""

# Makes modules of their source; then the last of them takes over.
_INSTALL = """
package = types.ModuleType("dslaunch_node")
package.__path__ = []
sys.modules["dslaunch_node"] = package
for name, source in modules:
    module = types.ModuleType("dslaunch_node." + name)
    module.__package__ = "dslaunch_node"
    sys.modules[module.__name__] = module
    exec(compile(source, "dslaunch_node/" + name + ".py", "exec"), module.__dict__)
module.main()
"""

_MODULES = (
    "frames",
    "output",
    "devices",
    "evidence",
    "private_folder",
    "pid_file",
    "process_tree",
    "worker",
    "binding",
    "reach",
    "inspection",
    "preparation",
    "stack_dump",
    "agent",
)  # in import order
_RELAY_MODULES = ("frames", "mux", "process_tree", "relay")


def agent_python(host: Host) -> str:
    """What to try first for the agent: it needs some Python, and a host's own may be the only one there."""
    return host.python if host.python and _PLAIN_PATH.fullmatch(host.python) else sys.executable


def remote_command(python: str = sys.executable) -> str:
    """The command for a login shell on a node; it prefers `python`, then whatever python is on PATH."""
    return _command(READ_LOADER, python)


def relayed_command(python: str = sys.executable) -> str:
    """The same for a host behind a gateway: it prints ANNOUNCED before it reads anything."""
    return _command(_ANNOUNCE_AND_READ, python)


def node_python(code: str, python: str = sys.executable) -> tuple[str, ...]:
    """The command that runs `code` with `python`, or with whatever python is on PATH there; it needs no login shell."""
    return "/bin/sh", "-c", _FIND_PYTHON, python, code


def agent_source() -> bytes:
    """What goes down the stream before any frame: the loader as one line, then the agent's modules."""
    return _bundled(_MODULES)


def relay_source() -> bytes:
    """The same for a relay on a gateway."""
    return _bundled(_RELAY_MODULES)


def shim_source() -> str:
    """Python text that is the worker shim with all it needs, for processes that MPI or Slurm starts."""
    names = (*_MODULES[: _MODULES.index("agent")], "worker_shim")
    return f"import sys, types\nmodules = {_sources(names)!r}\n{_INSTALL}"


def _command(code: str, python: str) -> str:
    return "exec " + " ".join(shlex.quote(word) for word in node_python(code, python))


def _bundled(names: tuple[str, ...]) -> bytes:
    bundle = json.dumps(_sources(names)).encode()
    loader = _READ.replace("SIZE", str(len(bundle))) + _INSTALL
    return repr(loader).encode() + b"\n" + bundle


def _sources(names: tuple[str, ...]) -> list[tuple[str, str]]:
    here = files(__package__)
    return [(name, (here / f"{name}.py").read_text("utf-8")) for name in names]
