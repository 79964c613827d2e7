"""`deepspeed.inference`."""

from __future__ import annotations

from .table import INFERENCE, Module, inside, mapped, refused, works

ENGINE_FOR_INFERENCE = (
    mapped(
        "dslaunch.drop_in.calls",
        "init_inference",
        "the engine that exists without an optimizer; options of DeepSpeed's kernels are told in one line",
    ),
    mapped(
        "dslaunch.runtime.inference.engine",
        "InferenceEngine",
        "attributes that it does not have are the module's",
    ),
)
CONFIG_FOR_INFERENCE = works("dslaunch.runtime.compat.inference.config", "DeepSpeedInferenceConfig")
_FAST_GEN = refused(
    INFERENCE,
    "InferenceEngineV2 RaggedInferenceEngineConfig DeepSpeedTPConfig build_hf_engine "
    "build_engine_from_ds_checkpoint",
    "is FastGen, a server's engine; vLLM and SGLang serve",
)
_QUANTIZED = refused(
    INFERENCE,
    "QuantTypeEnum BaseQuantConfig WeightQuantConfig ActivationQuantConfig QKVQuantConfig QuantizationConfig",
    "quantizes weights",
)

INFERENCE_MODULES: tuple[Module, ...] = (
    Module("deepspeed.inference", (_FAST_GEN,)),
    Module(
        "deepspeed.inference.config",
        (
            CONFIG_FOR_INFERENCE,
            works(
                "dslaunch.runtime.compat.inference.config",
                "DeepSpeedTPConfig DeepSpeedMoEConfig InferenceCheckpointConfig DtypeEnum MoETypeEnum",
            ),
            _QUANTIZED,
        ),
    ),
    Module(
        "deepspeed.inference.engine",
        (ENGINE_FOR_INFERENCE[1], inside("DS_INFERENCE_ENABLED INFERENCE_MODEL_TIMER")),
    ),
)
