"""How the agent gets onto a node: a constant command line, and the agent's source as the first bytes of the stream.

The command line is the same for every job, so `ps` on a node shows nothing of the user's. It must survive any login
shell (sh, bash, zsh, fish, csh), hence one line without quotes or backslashes inside the single-quoted parts.
"""

from __future__ import annotations

import json
import marshal
import re
import shlex
import sys
import zlib
from importlib.util import MAGIC_NUMBER, find_spec
from types import CodeType
from typing import Any

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

# Compiling the modules takes a host 30 ms of CPU, so they come compiled too, for hosts with the launcher's own Python.
_READ = """
import marshal, os, sys, types, zlib
def read(size):
    parts = []
    while size:
        part = os.read(0, min(size, 1 << 16))
        if not part: sys.exit(1)
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
compiled, text = read(SIZES[0]), read(SIZES[1])
if (sys.implementation.cache_tag, sys.modules["_frozen_importlib_external"].MAGIC_NUMBER) == PYTHON:
    modules = marshal.loads(zlib.decompress(compiled))
else:
    import json
    modules = json.loads(zlib.decompress(text))
"""

# Makes modules of their source or code; then the last of them takes over. What was loaded stays, so it is not searched
# for garbage: that would take 1 ms here, and 1 ms again in each of the agent's two processes.
_INSTALL = """
import gc
gc.disable()
package = types.ModuleType("dslaunch_node")
package.__path__ = []
sys.modules["dslaunch_node"] = package
for name, source in modules:
    module = types.ModuleType("dslaunch_node." + name)
    module.__package__ = "dslaunch_node"
    sys.modules[module.__name__] = module
    if isinstance(source, str):
        source = compile(source, "dslaunch_node/" + name + ".py", "exec")
    exec(source, module.__dict__)
gc.freeze()
gc.enable()
module.main()
"""

_MODULES = (
    "record",
    "json_text",
    "lean",
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
    "open_port",
    "inspection",
    "preparation",
    "worker_hook",
    "stack_dump",
    "milestones",
    "preload",
    "starter",
    "worker_group",
    "ending",
    "uplink",
    "background",
    "agent",
    "keeper",
)  # in import order
_RELAY_MODULES = ("record", "json_text", "lean", "frames", "mux", "process_tree", "relay")
_SHIM_MODULES = (
    "record",
    "json_text",
    "lean",
    "frames",
    "devices",
    "process_tree",
    "binding",
    "reach",
    "preparation",
    "worker_shim",
)


COMPRESSION = 1  # 3 ms once, and a third of the bytes for every host


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
    """What goes down the stream before any frame: the loader as one line, then the agent's modules, twice."""
    return _bundled(_MODULES)


def relay_source() -> bytes:
    """The same for a relay on a gateway."""
    return _bundled(_RELAY_MODULES)


def shim_source() -> str:
    """Python text that is the worker shim with all it needs, for processes that MPI or Slurm starts."""
    return f"import sys, types\nmodules = {_sources(_SHIM_MODULES)!r}\n{_INSTALL}"


def _command(code: str, python: str) -> str:
    return "exec " + " ".join(shlex.quote(word) for word in node_python(code, python))


def _bundled(names: tuple[str, ...]) -> bytes:
    compiled = zlib.compress(marshal.dumps([(name, _code(name)) for name in names]), COMPRESSION)
    text = zlib.compress(json.dumps(_sources(names)).encode(), COMPRESSION)
    python = (sys.implementation.cache_tag, MAGIC_NUMBER)
    loader = f"SIZES = {len(compiled), len(text)!r}\nPYTHON = {python!r}\n{_READ}{_INSTALL}"
    return repr(loader).encode() + b"\n" + compiled + text


def _sources(names: tuple[str, ...]) -> list[tuple[str, str]]:
    return [(name, _loader_of(name).get_source(f"{__package__}.{name}")) for name in names]


def _code(name: str) -> CodeType:
    """The module as this Python compiles it, or has compiled it when it was installed."""
    code: CodeType = _loader_of(name).get_code(f"{__package__}.{name}")
    return code


def _loader_of(name: str) -> Any:  # importlib.abc.InspectLoader, or the like of an editable installation
    spec = find_spec(f"{__package__}.{name}")
    if spec is None:
        raise AssertionError(f"{name}: a module of the agent is missing from {__package__}")
    return spec.loader
