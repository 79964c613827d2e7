"""Models in stages."""

from __future__ import annotations

from .table import Module, inside, mapped, works

_LAYERS = works("dslaunch.runtime.pipeline.layers", "LayerSpec TiedLayerSpec")
_MODULE = works("dslaunch.runtime.compat.pipeline.module", "PipelineModule")
_V_MODULE = works("dslaunch.runtime.compat.pipeline.module", "DualPipeVModule")
_ENGINE_NOTE = "one engine for every schedule"

PIPELINE: tuple[Module, ...] = (
    Module("deepspeed.pipe", (_MODULE, _LAYERS, _V_MODULE)),
    Module(
        "deepspeed.runtime.pipe",
        (_MODULE, _LAYERS, works("dslaunch.runtime.compat.pipeline.topology", "ProcessTopology")),
    ),
    Module(
        "deepspeed.runtime.pipe.module",
        (_MODULE, _LAYERS, works("dslaunch.runtime.errors", "PipelineError")),
    ),
    Module(
        "deepspeed.runtime.pipe.topology",
        (
            works(
                "dslaunch.runtime.compat.pipeline.topology",
                "ProcessTopology PipeDataParallelTopology PipeModelDataParallelTopology PipelineParallelGrid",
            ),
        ),
    ),
    Module(
        "deepspeed.runtime.pipe.engine",
        (
            mapped("dslaunch.runtime.compat.engine.engines", "PipelineEngine", _ENGINE_NOTE),
            inside(
                "TARGET_ID LOG_STAGE DATA_PARALLEL_ID BATCH_INPUT_TIMER TRAIN_BATCH_TIMER "
                "PIPE_SEND_OUTPUT_TIMER PIPE_SEND_GRAD_TIMER PIPE_RECV_INPUT_TIMER PIPE_RECV_GRAD_TIMER "
                "TENSOR_META_SIZE is_even mem_alloced mem_cached"
            ),
        ),
    ),
    Module(
        "deepspeed.runtime.pipe.dualpipev",
        (
            _V_MODULE,
            mapped("dslaunch.runtime.compat.engine.engines", "DualPipeVEngine=PipelineEngine", _ENGINE_NOTE),
        ),
    ),
)
