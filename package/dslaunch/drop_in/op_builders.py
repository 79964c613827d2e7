"""DeepSpeed's builders of kernels, as far as programs ask them: which kernels there are.

DeepSpeed compiles a kernel when it is first used; ours are compiled with the package, and programs call them
through the optimizers. `is_compatible()` says whether the optimizer of that kernel is here.

Source: DeepSpeed 0.19.8 ops/op_builder: the names of the builders and of what they build
"""

from __future__ import annotations

from typing import ClassVar, NoReturn

from ..runtime.optimizers.registry import DEEPSPEEDS

_HERE = " ".join(
    f"{kind.removeprefix('DeepSpeed')}={module}"
    for row in DEEPSPEEDS
    for module, kind in row.deepspeed_modules.items()
)
_NOT_HERE = (
    "AsyncIO=async_io CCLComm=deepspeed_ccl_comm DeepCompile=dc EvoformerAttn=evoformer_attn "
    "FPQuantizer=fp_quantizer GDS=gds Inference=transformer_inference InferenceCore=inference_core_ops "
    "InferenceCutlass=cutlass_ops NotImplemented=deepspeed_not_implemented PinMemory=pin_memory "
    "Quantizer=quantizer RaggedOps=ragged_device_ops RaggedUtils=ragged_ops RandomLTD=random_ltd "
    "ShareMemComm=deepspeed_shm_comm SpatialInference=spatial_inference "
    "StochasticTransformer=stochastic_transformer Transformer=transformer Utils=utils"
)


class OpBuilder:
    """Builder of one kernel, or of a few that belong together."""

    NAME: ClassVar[str] = ""
    IS_HERE: ClassVar[bool] = False

    def __init__(self, name: str | None = None) -> None:
        self.name = name or self.NAME

    def absolute_name(self) -> str:
        return f"deepspeed.ops.{self.name}"

    def is_compatible(self, verbose: bool = False) -> bool:
        return self.IS_HERE

    def load(self, verbose: bool = True) -> NoReturn:
        """Errors: NotImplementedError, always: nothing is compiled on the way,
        and no compiled module is handed out.
        """
        use = (
            "its kernels are called by the optimizer of deepspeed.ops"
            if self.IS_HERE
            else "there is no such kernel here"
        )
        raise NotImplementedError(
            f'{type(self).__name__}().load() is not in dslaunch: {use}; see "Kernels" in '
            "docs/reference/compatibility.md"
        )

    builder = jit_load = load


def _builders() -> dict[str, type[OpBuilder]]:
    builders = {}
    for words, is_here in ((_HERE, True), (_NOT_HERE, False)):
        for word in words.split():
            name, _, kernel = word.partition("=")
            builders[f"{name}Builder"] = type(
                f"{name}Builder", (OpBuilder,), {"NAME": kernel, "IS_HERE": is_here}
            )
    return builders


BUILDERS = _builders()
ALL_OPS = {builder.NAME: builder() for builder in BUILDERS.values()}
compatible_ops = {name: builder.is_compatible() for name, builder in ALL_OPS.items()}
globals().update(BUILDERS)
