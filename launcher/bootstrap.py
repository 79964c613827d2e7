"""How the agent gets onto a node: a constant command line, and the agent's source as the first bytes of the stream.

The command line is the same for every job, so `ps` on a node shows nothing of the user's. It must survive any login
shell (sh, bash, zsh, fish, csh), hence one line without quotes or backslashes inside the single-quoted parts.
"""

from __future__ import annotations

import json
import shlex
import sys
from importlib.resources import files

# Runs the Python text that is the first line of stdin. Unbuffered, so that not a byte of what follows is taken.
READ_LOADER = 'exec(eval(open(0,"rb",0,closefd=False).readline()))'

_FIND_PYTHON = (
    'for p in "$0" python3 python; do '
    'if command -v "$p" >/dev/null 2>&1; then exec "$p" -I -S -u -c "$1"; fi; done; '
    "echo no python on this host: tried $0, python3 and python >&2; exit 127"
)

_LOADER = """
import json, os, sys, types
def read(size):
    parts = []
    while size:
        part = os.read(0, min(size, 1 << 16))
        if not part: sys.exit(1)
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
package = types.ModuleType("dslaunch_node")
package.__path__ = []
sys.modules["dslaunch_node"] = package
for name, source in json.loads(read(SIZE)):
    module = types.ModuleType("dslaunch_node." + name)
    module.__package__ = "dslaunch_node"
    sys.modules[module.__name__] = module
    exec(compile(source, "dslaunch_node/" + name + ".py", "exec"), module.__dict__)
sys.modules["dslaunch_node.agent"].main()
"""

_MODULES = (
    "frames",
    "output",
    "devices",
    "process_tree",
    "worker",
    "preparation",
    "agent",
)  # in import order


def remote_command(python: str = sys.executable) -> str:
    """The command for a login shell on a node; it prefers `python`, then whatever python is on PATH."""
    return f"exec /bin/sh -c {shlex.quote(_FIND_PYTHON)} {shlex.quote(python)} {shlex.quote(READ_LOADER)}"


def agent_source() -> bytes:
    """What goes down the stream before any frame: the loader as one line, then the agent's modules."""
    here = files(__package__)
    modules = [(name, (here / f"{name}.py").read_text("utf-8")) for name in _MODULES]
    bundle = json.dumps(modules).encode()
    loader = _LOADER.replace("SIZE", str(len(bundle)))
    return repr(loader).encode() + b"\n" + bundle
