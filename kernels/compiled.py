"""The compiled module; where there is none, its first use says why.

A dslaunch that was installed where nothing could be compiled has a launcher that works, and this package can
be imported, too: by what looks at a checkpoint, say.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

__all__ = ["_C", "require_compiled"]


class _Missing:
    """Stands in for the module: every name in it is the error."""

    def __init__(self, why: ImportError) -> None:
        self._why = why

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):  # Python and its tools look for such names in everything
            raise AttributeError(name)
        raise ImportError(_explained(self._why), name="dslaunch.kernels._C")


def _explained(why: ImportError) -> str:
    if (why.path or "").endswith(".so"):
        return (
            f"the compiled module dslaunch.kernels._C cannot be loaded ({why}); it needs libgomp and "
            "libstdc++ (Debian: apt-get install libgomp1 libstdc++6), and a dslaunch that was built for this "
            "machine and this Python"
        )
    return (
        "this dslaunch was installed without its compiled module dslaunch.kernels._C, because it could not "
        "be built (there was no C++ compiler, or it failed), or because DSLAUNCH_LAUNCHER_ONLY was set. "
        "Optimizer steps and gradient norms in host "
        "memory and files of offload need it; the launcher does not. Install a compiler (Debian: apt-get "
        f"install g++), then: {sys.executable} -m pip install --force-reinstall --no-deps --no-cache-dir "
        "dslaunch (or the file that it came from); in a checkout: `make setup`, or "
        "`python -m pip install --no-build-isolation --editable .`"
    )


if TYPE_CHECKING:
    from . import _C
else:
    try:
        from . import _C
    except ImportError as error:
        _C = _Missing(error)


def require_compiled() -> None:
    """Errors: ImportError with what to do, if there is no compiled module"""
    _ = _C.step
