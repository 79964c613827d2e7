"""Experts that are on different ranks."""

from __future__ import annotations

from .key import hint, refused
from .value import ANY, POSITIVE

_SECTION = "expert_parallel"
_BY_MODEL = "the model's own forward says so"
_MODEL_KEYS = (
    "preset_model moe_layer_pattern expert_pattern router_pattern num_experts_attr top_k_attr top_k "
    "score_func score_apply route_norm routed_scaling_factor expert_w1 expert_w2 expert_w3 "
    "has_shared_experts shared_experts_pattern shared_experts_gate_pattern expert_activation "
    "num_expert_groups num_limited_groups"
)
_HOW_KEYS = (
    "use_grouped_mm disable_triton_grouped_mm async_split_plan combine_impl row_weighting_impl gate_up_impl "
    "comm_num_sm comm_qp_margin comm_max_tokens_per_rank validate_folding_routing"
)

EXPERTS = (
    *(hint(f"{_SECTION}.{name}", ANY, _BY_MODEL) for name in _MODEL_KEYS.split()),
    *(
        hint(f"{_SECTION}.{name}", ANY, "it chooses an implementation of the same numbers")
        for name in _HOW_KEYS.split()
    ),
    refused(
        f"{_SECTION}.expert_tensor_parallel_size",
        POSITIVE,
        off=(1,),
        note="an expert is on one rank as a whole; give a larger autoep_size",
    ),
    refused(f"{_SECTION}.route_scale", ANY, off=(1, 1.0), note="the model's own router has its scale"),
    refused(
        f"{_SECTION}.comm_backend",
        ANY,
        off=("comm",),
        note="tokens are sent by torch.distributed; leave it out",
    ),
    refused(
        f"{_SECTION}.load_balance_coeff",
        ANY,
        off=(None,),
        note="add the model's own loss of its router, such as output_router_logits of Hugging Face's",
    ),
)
