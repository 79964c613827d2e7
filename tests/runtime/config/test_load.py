"""A ds_config in; a Config, a warning or a message out."""

from __future__ import annotations

import json
import logging
import math
from typing import Any

import pydantic
import pytest
from torch.optim.lr_scheduler import StepLR

from dslaunch.runtime.config import Config, load_config
from dslaunch.runtime.config.config import Origin
from dslaunch.runtime.config.optimizer import AdamParams, MuonParams, TorchOptimizerParams, optimizer_names
from dslaunch.runtime.config.scheduler import OneCycleParams, TorchSchedulerParams, WarmupParams
from dslaunch.runtime.config.torch_scheduler import torch_scheduler_names, torch_scheduler_params
from dslaunch.runtime.errors import ConfigError


def load(**values: Any) -> Config:
    return load_config({"train_batch_size": 8, **values}, world_size=2)


def message_of(values: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(values, world_size=2)
    return str(caught.value)


def test_a_batch_size_is_all_that_must_be_given() -> None:
    config = load()
    assert config == Config(
        origin=Origin(name="ds_config", given={}),
        world_size=2,
        train_batch_size=8,
        train_micro_batch_size_per_gpu=4,
        gradient_accumulation_steps=1,
    )
    assert config.micro_batch_size == 4
    assert config.gradient_clipping == 0.0
    assert config.steps_per_print is None
    assert config.wall_clock_breakdown is False
    assert config.dump_state is False
    assert config.dataloader_drop_last is False
    assert config.optimizer is None
    assert config.scheduler is None
    assert config.bf16.enabled is False
    assert config.zero.stage == 0
    assert config.zero.reduce_bucket_numel == 500_000_000


ADAM = {"lr": 2e-5, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1}


@pytest.mark.parametrize(
    ("given", "attribute", "expected"),
    [
        ({"gradient_clipping": 1}, "gradient_clipping", 1.0),
        ({"gradient_clipping": None}, "gradient_clipping", 0.0),
        ({"steps_per_print": 10}, "steps_per_print", 10),
        ({"steps_per_print": 0}, "steps_per_print", None),
        ({"steps_per_print": float("inf")}, "steps_per_print", None),
        ({"wall_clock_breakdown": True}, "wall_clock_breakdown", True),
        ({"dataloader_drop_last": True}, "dataloader_drop_last", True),
        ({"bf16": {"enabled": True}}, "bf16.enabled", True),
        ({"bfloat16": {"enabled": True}}, "bf16.enabled", True),
        ({"bf16": {}}, "bf16.enabled", False),
        ({"bf16": None}, "bf16.enabled", False),
        ({"zero_optimization": {"stage": 1}}, "zero.stage", 1),
        ({"zero_optimization": True}, "zero.stage", 1),
        ({"zero_optimization": False}, "zero.stage", 0),
        ({"zero_optimization": {"reduce_bucket_size": 2e8}}, "zero.reduce_bucket_numel", 200_000_000),
        ({"optimizer": {"type": "AdamW"}}, "optimizer.params", AdamParams()),
        ({"optimizer": {"type": "adam", "params": ADAM}}, "optimizer.type", "Adam"),
        ({"optimizer": {"type": "ADAMW", "params": ADAM}}, "optimizer.params",
         AdamParams(lr=2e-5, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1, adam_w_mode=True)),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, "optimizer.params",
         AdamParams(adam_w_mode=False)),
        ({"optimizer": {"type": "AdamW", "params": {"bias_correction": True, "amsgrad": False}}},
         "optimizer.params", AdamParams()),
        ({"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": True}}},
         "optimizer.params", TorchOptimizerParams(lr=0.1, momentum=0.9, nesterov=True)),  # type: ignore[call-arg]
        ({"optimizer": {"type": "lion", "params": {"betas": [0.9, 0.98]}}}, "optimizer.type", "Lion"),
        ({"optimizer": {"type": "nadam", "params": {"momentum_decay": 0.1}}}, "optimizer.type", "NAdam"),
        ({"optimizer": {"type": "MUON", "params": {"adam_lr": 1e-3, "momentum": 0.9}}}, "optimizer.params",
         MuonParams(adam_lr=1e-3, momentum=0.9)),
        ({"optimizer": None}, "optimizer", None),
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler.params", WarmupParams()),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": [1, 2], "warmup_type": "LINEAR"}}},
         "scheduler.params", WarmupParams(warmup_max_lr=(1.0, 2.0), warmup_type="linear")),
        ({"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0, "cycle_max_lr": 1}}},
         "scheduler.params", OneCycleParams(cycle_min_lr=0.0, cycle_max_lr=1.0)),
        ({"scheduler": {"type": "CosineAnnealingLR", "params": {"T_max": 9}}}, "scheduler.params",
         TorchSchedulerParams.model_validate({"T_max": 9})),
        ({"fp16": {"enabled": False, "loss_scale": 0, "min_loss_scale": 0.0}}, "bf16.enabled", False),
        ({"zero_optimization": {"offload_optimizer": {"device": "none", "pin_memory": True}}}, "zero.stage",
         0),
        ({"zero_optimization": {"cpu_offload": False, "offload_param": None}}, "zero.stage", 0),
        ({"zero_optimization": {"cpu_offload": True}}, "zero.offload_optimizer.device", "cpu"),
        ({"zero_optimization": {"cpu_offload_param": True}}, "zero.offload_param.device", "cpu"),
        ({"optimizer": {"type": "Adam", "params": {"torch_adam": True}}}, "optimizer.params.weight_decay",
         0.01),
        ({"optimizer": {"type": "Adam", "params": {"torch_adam": True, "weight_decay": 0}}},
         "optimizer.params.weight_decay", 0.0),
        ({"optimizer": {"type": "Adam", "params": {"torch_adam": True, "adam_w_mode": False}}},
         "optimizer.params.weight_decay", 0.0),
        ({"scheduler":
              {"type": "OneCycle",
               "params": {"cycle_min_lr": [0, 1], "cycle_max_lr": 2, "cycle_min_mom": [0.1, 0.2]}}},
         "scheduler.params.cycle_min_mom", (0.1, 0.2)),
        ({"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": False}}}},
         "zero.stage", 0),
    ],
)  # fmt: skip
def test_what_is_given_arrives(
    given: dict[str, Any], attribute: str, expected: object, caplog: pytest.LogCaptureFixture
) -> None:
    value: Any = load(**given)
    for name in attribute.split("."):
        value = getattr(value, name)
    assert value == expected
    assert type(value) is type(expected)


def test_a_config_never_changes() -> None:
    config = load(optimizer={"type": "Adam"})
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        config.gradient_clipping = 1.0
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        config.zero.stage = 1


TOP = (
    "used at the top level: train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps, "
    "gradient_clipping, max_skipped_steps, steps_per_print, wall_clock_breakdown, dump_state, "
    "dataloader_drop_last, gradient_allreduce_op, managed_gradient_accumulation, "
    "optimizer, scheduler, bf16, fp16, torch_autocast, data_types, "
    "communication_data_type, zero_optimization, checkpoint, aio, activation_checkpointing, "
    "tensor_parallel, mesh, pipeline, expert_parallel, use_data_before_expert_parallelism, "
    "sequence_parallel_size, data_parallel_size, sequence, "
    "tensorboard, csv_monitor, wandb, comms_logger, flops_profiler, timers"
)
NOT_HERE = "is not available in this version"
REMOVED = "DeepSpeed 0.19.8 has removed it, too"
ADAM_TAKES = (
    "optimizer.params takes: lr, weight_decay, betas, eps, adam_w_mode, bias_correction, amsgrad, "
    "maximize, torch_adam"
)

BAD = [
    # a value that is not allowed
    ({"gradient_clipping": -1}, "gradient_clipping -1 is not a number, 0 or above"),
    ({"gradient_clipping": "1.0"}, 'gradient_clipping "1.0" is not a number, 0 or above'),
    ({"gradient_clipping": float("nan")}, "gradient_clipping NaN is not a number, 0 or above"),
    ({"gradient_clipping": 10**400},
     f"gradient_clipping 1{'0' * 79}... is not a number, 0 or above and below 2**63"),
    ({"train_batch_size": 0}, "train_batch_size 0 is not a whole number above 0"),
    ({"train_batch_size": 8.5}, "train_batch_size 8.5 is not a whole number above 0"),
    ({"train_batch_size": True}, "train_batch_size true is not a whole number above 0"),
    ({"gradient_accumulation_steps": [1]}, "gradient_accumulation_steps [1] is not a whole number above 0"),
    ({"steps_per_print": -1}, "steps_per_print -1 is not a whole number, 0 or above"),
    ({"wall_clock_breakdown": "true"}, 'wall_clock_breakdown "true" is not true or false'),
    ({"bf16": {"enabled": 1}}, "bf16.enabled 1 is not true or false"),
    ({"bf16": True}, "bf16 true is not an object: { ... }"),
    ({"zero_optimization": 1}, "zero_optimization 1 is not an object: { ... }"),
    ({"zero_optimization": {"reduce_bucket_size": 0.5}},
     "zero_optimization.reduce_bucket_size 0.5 is not a whole number, 0 or above"),
    ({"zero_optimization": {"stage": 7}},
     "zero_optimization.stage 7 is not a ZeRO stage; there are 0, 1, 2 and 3"),
    ({"zero_optimization": {"stage": "1"}},
     'zero_optimization.stage "1" is not a ZeRO stage; there are 0, 1, 2 and 3'),
    ({"zero_optimization": {"stage": True}},
     "zero_optimization.stage true is not a ZeRO stage; there are 0, 1, 2 and 3"),
    ({"zero_optimization": {"overlap_comm": 1}}, "zero_optimization.overlap_comm 1 is not true or false"),
    ({"fp16": {"enabled": True, "initial_scale_power": 2000}},
     "fp16.initial_scale_power 2000 is not a whole number from 0 to 127"),
    ({"fp16": {"enabled": False, "loss_scale": "big"}},
     'fp16.loss_scale "big" is not a number from 0 to 2 ** 127'),
    ({"checkpoint": {"tag_validation": "loud"}},
     'checkpoint.tag_validation "loud" is not "Ignore", "Warn" or "Fail"'),
    # optimizer
    ({"optimizer": "Adam"}, 'optimizer "Adam" is not an object: { ... }'),
    ({"optimizer": {"params": {"lr": 1}}}, "optimizer.type is missing"),
    ({"optimizer": {"type": 3}}, "optimizer.type 3 is not a text"),
    ({"optimizer": {"type": "Addam"}},
     ('optimizer.type "Addam" is not a known optimizer; did you mean "Adam"? known: '
      f'{", ".join(optimizer_names())}')),
    ({"optimizer": {"type": "onebitadam"}},
     ('optimizer.type "onebitadam" compresses gradients to one bit, which is not available in this '
      'version; take Adam or Lamb, with ZeRO')),
    ({"optimizer": {"type": "MuSGD"}},
     'optimizer.type "MuSGD" is of the package mup: make it there and pass it to initialize(optimizer=...)'),
    ({"optimizer": {"type": "LBFGS"}},
     ('optimizer.type "LBFGS" runs forward and backward itself, which engine.step() has no '
      'place for; take another')),
    ({"optimizer": {"type": "Lamb", "params": {"max_coef": 0.3}}},
     "optimizer.params.max_coef is not a known key; did you mean max_coeff or min_coeff?"),
    ({"optimizer": {"type": "Adagrad", "params": {"lr": float("inf")}}},
     "optimizer.params.lr Infinity is not what a JSON file can hold"),
    ({"optimizer": {"type": "AdamW", "params": {"lr": "2e-5"}}},
     'optimizer.params.lr "2e-5" is not a number, 0 or above'),
    ({"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 1]}}},
     "optimizer.params.betas [0.9, 1] is not a list of two numbers from 0 to below 1"),
    ({"optimizer": {"type": "AdamW", "params": {"momentum": 0.9}}},
     f"optimizer.params.momentum is not a known key; {ADAM_TAKES}"),
    ({"optimizer": {"type": "AdamW", "params": {"adam_w_mode": False}}},
     ('optimizer.params.adam_w_mode false contradicts optimizer.type "AdamW"; write the type "Adam" for '
      'weight decay in the gradient')),
    ({"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1.0}}},
     f"optimizer.params.max_grad_norm 1.0 {NOT_HERE}; write it as gradient_clipping at the top level"),
    ({"optimizer": {"type": "SGD", "params": {"max_grad_norm": 0}}},
     f"optimizer.params.max_grad_norm 0 {NOT_HERE}; write it as gradient_clipping at the top level"),
    ({"optimizer": {"type": "Adam", "params": {"bias_correction": False, "amsgrad": True}}},
     ("optimizer.params.amsgrad true and bias_correction false do not go together: torch's Adam, which "
      "has the first, always corrects; leave one out")),
    # scheduler
    ({"scheduler": {"type": "WarmupLr"}},
     'scheduler.type "WarmupLr" is not a known scheduler; did you mean "WarmupLR"? known: SCHEDULERS'),
    ({"scheduler": {"type": "LambdaLR"}},
     ('scheduler.type "LambdaLR" needs a function, which no config can hold; pass '
      'lr_scheduler to initialize()')),
    ({"scheduler": {"type": "WarmupDecayLR", "params": {}}}, "scheduler.params.total_num_steps is missing"),
    ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}},
     "scheduler.params.warmup_num_steps 0 is not a whole number above 0"),
    ({"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cosine"}}},
     'scheduler.params.warmup_type "cosine" is not "log" or "linear"'),
    ({"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": []}}},
     ("scheduler.params.warmup_max_lr [] is not a number, 0 or above, or a list with one for "
      "each parameter group")),
    ({"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 10}}},
     "scheduler.params.warmup_steps is not a known key; did you mean warmup_num_steps or warmup_type?"),
    ({"scheduler": {"type": "StepLR", "params": {"gama": 0.1}}},
     ("scheduler.params.gama is not a known key; did you mean gamma?\n"
      "ds_config: scheduler.params.step_size is missing")),
    ({"scheduler": {"type": "StepLR", "params": {"step_size": 1, "gamma": math.inf}}},
     "scheduler.params.gamma Infinity is not what a JSON file can hold"),
    # refused by name
    ({"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}},
     (f"fp16.fp16_master_weights_and_grads true {NOT_HERE}; false is; masters are always float32; "
      "offload_optimizer or a higher stage makes room")),
    ({"fp16": {"enabled": True}, "bf16": {"enabled": True}},
     "fp16.enabled true contradicts bf16.enabled true; keep bf16"),
    ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}},
     ('zero_optimization.offload_optimizer.device "nvme" needs '
      'zero_optimization.offload_optimizer.nvme_path, a folder on a local disk')),
    ({"zero_optimization":
          {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/x", "ratio": 0.5}}},
     'zero_optimization.offload_optimizer.ratio 0.5 is for device "cpu"; leave it out, or write 1'),
    ({"aio": {"block_size": 100000}}, "aio.block_size 100000 is not a power of two from 4096 to 1073741824"),
    ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
     ('zero_optimization.offload_param.device "nvme" needs zero_optimization.offload_param.nvme_path, a '
      'folder on a local disk')),
    ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2, "offload_param": {"device": "cpu"}}},
     ("zero_optimization.offload_param and zero_optimization.zero_hpz_partition_size do not "
      "go together; keep one")),
    ({"zero_optimization": {"stage": 2, "offload_optimizer": {"super_offload": True}}},
     ('zero_optimization.offload_optimizer.super_offload true is for device "cpu", not "none"; write that '
      'device, or leave the key out')),
    ({"zero_optimization":
          {"stage": 2,
           "offload_optimizer": {"device": "nvme", "nvme_path": "/x", "delayed_update": {"enabled": True}}}},
     ('zero_optimization.offload_optimizer.delayed_update.enabled true is for device "cpu", not "nvme"; '
      'write that device, or leave the key out')),
    ({"zero_optimization":
          {"stage": 2,
           "offload_optimizer": {"device": "cpu", "ratio": 0.5, "delayed_update": {"enabled": True}}}},
     ("zero_optimization.offload_optimizer.ratio 0.5 would delay a part of the step only; write 1, or "
      "leave delayed_update out")),
    ({"zero_optimization":
          {"stage": 2,
           "offload_optimizer":
               {"device": "cpu", "super_offload": True, "delayed_update": {"enabled": True}}}},
     ("zero_optimization.offload_optimizer.super_offload true and delayed_update.enabled true are two "
      "times for the same step; keep super_offload for the numbers of a run without either, "
      "delayed_update for the shortest step")),
    ({"zero_optimization":
          {"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": True},
           "offload_param": {"device": "nvme", "nvme_path": "/x"}}},
     ('zero_optimization.offload_param.device "nvme" and '
      'zero_optimization.offload_optimizer.super_offload do not go together: what the step writes would '
      'have to be read from the disk first; keep one')),
    ({"zero_optimization":
          {"stage": 2,
           "offload_optimizer": {"device": "cpu", "delayed_update": {"enabled": True, "warmup_steps": -1}}}},
     "zero_optimization.offload_optimizer.delayed_update.warmup_steps -1 is not a whole number, 0 or above"),
    ({"zero_optimization": {"offload_optimizer": {"device": "gpu"}}},
     'zero_optimization.offload_optimizer.device "gpu" is not "none", "cpu" or "nvme"'),
    ({"zero_optimization": {"cpu_offload": True, "offload_optimizer": {}}},
     ("zero_optimization.cpu_offload true is the old name of offload_optimizer, which is given too; "
      "keep offload_optimizer")),
    ({"zero_optimization": {"cpu_offload": 1}}, "zero_optimization.cpu_offload 1 is not true or false"),
    ({"zero_optimization": {"zero_hpz_partition_size": 2.5}},
     "zero_optimization.zero_hpz_partition_size 2.5 is not a number of ranks, 1 or above; -1 or 0: off"),
    ({"zero_optimization": {"zero_hpz_partition_size": 8, "mics_shard_size": 4}},
     "zero_optimization.mics_shard_size 4 and zero_hpz_partition_size 8 are two ways to share; keep one"),
    ({"sparse_gradients": True}, f"sparse_gradients true {NOT_HERE}; false is; {REMOVED}: leave it out"),
    ({"communication_data_type": "fp8"},
     'communication_data_type "fp8" is not "fp32", "fp16", "bf16", "float32", "float16" or "bfloat16"'),
    ({"amp": {"enabled": True, "opt_level": "O1"}},
     (f'amp.enabled true {NOT_HERE}; false is; {REMOVED}: use "torch_autocast": '
      f'{{"enabled": true}}, or "bf16"')),
    ({"torch_autocast": {"enabled": True, "dtype": "fp32"}},
     ('torch_autocast.dtype "fp32" is not "bfloat16", "bf16", "torch.bfloat16", "float16", "fp16", '
      '"half" or "torch.float16"')),
    ({"torch_autocast": {"enabled": True}, "bf16": {"enabled": True}},
     ("torch_autocast.enabled true contradicts bf16.enabled true: one keeps float32 parameters, the other "
      "makes 16-bit ones; keep one of them")),
    ({"torch_autocast": {"enabled": True}, "fp16": {"enabled": True}},
     ("torch_autocast.enabled true contradicts fp16.enabled true: one keeps float32 parameters, the other "
      "makes 16-bit ones; keep one of them")),
    ({"comet": {"enabled": True}},
     f"comet.enabled true {NOT_HERE}; false is; use tensorboard, csv_monitor or wandb"),
    (
        {"comms_logger": {"enabled": True, "prof_ops": ["all_reduce", "all_reduse"]}},
        'comms_logger.prof_ops ["all_reduce", "all_reduse"] is not a list of all_reduce, all_gather, '
        'reduce_scatter, all_to_all, broadcast, gather',
    ),
    ({"flops_profiler": {"profile_step": 1.5}},
     "flops_profiler.profile_step 1.5 is not a whole number"),
    ({"flops_profiler": {"output_file": 7}}, "flops_profiler.output_file 7 is not a text"),
    ({"csv_monitor": {"job_name": 7}}, "csv_monitor.job_name 7 is not a text"),
    ({"timers": {"throughput": {"enabled": 1}}}, "timers.throughput.enabled 1 is not true or false"),
    ({"compression_training": {"a": [{"enabled": True}]}},
     (f'compression_training {{"a": [{{"enabled": true}}]}} {NOT_HERE}; nothing enabled in it is; '
      f'{REMOVED}: leave it out')),
    ({"elasticity": {"enabled": True}},
     f"elasticity.enabled true {NOT_HERE}; false is; {REMOVED}: give the batch sizes themselves"),
    ({"zero_optimization": {"zeropp_loco_param": {"err_beta": 0.8}}},
     f'zero_optimization.zeropp_loco_param {{"err_beta": 0.8}} {NOT_HERE}; {{}} is; {REMOVED}: leave it out'),
    ({"gradient_allreduce_op": "max"},
     'gradient_allreduce_op "max" is not "mean" or "sum"'),
    ({"data_types": {"param_dtype": "bf16"}},
     ('data_types.param_dtype "bf16" contradicts bf16.enabled and fp16.enabled, by which parameters are '
      'fp32; write "fp32", or leave it out')),
    # keys that are not known
    ({"train_batch_sise": 8}, "train_batch_sise is not a known key; did you mean train_batch_size?"),
    ({"Gradient_Clipping": 1}, "Gradient_Clipping is not a known key; did you mean gradient_clipping?"),
    ({"max_grad_norm": 1},
     "max_grad_norm is not a known key; did you mean gradient_clipping at the top level?"),
    ({"_comment": "hi"}, "_comment is not a known key; a comment starts with // and is no key"),
    ({"stage": 1}, "stage is not a known key; it is known as zero_optimization.stage"),
    ({"xyz": None}, f"xyz is not a known key; {TOP}"),
    ({"xyz": None, "zyx": 1}, f"xyz is not a known key; {TOP}\nds_config: zyx is not a known key"),
    ({"": 1}, f" is not a known key; {TOP}"),
    ({"a\nb": 1}, f'"a\\nb" is not a known key; {TOP}'),
    ({"bf16.enabled": True}, "bf16.enabled is not a known key; write it as the key enabled inside bf16"),
    ({"bf16": {"loss_scale": 0}},
     "bf16.loss_scale is not a known key; it is known as fp16.loss_scale or amp.loss_scale"),
    ({"zero_optimization": {"stge": 1}}, "zero_optimization.stge is not a known key; did you mean stage?"),
    ({"zero_optimization": {"offload_optimizer": {"devise": "none"}}},
     "zero_optimization.offload_optimizer.devise is not a known key; did you mean device?"),
    ({"optimizer": {"type": "Adam", "params": {}, "scheduler": {"type": "WarmupLR"}}},
     "optimizer.scheduler is not a known key; it is known as scheduler"),
    ({"bfloat16": {}, "bf16": {"enabled": True}},
        "bfloat16 is another name of bf16, which is given too; keep bf16"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "line"), BAD, ids=[line.split(" is ")[0][:60] for _, line in BAD])
def test_what_is_wrong_is_named_with_what_is_allowed(given: dict[str, Any], line: str) -> None:
    known = (
        "WarmupLR",
        "WarmupDecayLR",
        "WarmupCosineLR",
        "OneCycle",
        "LRRangeTest",
        *torch_scheduler_names(),
    )
    line = line.replace("SCHEDULERS", ", ".join(known))  # these two depend on the version of torch
    line = line.replace("STEP_LR", ", ".join(torch_scheduler_params(StepLR)))
    assert message_of({"train_batch_size": 8, **given}) == f"ds_config: {line}"


def test_all_that_is_wrong_is_reported_at_once_one_line_each() -> None:
    given = {
        "train_batch_size": 30,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": -1,
        "optimizer": {"type": "AdamW", "params": {"lr": -1, "eps": "small"}},
        "scheduler": {"type": "WarmupDecayLR"},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}},
        "tyop": 1,
    }
    assert message_of(given).replace(TOP, "TOP").splitlines() == [
        "ds_config: tyop is not a known key; TOP",
        "ds_config: optimizer.params.lr -1 is not a number, 0 or above",
        'ds_config: optimizer.params.eps "small" is not a number, 0 or above',
        "ds_config: scheduler.params.total_num_steps is missing",
        'ds_config: zero_optimization.offload_param.device "nvme" needs '
        "zero_optimization.offload_param.nvme_path, a folder on a local disk",
        (
            "ds_config: train_batch_size 30 is not a multiple of train_micro_batch_size_per_gpu 4 * "
            "world_size 2 = 8; 24 and 32 are"
        ),
        "ds_config: gradient_clipping -1 is not a number, 0 or above",
    ]


def test_every_auto_that_is_left_is_listed_in_one_line() -> None:
    given = {
        "train_batch_size": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"loss_scale": "auto"},
        "zero_optimization": {"stage": 1, "reduce_bucket_size": "auto", "overlap_comm": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, "auto"]}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}},
        "pipeline": {"stages": "auto"},
    }
    assert message_of(given) == (
        'ds_config: "auto" is left in train_batch_size, bf16.enabled, fp16.loss_scale, '
        "zero_optimization.reduce_bucket_size, zero_optimization.overlap_comm, optimizer.params.lr, "
        "optimizer.params.betas[1], scheduler.params.total_num_steps, pipeline.stages; "
        "write values: only a trainer can fill it in"
    )
    assert message_of(
        {"train_batch_size": 8, "optimizer": "auto", "scheduler": {"type": "auto", "params": {}}}
    ) == (
        'ds_config: "auto" is left in optimizer, scheduler.type; write values: only a trainer can fill it in'
    )
    assert message_of({"train_batch_size": 8, "bf16": {"on": "auto"}}).splitlines() == [
        'ds_config: "auto" is left in bf16.on; write values: only a trainer can fill it in',
        "ds_config: bf16.on is not a known key; bf16 takes: enabled, check_grad_overflow",
    ]


def test_what_needs_nothing_is_named_in_one_line_and_what_is_not_done_in_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="dslaunch")
    load(
        bfloat16={"enabled": True},
        zero_optimization={
            "stage": 1,
            "overlap_comm": False,
            "allgather_bucket_size": 5e8,
            "reduce_bucket_size": 5e8,
        },
        optimizer={"type": "Adam", "params": {"foreach": True}},
        prescale_gradients=False,
        memory_breakdown=True,
        aio={"single_submit": False},
    )
    assert caplog.record_tuples == [
        (
            "dslaunch",
            logging.INFO,
            "ds_config: accepted, without effect here: zero_optimization.overlap_comm, "
            "zero_optimization.allgather_bucket_size, optimizer.params.foreach, aio.single_submit; "
            "old spelling: bfloat16 (now bf16)",
        ),
        (
            "dslaunch",
            logging.WARNING,
            "ds_config: accepted, but not done here: memory_breakdown",
        ),
    ]


def test_what_is_off_or_used_is_not_mentioned(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="dslaunch")
    load(
        zero_optimization={"stage": 1, "reduce_bucket_size": 1e6, "offload_optimizer": {"device": "none"}},
        fp16={"enabled": False, "loss_scale": 0, "initial_scale_power": 16},
        tensorboard={"enabled": False, "output_path": "logs"},
        memory_breakdown=False,
        bf16={"enabled": True, "check_grad_overflow": True},
    )
    assert caplog.records == []


def lenient(**values: Any) -> Config:
    return load_config({"train_batch_size": 8, **values}, world_size=2, is_lenient=True)


def test_a_lenient_reader_names_in_one_warning_what_it_leaves_out(caplog: pytest.LogCaptureFixture) -> None:
    given: dict[str, Any] = {
        "zero_optimization.reduce_bucket_size": 589824.5,
        "my\nown": {"enabled": True},
        "": 0,
        "gradient_clipping": "auto",
        "steps_per_print": 5,
        "memory_breakdown": True,
        "bf16": {"enabled": True, "loss_scale": 0},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto", "sub_groups": 1},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": [0.9, "auto"], "eps": 1e-6, "own": 3},
        },
        "scheduler": "auto",
        "pipeline": {"stages": "auto"},
    }
    config = lenient(**given)
    assert caplog.messages == [
        "ds_config: accepted, but not done here: memory_breakdown; not known, ignored: "
        'zero_optimization.reduce_bucket_size, "my\\nown", "", bf16.loss_scale, '
        'zero_optimization.sub_groups, optimizer.params.own; "auto", counts as left out: '
        "gradient_clipping, zero_optimization.reduce_bucket_size, optimizer.params.lr, "
        "optimizer.params.betas[1], scheduler, pipeline.stages"
    ]
    assert config == load(
        gradient_clipping=1.0,
        steps_per_print=5,
        bf16={"enabled": True},
        zero_optimization={"stage": 2},
        optimizer={"type": "AdamW", "params": {"eps": 1e-6}},
    )


@pytest.mark.parametrize("said", ["true", "True", "on", "1", 1])
def test_a_lenient_reader_takes_values_in_quotes_by_the_kind_of_their_key(
    said: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="dslaunch")
    zero = {
        "stage": "3",
        "cpu_offload": said,
        "reduce_bucket_size": "5000",
        "offload_param": {"device": "cpu", "pin_memory": "f"},
    }
    config = lenient(bfloat16={"enabled": said}, zero_optimization=zero, csv_monitor={"job_name": "1"})
    plain = {"stage": 3, "cpu_offload": True, "reduce_bucket_size": 5000}
    plain["offload_param"] = {"device": "cpu", "pin_memory": False}
    assert config == lenient(bf16={"enabled": True}, zero_optimization=plain, csv_monitor={"job_name": "1"})
    assert f"bfloat16.enabled {json.dumps(said)} (now true)" in caplog.messages[0]


def test_a_lenient_reader_takes_what_is_given_under_an_old_name_too(caplog: pytest.LogCaptureFixture) -> None:
    """Hugging Face's Trainer puts bf16 beside a bfloat16 of the file; DeepSpeed's reader goes by bf16."""
    config = lenient(bfloat16={"enabled": False}, bf16={"enabled": True})
    assert config.bf16.enabled
    assert caplog.messages == [
        "ds_config: accepted, but not done here: bfloat16 (now bf16, which is given too and counts)"
    ]
    same = {"enabled": True}
    assert load_config({"train_batch_size": 8, "bfloat16": same, "bf16": same}, world_size=2).bf16.enabled


def test_a_lenient_reader_warns_of_what_deepspeed_leaves_aside(caplog: pytest.LogCaptureFixture) -> None:
    params = {"total_num_steps": 9, "warmup_type": "cosine"}
    given = {
        "train_batch_size": 8,
        "optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1.0}},
        "scheduler": {"type": "WarmupCosineLR", "params": params},
    }
    config = load_config(given, world_size=2, is_lenient=True, has_optimizer=True)
    assert caplog.messages == [
        "ds_config: accepted, but not done here: optimizer.params.max_grad_norm; not known, ignored: "
        'scheduler.params.warmup_type "cosine"'
    ]
    assert config.scheduler is not None
    assert config.scheduler.params.warmup_type == "log"  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="max_grad_norm"):  # it would go to the optimizer of this section
        load_config(given, world_size=2, is_lenient=True)


def test_a_lenient_reader_counts_samples_of_ranks_that_compute_together_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """DeepSpeed's train_batch_size counts them for each rank, and Trainer fills it in so."""
    given = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2}
    divided = {**given, "tensor_parallel": {"autotp_size": 2}}
    with caplog.at_level("INFO", logger="dslaunch"):
        config = load_config(divided, world_size=4, is_lenient=True)
    assert (config.world_size, config.train_batch_size, config.micro_batch_size) == (2, 32, 8)
    assert config.gradient_accumulation_steps == 2
    assert any("a step has 32" in text for text in caplog.messages)
    with pytest.raises(ConfigError, match="train_batch_size 64 is not train_micro_batch_size_per_gpu 8"):
        load_config(divided, world_size=4)


def with_mesh(given: dict[str, Any], launched: dict[str, Any], *, tp_size: int = 1) -> Config:
    """Of a job of 8 ranks."""
    values = {"train_micro_batch_size_per_gpu": 1, **given}
    return load_config(values, world_size=8, launched=launched, tp_size=tp_size)


@pytest.mark.parametrize(
    ("given", "launched", "tp_size"),
    [
        ({}, {"dp": 4, "tp": 2}, 1),
        ({"mesh": {"tp": 2}}, {}, 1),
        ({"mesh": {"tp": 2, "dp": 4}, "tensor_parallel": {"autotp_size": 2}}, {"dp": 4, "tp": 2}, 2),
    ],
)
def test_every_place_may_say_over_how_many_ranks_layers_are_divided(
    given: dict[str, Any], launched: dict[str, int], tp_size: int
) -> None:
    config = with_mesh(given, launched, tp_size=tp_size)
    assert (config.tp_size, config.world_size, config.train_batch_size) == (2, 4, 4)
    assert config.mesh is not None
    assert config.mesh.tp == 2


def test_the_stages_of_a_model_are_those_of_the_mesh() -> None:
    def load_stages(num_stages: int, **launched: int) -> Config:
        given = {"train_micro_batch_size_per_gpu": 1}
        return load_config(given, world_size=8 // num_stages, num_stages=num_stages, launched=launched)

    config = load_stages(2, pp=2, dp=2, tp=2)
    assert (config.tp_size, config.world_size, config.train_batch_size) == (2, 2, 2)
    for num_stages, launched, line in (
        (2, {"pp": 4}, "dslaunch --mesh says pp=4, and the PipelineModule says pp=2"),
        (1, {"pp": 2}, "dslaunch --mesh says pp=2, and the model, which is not in stages, says pp=1"),
        (2, {"dp": 8}, "dslaunch --mesh and the PipelineModule: dp=8, pp=2 are 16 ranks, and the job has 8"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_stages(num_stages, **launched)
        assert line in str(caught.value)


@pytest.mark.parametrize(
    ("given", "launched", "order"),
    [
        ({}, {"tp": 2, "order": ("tp", "dp")}, ("pp", "tp", "dp", "sp")),
        ({"mesh": {"order": ["tp", "dp"]}}, {"tp": 2}, ("pp", "tp", "dp", "sp")),
        ({"mesh": {"order": ["pp", "tp", "dp"]}}, {"tp": 2, "order": ("tp", "dp")}, ("pp", "tp", "dp", "sp")),
        ({"mesh": {"order": ["dp", "pp", "tp"]}}, {"tp": 2}, ("pp", "dp", "sp", "tp")),
        ({"mesh": {"tp": 2}}, {}, None),
    ],
)
def test_an_order_is_of_the_axes_with_several_ranks(
    given: dict[str, Any], launched: dict[str, Any], order: tuple[str, ...] | None
) -> None:
    config = with_mesh(given, launched)
    assert config.mesh is not None
    assert config.mesh.order == order


@pytest.mark.parametrize(
    ("given", "launched", "tp_size", "line"),
    [
        (
            {"mesh": {"order": ["tp", "dp"]}},
            {"tp": 2, "order": ("dp", "tp")},
            1,
            "ds_config: the order of axes: dslaunch --mesh says dp, tp and the ds_config's section mesh says "
            "tp, dp; say the same in both, or leave one out",
        ),
        (
            {"mesh": {"order": ["tp"]}},
            {"tp": 2},
            1,
            "ds_config: the ds_config's section mesh: the order tp leaves out dp, which has 4 ranks; name",
        ),
        (
            {"mesh": {"tp": 2, "order": ["tp", "ep"]}},
            {},
            1,
            'ds_config: mesh.order ["tp", "ep"] is not a list of some of pp, dp, sp and tp, each once, the',
        ),
        (
            {"tensor_parallel": {"autotp_size": 4}},
            {"dp": 4, "tp": 2},
            1,
            "ds_config: dslaunch --mesh says tp=2, and the ds_config's tensor_parallel.autotp_size says "
            "tp=4; say the same in both, or leave one out",
        ),
        (
            {"mesh": {"tp": 4}},
            {},
            2,
            "ds_config: the ds_config's section mesh says tp=4, and the model or tp_model_init() says tp=2; "
            "say the same in both, or leave one out",
        ),
        (
            {"mesh": {"tp": 3}},
            {},
            1,
            "ds_config: the ds_config's section mesh: tp=3 do not divide the 8 ranks",
        ),
        (
            {"tensor_parallel": {"autotp_size": 2}},
            {"dp": 8},
            1,
            "ds_config: dslaunch --mesh and the ds_config's tensor_parallel.autotp_size: dp=8, tp=2 are 16 "
            "ranks, and the job has 8; name every axis in one place",
        ),
        ({"mesh": {"tp": 0}}, {}, 1, "ds_config: mesh.tp 0 is not a whole number above 0"),
    ],
)
def test_places_that_say_different_sizes_are_both_named(
    given: dict[str, Any], launched: dict[str, Any], tp_size: int, line: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        with_mesh(given, launched, tp_size=tp_size)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, 1.0), ({"gradient_clipping": "auto"}, 1.0), ({"gradient_clipping": 0.0}, 0.0)],
)
def test_a_lenient_reader_clips_where_deepspeed_does(given: dict[str, Any], expected: float) -> None:
    assert lenient(**given).gradient_clipping == expected
    assert "gradient_clipping" not in lenient(train_batch_size=8).origin.given


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"train_batch_size": "auto"}, "train_batch_size or train_micro_batch_size_per_gpu must be given"),
        ({"optimizer": {"type": "auto", "params": {}}}, "optimizer.type is missing"),
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}},
            "scheduler.params.total_num_steps is missing",
        ),
        ({"gradient_clipping": "1", "unknown": 1}, 'gradient_clipping "1" is not a number, 0 or above'),
        ({"bf16.enabled": True, "bf16": {"enabled": 2}}, "bf16.enabled 2 is not true or false"),
        ({"sparse_gradients": True}, f"sparse_gradients true {NOT_HERE}; false is; {REMOVED}: leave it out"),
    ],
)
def test_a_lenient_reader_forgives_nothing_else(given: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        lenient(**given)
    assert str(caught.value) == f"ds_config: {line}"


def test_world_size_below_1_is_a_fault_of_the_caller() -> None:
    with pytest.raises(AssertionError, match="world_size 0 is below 1"):
        load_config({"train_batch_size": 8}, world_size=0)


WHOLE: dict[str, Any] = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "gradient_allreduce_op": "sum",
    "managed_gradient_accumulation": False,
    "steps_per_print": 10,
    "wall_clock_breakdown": True,
    "dump_state": True,
    "dataloader_drop_last": True,
    "optimizer": {
        "type": "AdamW",
        "params": {
            "lr": 1e-4,
            "betas": [0.9, 0.95],
            "eps": 1e-8,
            "weight_decay": 0.1,
            "adam_w_mode": True,
            "torch_adam": True,
            "bias_correction": True,
            "amsgrad": True,
            "maximize": True,
        },
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "total_num_steps": 100,
            "warmup_min_lr": 0.0,
            "warmup_max_lr": [1e-4, 1e-5],
            "warmup_num_steps": 10,
            "warmup_type": "linear",
            "last_batch_iteration": -1,
        },
    },
    "bf16": {"enabled": True, "check_grad_overflow": False},
    "fp16": {
        "enabled": False,
        "auto_cast": True,
        "loss_scale": 2.0,
        "initial_scale_power": 3,
        "loss_scale_window": 4,
        "hysteresis": 5,
        "consecutive_hysteresis": True,
        "min_loss_scale": 0.5,
    },
    "communication_data_type": "fp32",
    "data_types": {
        "grad_accum_dtype": "fp32",
        "buffer_dtype": "bf16",
        "param_dtype": "bf16",
        "keep_in_fp32_modules": ["bias"],
    },
    "torch_autocast": {"enabled": False, "dtype": "float16"},
    "zero_optimization": {
        "stage": 1,
        "reduce_bucket_size": 1_000_000,
        "stage3_prefetch_bucket_size": 2_000_000,
        "stage3_param_persistence_threshold": 7_000,
        "stage3_model_persistence_threshold": 8_000_000,
        "mics_shard_size": 2,
        "sub_group_size": 3_000_000,
        "enable_sanity_checks": True,
        "ignore_unused_parameters": True,
        "offload_optimizer": {
            "device": "cpu",
            "pin_memory": True,
            "ratio": 0.5,
            "super_offload": True,
            "delayed_update": {"enabled": False, "warmup_steps": 7},
        },
        "offload_param": {"device": "none", "pin_memory": False},
        "leaf_module": {"classes": ["MoE"], "names": [], "name_suffixes": [".mlp"]},
    },
    "aio": {"block_size": 65536, "queue_depth": 4, "thread_count": 2},
    "checkpoint": {
        "tag_validation": "Fail",
        "async_save": True,
        "keep_last": 3,
        "use_node_local_storage": True,
        "preemption_save_dir": "/last",
    },
    "tensorboard": {"enabled": True, "output_path": "logs", "job_name": "first"},
    "csv_monitor": {"enabled": True, "output_path": "tables", "job_name": "second"},
    "wandb": {"enabled": True, "group": "us", "team": "them", "project": "all"},
    "comms_logger": {
        "enabled": True,
        "verbose": True,
        "prof_all": False,
        "prof_ops": ["all_gather", "all_to_all"],
        "debug": True,
    },
    "flops_profiler": {
        "enabled": True,
        "recompute_fwd_factor": 1.0,
        "profile_step": 3,
        "module_depth": 2,
        "top_modules": 4,
        "detailed": False,
        "output_file": "profile.txt",
    },
    "timers": {"throughput": {"enabled": True, "synchronized": False}},
}


def test_describe_gives_the_whole_configuration_in_the_spellings_of_the_file() -> None:
    assert load_config(WHOLE, world_size=2).describe() == WHOLE


@pytest.mark.parametrize(
    "given",
    [
        {},
        WHOLE,
        {"optimizer": {"type": "SGD", "params": {"momentum": 0.9}}},
        {"scheduler": {"type": "StepLR", "params": {"step_size": 5}}},
        {"scheduler": {"type": "WarmupLR"}},
        {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 1}}},
    ],
)
def test_what_describe_gives_loads_as_the_same_config(given: dict[str, Any]) -> None:
    config = load_config({"train_batch_size": 32, **given}, world_size=2)
    assert load_config(config.describe(), world_size=2) == config
