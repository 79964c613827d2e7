"""Module for `import dslaunch.checkpointing`, the same that `from dslaunch import checkpointing` gives."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import dslaunch

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...

else:
    sys.modules[__name__] = dslaunch.__getattr__("checkpointing")
