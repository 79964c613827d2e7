"""A ds_config in; a Config, a warning or a message out."""

from __future__ import annotations

import json
import logging
from typing import Any

import pydantic
import pytest

from dslaunch.runtime.config import Config, load_config
from dslaunch.runtime.config.config import ConfigOrigin
from dslaunch.runtime.config.optimizer import AdamParams, MuonParams, TorchOptimizerParams, optimizer_names
from dslaunch.runtime.config.scheduler import OneCycleParams, TorchSchedulerParams, WarmupParams
from dslaunch.runtime.config.torch_scheduler import torch_scheduler_names
from dslaunch.runtime.errors import ConfigError
from tests.mistakes import mistakes


def load(**values: Any) -> Config:
    return load_config({"train_batch_size": 8, **values}, world_size=2)


def message_of(values: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(values, world_size=2)
    return str(caught.value)


def test_a_batch_size_is_all_that_must_be_given() -> None:
    config = load()
    assert config == Config(
        origin=ConfigOrigin(name="ds_config", given={}),
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


SCHEDULERS = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest")
TOP = (
    "used at the top level: train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps, "
    "gradient_clipping, max_skipped_steps, rerun_outliers, steps_per_print, wall_clock_breakdown, "
    "dump_state, dataloader_drop_last, gradient_allreduce_op, managed_gradient_accumulation, "
    "optimizer, scheduler, bf16, fp16, torch_autocast, data_types, "
    "communication_data_type, zero_optimization, checkpoint, aio, activation_checkpointing, "
    "tensor_parallel, mesh, pipeline, expert_parallel, use_data_before_expert_parallelism, "
    "sequence_parallel_size, data_parallel_size, sequence, "
    "tensorboard, csv_monitor, wandb, comms_logger, flops_profiler, timers"
)


@pytest.mark.parametrize(
    ("given", "line"),
    mistakes(
        "ds_config",
        TOP=TOP,
        OPTIMIZERS=", ".join(optimizer_names()),
        SCHEDULERS=", ".join([*SCHEDULERS, *torch_scheduler_names()]),
    ),
)
def test_what_is_wrong_is_named_with_what_is_allowed(given: str, line: str) -> None:
    assert message_of({"train_batch_size": 8, **json.loads(given)}) == f"ds_config: {line}"


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
        "ds_config: bf16.on is not a known key; bf16 takes: enabled, check_grad_overflow, "
        "bf16_master_weights_and_grads, bf16_optimizer_states",
    ]


@pytest.mark.parametrize("is_lenient", [False, True])
def test_auto_is_a_word_of_the_list_of_buffers_that_stay_float32(
    caplog: pytest.LogCaptureFixture, is_lenient: bool
) -> None:
    config = {"train_batch_size": 8, "data_types": {"keep_in_fp32_modules": "auto"}}
    assert load_config(config, world_size=1, is_lenient=is_lenient).data_types.keep_in_fp32_modules is None
    assert caplog.messages == []


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
        (
            {"sparse_gradients": True},
            "sparse_gradients true is not available in this version; false is; DeepSpeed 0.19.8 has removed "
            "it, too: leave it out",
        ),
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
    "bf16": {
        "enabled": True,
        "check_grad_overflow": False,
        "bf16_master_weights_and_grads": True,
        "bf16_optimizer_states": True,
    },
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
        "master_dtype": "bf16",
        "optimizer_state_dtype": "bf16",
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
