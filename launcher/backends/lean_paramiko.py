"""Loads paramiko without those of its imports that are not needed here: 60 ms instead of 130 ms."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

_METADATA = "importlib.metadata"


class _Metadata(ModuleType):
    """Stands in for importlib.metadata, which takes 12 ms, and gives paramiko its own version."""

    def version(self, name: str) -> str:
        """Return the version in the name of the folder that pip made beside the package, if there is one."""
        spec = find_spec(name)
        beside = Path(spec.origin).parents[1] if spec is not None and spec.origin else Path()
        found = [path.name for path in beside.glob(f"{name}-*.dist-info")]
        if len(found) == 1:
            return found[0].removeprefix(f"{name}-").removesuffix(".dist-info")
        return str(_real_metadata().version(name))

    def __getattr__(self, name: str) -> Any:
        return getattr(_real_metadata(), name)


def _real_metadata() -> Any:
    if isinstance(sys.modules.get(_METADATA), _Metadata):
        del sys.modules[_METADATA]
    return importlib.import_module(_METADATA)


@contextlib.contextmanager
def lean_paramiko() -> Iterator[None]:
    """Load paramiko quickly inside this context.

    Its own reader of configurations, which is not used here, imports the package invoke if there is one.
    Loading invoke, with asyncio, unittest.mock and YAML, takes as long as all the rest of paramiko.
    """
    if "paramiko" in sys.modules:
        yield
        return
    hides_invoke = "invoke" not in sys.modules
    if hides_invoke:
        sys.modules["invoke"] = None  # type: ignore[assignment] # means that there is none
    sys.modules.setdefault(_METADATA, _Metadata(_METADATA))
    try:
        yield
    finally:
        if hides_invoke:
            del sys.modules["invoke"]
        if isinstance(sys.modules.get(_METADATA), _Metadata):
            del sys.modules[_METADATA]
