"""The sections `optimizer` and `scheduler`."""

from __future__ import annotations

from ...optimizers.registry import FROM_CONFIG, config_types_with
from .key import hint, refused, used
from .value import BOOL, NUMBER, choice

_ADAM = ("Adam", "AdamW")
_OURS = ("Adam", "AdamW", "Muon")
_WARMUP = ("WarmupLR", "WarmupDecayLR")
_ANY_WARMUP = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
_DEEPSPEED_SCHEDULERS = (*_ANY_WARMUP, "OneCycle", "LRRangeTest")

OPTIMIZER = (
    used(
        "optimizer.type",
        f"{', '.join([*_OURS, *FROM_CONFIG])}, or a class of torch.optim, in any case; Adam is AdamW unless "
        "adam_w_mode is false; Muon is for matrices, with AdamW for all else. The types below have these "
        "parameters, others their own keyword arguments",
    ),
    used(
        "optimizer.params.lr", "learning rate, 0.001 if left out (Muon: 0.02, and 0.0003 for AdamW)", *_OURS
    ),
    used("optimizer.params.weight_decay", "0 if left out", *_OURS),
    used("optimizer.params.betas", "[0.9, 0.999] if left out (Muon: [0.9, 0.95])", *_OURS),
    used("optimizer.params.eps", "1e-8 if left out (Muon: 1e-10)", *_OURS),
    used(
        "optimizer.params.adam_w_mode",
        "false: weight decay is added to the gradient (type Adam only)",
        *_ADAM,
    ),
    used("optimizer.params.muon_lr", "of the matrices, lr if left out", "Muon"),
    used("optimizer.params.adam_lr", "of all else, lr if left out", "Muon"),
    used("optimizer.params.momentum", "of the matrices, 0.95 if left out", "Muon"),
    hint(
        "optimizer.params.ns_method",
        choice("gram", "standard"),
        "torch's Newton-Schulz iteration",
        types=("Muon",),
    ),
    refused("optimizer.params.per_head_muon", note="each matrix is taken whole", types=("Muon",)),
    used(
        "optimizer.params.bias_correction",
        "true if left out; false: the moments are used as they are, from the first step on",
        *_ADAM,
    ),
    used(
        "optimizer.params.amsgrad",
        "true: torch's own Adam or AdamW, with the largest second moment so far; false if left out",
        *_ADAM,
    ),
    used(
        "optimizer.params.maximize",
        "true: torch's own Adam or AdamW, which goes up instead of down; false if left out",
        *_ADAM,
    ),
    refused("optimizer.params.differentiable", note="no gradient flows through a step"),
    refused("optimizer.params.fp32_optimizer_states", off=(True,), note="states are always float32"),
    refused(
        "optimizer.params.max_grad_norm",
        NUMBER,
        off=(),
        note="write it as gradient_clipping at the top level",
    ),
    used(
        "optimizer.params.torch_adam",
        "there is one Adam; true: weight_decay that is left out is that of torch.optim.AdamW, 0.01",
        *_ADAM,
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

SCHEDULER = (
    used("scheduler.type", f"{', '.join(_DEEPSPEED_SCHEDULERS)}, or a class of torch.optim.lr_scheduler"),
    used("scheduler.params.last_batch_iteration", "-1: from the start", *_DEEPSPEED_SCHEDULERS),
    used("scheduler.params.warmup_min_lr", "lr of the first two steps, 0 if left out", *_WARMUP),
    used("scheduler.params.warmup_max_lr", "left out: each group's own lr (WarmupDecayLR: 0.001)", *_WARMUP),
    used("scheduler.params.warmup_min_ratio", "0 if left out", "WarmupCosineLR"),
    used("scheduler.params.warmup_num_steps", "1000 if left out; above 0, and 1 counts as 2", *_ANY_WARMUP),
    used("scheduler.params.warmup_type", '"log" (if left out) or "linear"', *_ANY_WARMUP),
    used("scheduler.params.total_num_steps", "must be given", "WarmupDecayLR", "WarmupCosineLR"),
    used("scheduler.params.cos_min_ratio", "0.0001 if left out", "WarmupCosineLR"),
    used("scheduler.params.cycle_min_lr", "must be given", "OneCycle"),
    used("scheduler.params.cycle_max_lr", "must be given", "OneCycle"),
    used("scheduler.params.decay_lr_rate", "0 if left out", "OneCycle"),
    used("scheduler.params.cycle_first_step_size", "2000 if left out", "OneCycle"),
    used("scheduler.params.cycle_second_step_size", "left out: as the first; 0: none", "OneCycle"),
    used("scheduler.params.cycle_first_stair_count", "0, no stairs, if left out", "OneCycle"),
    used("scheduler.params.cycle_second_stair_count", "left out: as the first", "OneCycle"),
    used("scheduler.params.decay_step_size", "0, no decay, if left out", "OneCycle"),
    used("scheduler.params.cycle_momentum", "true if left out; needs an optimizer with betas", "OneCycle"),
    used("scheduler.params.cycle_min_mom", "0.8 if left out", "OneCycle"),
    used("scheduler.params.cycle_max_mom", "0.9 if left out", "OneCycle"),
    used("scheduler.params.decay_mom_rate", "0 if left out", "OneCycle"),
    used("scheduler.params.lr_range_test_min_lr", "0.001 if left out", "LRRangeTest"),
    used("scheduler.params.lr_range_test_step_size", "2000 if left out", "LRRangeTest"),
    used("scheduler.params.lr_range_test_step_rate", "1 if left out", "LRRangeTest"),
    used("scheduler.params.lr_range_test_staircase", "false if left out", "LRRangeTest"),
)
