"""The table of keys: what becomes of each, and that the models agree with it."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

import pytest

from dslaunch.runtime.config import (
    activation,
    checkpoint,
    config,
    experts,
    mesh,
    monitor,
    offload,
    optimizer,
    pipeline,
    precision,
    scheduler,
    sequence,
    tensor,
    zero,
)
from dslaunch.runtime.config.keys.key import Fate, Key
from dslaunch.runtime.config.keys.table import KEYS, REMOVED, keys_for
from dslaunch.runtime.config.section import Section


def aliases(model: type[Section], path: str, *, without: frozenset[str] = frozenset()) -> set[str]:
    prefix = f"{path}." if path else ""
    return {
        f"{prefix}{field.alias or name}" for name, field in model.model_fields.items() if name not in without
    }


def used(types: set[str]) -> set[str]:
    return {key.path for key in KEYS if key.fate is Fate.USED and (not key.types or types & set(key.types))}


PER_TYPE = [(kind, "optimizer", model) for kind, model in optimizer.PARAMS_OF.items()] + [
    (kind, "scheduler", model) for kind, model in scheduler.PARAMS_OF.items()
]


@pytest.mark.parametrize(("kind", "section", "model"), PER_TYPE)
def test_the_parameters_of_each_type_are_those_of_its_model(
    kind: str, section: str, model: type[Section]
) -> None:
    found = {path for path in used({kind}) if path.startswith(f"{section}.params.")}
    assert found == aliases(model, f"{section}.params")


WATCHING: dict[str, type[Section]] = {
    "tensorboard": monitor.TensorBoardConfig,
    "csv_monitor": monitor.CsvConfig,
    "wandb": monitor.WandbConfig,
    "comms_logger": monitor.CommsLoggerConfig,
    "flops_profiler": monitor.FlopsProfilerConfig,
}


def test_every_other_used_key_is_a_field_of_a_model_and_every_field_is_a_used_key() -> None:
    sections = frozenset(
        {
            "origin",
            "world_size",
            "optimizer",
            "scheduler",
            "bf16",
            "fp16",
            "data_types",
            "torch_autocast",
            "zero",
            "aio",
            "checkpoint",
            "activation_checkpointing",
            *WATCHING,
            "timers",
            "tensor_parallel",
            "mesh",
            "pipeline",
            "expert_parallel",
            "sequence",
        }
    )
    expected = (
        aliases(config.Config, "", without=sections)
        | aliases(precision.Bf16Config, "bf16")
        | aliases(experts.ExpertParallelConfig, "expert_parallel")
        | aliases(precision.Fp16Config, "fp16")
        | aliases(precision.DataTypesConfig, "data_types")
        | aliases(activation.ActivationConfig, "activation_checkpointing")
        | aliases(precision.TorchAutocastConfig, "torch_autocast")
        | aliases(offload.AioConfig, "aio")
        | aliases(
            tensor.TensorParallelConfig,
            "tensor_parallel",
            without=frozenset({"axis", "partition_config"}),
        )
        | aliases(tensor.AxisConfig, "tensor_parallel.tp")
        | aliases(tensor.PartitionConfig, "tensor_parallel.partition_config")
        | aliases(mesh.MeshConfig, "mesh")
        | aliases(pipeline.PipelineConfig, "pipeline")
        | aliases(sequence.SequenceConfig, "sequence")
        | aliases(checkpoint.CheckpointConfig, "checkpoint")
        | aliases(
            zero.ZeroConfig,
            "zero_optimization",
            without=frozenset({"leaf_module", "offload_optimizer", "offload_param"}),
        )
        | aliases(
            offload.OffloadOptimizerConfig,
            "zero_optimization.offload_optimizer",
            without=frozenset({"delayed_update"}),
        )
        | aliases(offload.DelayedUpdateConfig, "zero_optimization.offload_optimizer.delayed_update")
        | aliases(offload.OffloadParamConfig, "zero_optimization.offload_param")
        | aliases(zero.LeafModuleConfig, "zero_optimization.leaf_module")
        | {"optimizer.type", "scheduler.type"}
        | aliases(monitor.ThroughputConfig, "timers.throughput")
    )
    for section, model in WATCHING.items():
        expected |= aliases(model, section)
    assert used(set()) == expected


def test_no_key_is_listed_twice_and_none_is_both_a_key_and_a_section() -> None:
    paths = [key.path for key in KEYS]
    assert len(paths) == len(set(paths))
    sections = {path.rpartition(".")[0] for path in paths}
    assert not sections & set(paths)


def test_the_keys_of_a_type_that_is_not_known_are_left_alone() -> None:
    keys = keys_for(None, None, {})
    assert {path for path in keys if ".params" in path} == {"optimizer.params", "scheduler.params"}


DEEPSPEED = """
train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping steps_per_print
wall_clock_breakdown memory_breakdown dump_state optimizer scheduler fp16 bf16 prescale_gradients
gradient_predivide_factor sparse_gradients communication_data_type data_types torch_autocast amp
zero_allow_untested_optimizer zero_force_ds_cpu_optimizer checkpoint aio activation_checkpointing comms_logger
tensorboard wandb csv_monitor comet flops_profiler dataloader_drop_last
seq_parallel_communication_data_type elasticity autotuning compression_training data_efficiency
curriculum_learning eigenvalue progressive_layer_drop hybrid_engine tensor_parallel compile zero_optimization
zero_optimization.stage zero_optimization.contiguous_gradients zero_optimization.overlap_comm
zero_optimization.reduce_bucket_size zero_optimization.allgather_bucket_size
zero_optimization.allgather_partitions zero_optimization.reduce_scatter
zero_optimization.round_robin_gradients zero_optimization.sub_group_size
zero_optimization.stage3_prefetch_bucket_size zero_optimization.stage3_param_persistence_threshold
zero_optimization.stage3_model_persistence_threshold zero_optimization.stage3_max_live_parameters
zero_optimization.stage3_max_reuse_distance zero_optimization.stage3_gather_16bit_weights_on_model_save
zero_optimization.stage3_gather_fp16_weights_on_model_save zero_optimization.ignore_unused_parameters
zero_optimization.elastic_checkpoint zero_optimization.load_from_fp32_weights
zero_optimization.use_multi_rank_bucket_allreduce zero_optimization.zero_hpz_partition_size
zero_optimization.zero_quantized_weights zero_optimization.zero_quantized_gradients
zero_optimization.zero_quantized_nontrainable_weights zero_optimization.mics_shard_size
zero_optimization.mics_hierarchical_params_gather zero_optimization.memory_efficient_linear
zero_optimization.override_module_apply zero_optimization.stage3_module_granularity_threshold
zero_optimization.stage3_use_all_reduce_for_fetch_params zero_optimization.stage3_allgather_sequential
zero_optimization.pipeline_loading_checkpoint zero_optimization.log_trace_cache_warnings
zero_optimization.enable_sanity_checks zero_optimization.legacy_stage1 zero_optimization.leaf_module
zero_optimization.offload_param zero_optimization.offload_optimizer zero_optimization.cpu_offload
zero_optimization.cpu_offload_param zero_optimization.cpu_offload_use_pin_memory
zero_optimization.zeropp_loco_param
"""


def test_every_key_of_deepspeed_has_a_fate() -> None:
    known = {".".join(key.path.split(".")[:depth]) for key in KEYS for depth in range(1, 5)}
    assert set(DEEPSPEED.split()) - known == set()


INSTALLED = Path(sys.prefix) / "deepspeed" / "deepspeed" / "runtime"  # `make setup` puts the package there
needs_deepspeed = pytest.mark.skipif(
    not INSTALLED.is_dir(), reason="DeepSpeed is not installed to compare with"
)


@needs_deepspeed
def test_every_field_of_deepspeeds_zero_precision_and_offload_sections_is_known() -> None:
    sections = {
        "zero/config.py DeepSpeedZeroConfig": "zero_optimization",
        "zero/offload_config.py DeepSpeedZeroOffloadParamConfig": "zero_optimization.offload_param",
        "zero/offload_config.py DeepSpeedZeroOffloadOptimizerConfig": "zero_optimization.offload_optimizer",
        "zero/leaf_module_config.py DeepSpeedZeroLeafModuleConfig": "zero_optimization.leaf_module",
        "precision_config.py DeepSpeedFP16Config": "fp16",
        "precision_config.py DeepSpeedBF16Config": "bf16",
        "../monitor/config.py TensorBoardConfig": "tensorboard",
        "../monitor/config.py WandbConfig": "wandb",
        "../monitor/config.py CSVConfig": "csv_monitor",
        "../monitor/config.py CometConfig": "comet",
        "../comm/config.py CommsLoggerConfig": "comms_logger",
        "../compile/config.py CompileConfig": "compile",
        "config.py HybridEngineConfig": "hybrid_engine",
    }
    known = {".".join(key.path.split(".")[:depth]) for key in KEYS for depth in range(1, 5)} | {
        f"zero_optimization.{name}"  # read as stage3_...
        for name in ("prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold")
    }
    fields = {
        f"{section}.{name}" for place, section in sections.items() for name in _fields_of(*place.split())
    }
    assert len(fields) > 100
    assert fields - known == set()


def _fields_of(path: str, name: str) -> list[str]:
    tree = ast.parse((INSTALLED / path).read_text(encoding="utf-8"))
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return [
        node.target.id
        for node in found.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]


@needs_deepspeed
def test_the_keys_that_count_as_removed_are_those_that_deepspeed_refuses() -> None:
    tree = ast.parse((INSTALLED / "config.py").read_text(encoding="utf-8"))
    tables = {
        node.targets[0].id: [key.value for key in node.value.keys if isinstance(key, ast.Constant)]
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Dict)
    }
    zero = [f"zero_optimization.{name}" for name in tables["_REMOVED_ZERO_CONFIG_KEYS"]]
    assert sorted(REMOVED) == sorted([*tables["_REMOVED_TOP_LEVEL_CONFIG_KEYS"], *zero])


def test_every_key_says_what_it_does_or_why_it_does_nothing() -> None:
    assert [key.path for key in KEYS if not key.note and key.fate is not Fate.DETAIL] == []


def test_what_is_removed_and_refused_says_so() -> None:
    refused = [key for key in KEYS if key.fate is Fate.REFUSED]
    for key in refused:
        is_in = any(f"{key.path}.".startswith(f"{path}.") for path in REMOVED)
        assert key.note.startswith("DeepSpeed 0.19.8 has removed it, too: ") == is_in, key.path


@pytest.mark.parametrize("key", [key for key in KEYS if key.off], ids=lambda key: key.path)
def test_what_a_refused_key_may_be_is_what_the_message_says(key: Key) -> None:
    if key.off == "nothing enabled in it":
        assert key.is_off({"enabled": False, "inner": [{"enabled": None}]})
        assert not key.is_off({"inner": [{"enabled": True}]})
        return
    values = [json.loads(word) for word in key.off.split(" or ")]
    assert all(key.kind.accepts(value) and key.is_off(value) for value in values)
