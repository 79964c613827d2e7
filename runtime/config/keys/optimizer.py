"""The section `optimizer`."""

from __future__ import annotations

from ...optimizers.registry import config_types_with
from .key import hint, refused
from .value import BOOL, NUMBER, choice

_ADAM = ("Adam", "AdamW")

OPTIMIZER = (
    hint(
        "optimizer.params.ns_method",
        choice("gram", "standard"),
        "torch's Newton-Schulz iteration",
        types=("Muon",),
    ),
    refused("optimizer.params.per_head_muon", note="each matrix is taken whole", types=("Muon",)),
    refused("optimizer.params.differentiable", note="no gradient flows through a step"),
    refused(
        "optimizer.params.fp32_optimizer_states",
        off=(True,),
        note='write data_types.optimizer_state_dtype "bf16" instead',
    ),
    refused(
        "optimizer.params.max_grad_norm",
        NUMBER,
        off=(),
        note="write it as gradient_clipping at the top level",
    ),
    hint(
        "optimizer.params.set_grad_none",
        BOOL,
        "always so",
        types=(*_ADAM, *config_types_with("set_grad_none")),
    ),
    hint(
        "optimizer.params.capturable",
        BOOL,
        "no step is captured in a CUDA graph",
        quiet=(False,),
        types=_ADAM,
    ),
    hint("optimizer.params.foreach", BOOL, "one kernel updates a whole shard", types=_ADAM),
    hint("optimizer.params.fused", BOOL, "one kernel updates a whole shard", types=_ADAM),
    hint("optimizer.legacy_fusion", BOOL, "one kernel updates a whole shard", quiet=(False,)),
)
