"""dslaunch: start one training job on many machines and train it with ZeRO.

The names below are the public API. Those that need torch are loaded on first use,
so `import dslaunch` is cheap.
"""

from __future__ import annotations

__version__ = "0.1.0"

# Stands for that of `typing`, whose import takes half of the time before `dslaunch` can answer Ctrl-C.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from . import ops as ops, utils as utils
    from .runtime.activation import checkpointing as checkpointing
    from .runtime.compat import comm as comm_api
    from .runtime.compat.accelerator.current import get_accelerator as get_accelerator
    from .runtime.compat.engine.engines import Engine as Engine, PipelineEngine as PipelineEngine
    from .runtime.compat.engine.initialize import (
        add_config_arguments as add_config_arguments,
        initialize as initialize,
    )
    from .runtime.compat.inference.init_inference import init_inference as init_inference
    from .runtime.compat.init_distributed import init_distributed as init_distributed
    from .runtime.compat.on_device import OnDevice as OnDevice
    from .runtime.compat.pipeline.module import PipelineModule as PipelineModule, pipeline as pipeline
    from .runtime.data.loader import RepeatingLoader as RepeatingLoader
    from .runtime.errors import (
        CheckpointError as CheckpointError,
        ConfigError as ConfigError,
        PipelineError as PipelineError,
    )
    from .runtime.experts import api as experts_api
    from .runtime.inference.engine import InferenceEngine as InferenceEngine
    from .runtime.metrics import profiler
    from .runtime.metrics.report import report as report
    from .runtime.pipeline.layers import LayerSpec as LayerSpec, TiedLayerSpec as TiedLayerSpec
    from .runtime.plan.api import plan as plan
    from .runtime.sequence import api as sequence_api
    from .runtime.tensor import api as tensor_api
    from .runtime.tensor.model_init import tp_model_init as tp_model_init
    from .runtime.weights.digest import WeightsDigest as WeightsDigest
    from .runtime.weights.weight_source import WeightSource as WeightSource
    from .runtime.zero import api

    comm = comm_api
    moe = experts_api
    profiling = profiler
    sequence = sequence_api
    tensor = tensor_api
    zero = api

_HOME_OF = {
    "CheckpointError": ".runtime.errors",
    "ConfigError": ".runtime.errors",
    "Engine": ".runtime.compat.engine.engines",
    "InferenceEngine": ".runtime.inference.engine",
    "LayerSpec": ".runtime.pipeline.layers",
    "OnDevice": ".runtime.compat.on_device",
    "PipelineEngine": ".runtime.compat.engine.engines",
    "PipelineError": ".runtime.errors",
    "PipelineModule": ".runtime.compat.pipeline.module",
    "RepeatingLoader": ".runtime.data.loader",
    "TiedLayerSpec": ".runtime.pipeline.layers",
    "WeightSource": ".runtime.weights.weight_source",
    "WeightsDigest": ".runtime.weights.digest",
    "add_config_arguments": ".runtime.compat.engine.initialize",
    "get_accelerator": ".runtime.compat.accelerator.current",
    "init_inference": ".runtime.compat.inference.init_inference",
    "init_distributed": ".runtime.compat.init_distributed",
    "initialize": ".runtime.compat.engine.initialize",
    "pipeline": ".runtime.compat.pipeline.module",
    "plan": ".runtime.plan.api",
    "report": ".runtime.metrics.report",
    "tp_model_init": ".runtime.tensor.model_init",
}

_MODULE_OF = {
    "checkpointing": ".runtime.activation.checkpointing",
    "comm": ".runtime.compat.comm",
    "moe": ".runtime.experts.api",
    "ops": ".ops",
    "profiling": ".runtime.metrics.profiler",
    "sequence": ".runtime.sequence.api",
    "tensor": ".runtime.tensor.api",
    "utils": ".utils",
    "zero": ".runtime.zero.api",
}

# Packages of pyproject's [train].
_NEEDED = ("torch", "numpy", "pydantic", "hjson", "fsspec", "xxhash")

__all__ = sorted(["__version__", *_HOME_OF, *_MODULE_OF])


if not TYPE_CHECKING:  # a type checker would believe that there is every name

    def __getattr__(name: str) -> Any:
        from importlib import import_module  # imported at need: see above

        if name not in _HOME_OF and name not in _MODULE_OF:
            raise AttributeError(f"module 'dslaunch' has no attribute {name!r}; it has {', '.join(__all__)}")
        try:
            module = import_module(_MODULE_OF.get(name) or _HOME_OF[name], __name__)
        except ModuleNotFoundError as error:
            if error.name not in _NEEDED:
                raise
            raise ImportError(
                f"dslaunch.{name} needs the package {error.name}, which is not installed; install what "
                "training needs with: pip install '.[train]' in a clone of dslaunch"
            ) from None
        return module if name in _MODULE_OF else getattr(module, name)


def __dir__() -> list[str]:
    return __all__
