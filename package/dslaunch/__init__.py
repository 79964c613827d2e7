"""dslaunch: start one training job on many machines and train it with ZeRO.

The names below are the public API. Those that need torch are loaded on first use, so `import dslaunch` is cheap.
"""

from __future__ import annotations

__version__ = "0.0.1"

# As of `typing`, whose import takes half of the time before the command `dslaunch` can answer Ctrl-C.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from . import ops as ops, utils as utils
    from .runtime import activation
    from .runtime.accelerator.current import get_accelerator as get_accelerator
    from .runtime.comm import api as comm_api
    from .runtime.data import RepeatingLoader as RepeatingLoader
    from .runtime.engine import Engine as Engine
    from .runtime.errors import CheckpointError as CheckpointError, ConfigError as ConfigError
    from .runtime.initialize import (
        add_config_arguments as add_config_arguments,
        init_distributed as init_distributed,
        initialize as initialize,
    )
    from .runtime.on_device import OnDevice as OnDevice
    from .runtime.profiling import flops_profiler
    from .runtime.zero import api

    checkpointing = activation
    comm = comm_api
    profiling = flops_profiler
    zero = api

_HOME_OF = {
    "CheckpointError": ".runtime.errors",
    "ConfigError": ".runtime.errors",
    "Engine": ".runtime.engine",
    "OnDevice": ".runtime.on_device",
    "RepeatingLoader": ".runtime.data",
    "add_config_arguments": ".runtime.initialize",
    "get_accelerator": ".runtime.accelerator.current",
    "init_distributed": ".runtime.initialize",
    "initialize": ".runtime.initialize",
}

_MODULE_OF = {
    "checkpointing": ".runtime.activation",
    "comm": ".runtime.comm.api",
    "ops": ".ops",
    "profiling": ".runtime.profiling.flops_profiler",
    "utils": ".utils",
    "zero": ".runtime.zero.api",
}

__all__ = sorted(["__version__", *_HOME_OF, *_MODULE_OF])


def __getattr__(name: str) -> Any:
    from importlib import import_module  # here: see above

    if name in _MODULE_OF:
        return import_module(_MODULE_OF[name], __name__)
    if name not in _HOME_OF:
        raise AttributeError(f"module 'dslaunch' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOME_OF[name], __name__), name)


def __dir__() -> list[str]:
    return __all__
