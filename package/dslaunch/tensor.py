"""Module for `import dslaunch.tensor`, the same that `from dslaunch import tensor` gives."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import dslaunch

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...

else:
    sys.modules[__name__] = dslaunch.__getattr__("tensor")
