"""The compiled module, or why there is none."""

from __future__ import annotations

try:
    from . import _C
except ImportError as error:
    raise ImportError(
        f"the compiled module dslaunch.kernels._C cannot be loaded ({error}); it comes with every installed "
        "dslaunch; in a checkout build it with `make setup`, or with "
        "`python -m pip install --no-build-isolation --editable .`"
    ) from error

__all__ = ["_C"]
