"""The table of keys: what becomes of each."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

import pytest

from dslaunch.runtime.config.key_table import KEYS, REMOVED, keys_for
from dslaunch.runtime.config.keys.key import Fate, Key
from tests.runtime.config.documented import documented


def test_the_keys_that_are_used_are_the_fields_of_the_models_by_their_aliases() -> None:
    used = [key.path for key in KEYS if key.fate is Fate.USED]
    assert used[:2] == ["train_batch_size", "train_micro_batch_size_per_gpu"]  # micro_batch_size here
    assert "zero_optimization.offload_optimizer.delayed_update.warmup_steps" in used
    assert "timers.throughput.enabled" in used
    assert "tensor_parallel.partition_config.layer_specs" in used  # a list of sections is one key
    assert not {"origin", "world_size", "zero_optimization", "optimizer.params"} & set(used)


def test_a_parameter_of_several_types_is_one_key_that_names_them() -> None:
    types = {key.path: key.types for key in KEYS if key.fate is Fate.USED}
    assert types["optimizer.params.lr"] == ("Adam", "AdamW", "Muon")
    assert types["optimizer.params.adam_w_mode"] == ("Adam", "AdamW")
    assert types["scheduler.params.total_num_steps"] == ("WarmupDecayLR", "WarmupCosineLR")
    assert types["optimizer.type"] == types["bf16.enabled"] == ()


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
    assert [key.path for key in documented() if not key.note and key.fate is not Fate.DETAIL] == []


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
