"""The code that Python runs in a worker before the program.

[Note: The hook]
A worker has one folder more in front of PYTHONPATH, with a `sitecustomize.py`, which Python runs before the
program: about 1 ms of a start. It does the two tasks below if asked, takes the folder out of sys.path,
PYTHONPATH and sys.modules, and runs the sitecustomize that it hid, if there is one. So the program finds
sys.argv, __main__, sys.path and its environment as always, and programs that it starts are not touched.

Stacks: faulthandler is registered for a real-time signal. It writes in the signal handler, in C, so a rank
that waits in a lock or in a library answers too, and a rank that is not asked does nothing for it.

Milestones: functions of torch.distributed are wrapped when the program imports them: init_process_group,
which a program calls once its imports are done, and with --timings the collectives. Each phase is told once,
when the first such call has returned; a collective with async_op=True is told when it was begun.

Weighed and left: starting the script by `runpy` (tracebacks show it, and __main__ is another module), a
folder that stays on PYTHONPATH, PYTHONFAULTHANDLER (fatal signals only), gdb.
"""

from __future__ import annotations

import os

from ..system.lean_stdlib import signal

SIGNAL = signal.SIGRTMIN + 9  # has no meaning to Python, torch, NCCL or systemd
STACKS_VARIABLE = b"DSLAUNCH_STACKS"  # number of the signal, colon, file to write to
MILESTONES_VARIABLE = b"DSLAUNCH_WATCHED"  # the wrapped functions: `start`, or `all` with the collectives

# Python text, used here and in preload.py.
STACKS = """\
def _register_stacks(value):
    import faulthandler, os
    number, _, path = value.partition(":")
    high = 250  # out of the way of what the program opens
    try:
        while os.path.exists(f"/proc/self/fd/{high}"):
            high += 1
        low = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        os.dup2(low, high, inheritable=False)
        os.close(low)
        faulthandler.register(int(number), file=high, all_threads=True)
    except (OSError, ValueError):
        pass  # without stacks, then
"""
MILESTONES = """\
def _watch_milestones(watched):
    import functools, os, sys, time
    told = set()
    def tell(phase):
        if phase not in told:
            told.add(phase)
            at = time.monotonic()
            try:
                fd = os.open(os.environ["DSLAUNCH_MILESTONES"], os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
                os.write(fd, f"{os.environ.get('RANK', '')} {at!r} {phase}\\n".encode())
                os.close(fd)
            except (KeyError, OSError):
                pass  # the listener is gone
    def timed(function, phase, before=None):
        @functools.wraps(function)
        def call(*args, **kwargs):
            if before is not None:
                tell(before)
            result = function(*args, **kwargs)
            tell(phase)
            return result
        return call
    collectives = (
        "all_reduce broadcast reduce all_gather all_gather_into_tensor gather scatter reduce_scatter "
        "all_to_all reduce_scatter_tensor all_to_all_single barrier all_gather_object "
        "broadcast_object_list".split()
    )
    names = dict.fromkeys(collectives if watched == "all" else (), ("first collective",))
    names["init_process_group"] = "process group", "imported"
    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name != "torch.distributed.distributed_c10d":
                return None
            sys.meta_path.remove(self)
            found = (finder.find_spec(name, path, target) for finder in sys.meta_path)
            spec = next((one for one in found if one is not None), None)
            if spec is not None and hasattr(spec.loader, "exec_module"):
                execute = spec.loader.exec_module
                def exec_module(module):
                    execute(module)
                    for name, phases in names.items():
                        if hasattr(module, name):
                            setattr(module, name, timed(getattr(module, name), *phases))
                spec.loader.exec_module = exec_module
            return spec
    sys.meta_path.insert(0, Finder())
"""
# Both ends of a sitecustomize of ours: it is taken out of every path, and the one that it hides is run.
ENTER = """\
def _leave_the_paths():
    import os, sys
    here = os.path.dirname(__file__)
    sys.path[:] = [one for one in sys.path if one != here]
    sys.path_importer_cache.pop(here, None)
    left = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one != here]
    if left:
        os.environ["PYTHONPATH"] = os.pathsep.join(left)
    else:
        os.environ.pop("PYTHONPATH", None)

def _run_hidden():
    import _frozen_importlib, _frozen_importlib_external, sys  # importlib.util would load contextlib, too
    spec = _frozen_importlib_external.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        raise ImportError("there is no other", name="sitecustomize")  # site passes over it, and ours is gone
    module = _frozen_importlib.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)
"""
_BEGIN = """\
def _begin():
    import os
    _leave_the_paths()
    stacks, watched = os.environ.pop("DSLAUNCH_STACKS", ""), os.environ.pop("DSLAUNCH_WATCHED", "")
    if stacks:
        _register_stacks(stacks)
    if watched:
        _watch_milestones(watched)
    _run_hidden()
_begin()
"""


def hook_text(*, has_milestones: bool) -> str:
    """Return the code that Python runs first in each worker, where each line takes time to compile."""
    return STACKS + (MILESTONES if has_milestones else "") + ENTER + _BEGIN


def install_hook(folder: str, text: str) -> None:
    """Write the code that Python runs first into this new folder."""
    os.mkdir(folder, 0o700)
    with open(os.path.join(folder, "sitecustomize.py"), "w", encoding="ascii") as file:
        file.write(text)


def add_hook(env: dict[bytes, bytes], *, folder: str) -> None:
    """Have a program that is started with `env` run the hook; `ask_for` gives it its tasks."""
    before = env.get(b"PYTHONPATH", b"")
    env[b"PYTHONPATH"] = os.fsencode(folder) + (b":" + before if before else b"")


def ask_for(env: dict[bytes, bytes], *, stacks_file: str | None = None, watched: str | None = None) -> None:
    """Have the worker write its stacks to the file when asked, and tell of the calls that are watched."""
    if stacks_file is not None:
        env[STACKS_VARIABLE] = b"%d:%s" % (SIGNAL, os.fsencode(stacks_file))
    if watched:
        env[MILESTONES_VARIABLE] = watched.encode()
