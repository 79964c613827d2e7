"""Module for `import dslaunch.profiling`, the same that `from dslaunch import profiling` gives."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import dslaunch

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...

else:
    sys.modules[__name__] = dslaunch.__getattr__("profiling")
