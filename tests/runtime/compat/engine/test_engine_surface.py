"""The engine's public surface, pinned, and beside DeepSpeed's: every name of theirs is here,
or says what to do instead.

`python tests/runtime/compat/engine/test_engine_surface.py` writes the table of docs/train/engine.md anew.
"""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import dslaunch
from dslaunch import ConfigError, PipelineError
from dslaunch.runtime.compat.engine.absent import names_by_reason, why_absent
from dslaunch.runtime.compat.engine.getters import DeepSpeedEngine
from dslaunch.runtime.engine.base import RUN_BY_THE_PROGRAM
from dslaunch.runtime.engine.step_engine import StepEngine
from tests.runtime.models import make_config, make_model
from tests.runtime.ranks import Ranks

ROOT = Path(__file__).parents[4]
GUIDE = ROOT / "docs" / "train" / "engine.md"
TABLE = re.compile(r"(?<=<!-- absent: begin -->\n).*(?=<!-- absent: end -->)", flags=re.DOTALL)
DEEPSPEED = ROOT / ".venv" / "deepspeed" / "deepspeed" / "runtime" / "engine.py"

# What nn.Module has is left out, but for what the engine does in its own way.
SURFACE = """
allreduce_gradients autotp_size backward bfloat16_enabled coalesce_grad_reduction collate_fn comm_bytes
comm_order_hash compile config dataloader_drop_last deepspeed_io defaults destroy device dp_world_size
dump_state dynamic_loss_scale empty_partition_cache enable_backward_allreduce flops_profiler
flops_profiler_detailed flops_profiler_enabled flops_profiler_module_depth flops_profiler_output_file
flops_profiler_profile_step flops_profiler_recompute_fwd_factor flops_profiler_top_modules forward
fp16_auto_cast fp16_enabled generate generating get_batch_info get_data_parallel_rank get_global_grad_norm
get_lr get_model_parallel_rank get_mom get_sequence_parallel_group get_tensor_parallel_rank get_type
get_wall_clock_timers global_rank
global_samples global_steps gradient_accumulation_steps gradient_average gradient_clipping
initial_dynamic_scale is_compiled is_gradient_accumulation_boundary load_checkpoint load_module_state_dict
load_state_dict load_weights local_rank log_comm_summary log_level loss_scale lr_scheduler
managed_gradient_accumulation micro_steps module module_state_dict
monitor mp_world_size mpu named_parameters no_sync offload_states optimizer optimizer_name optimizer_params
param_groups reload_states resume save_16bit_model save_checkpoint scale scheduler_name scheduler_params
seq_dp_world_size sequence_parallel_size
set_gradient_accumulation_boundary set_train_batch_size set_train_micro_batch_size settings skipped_steps
state state_dict step steps_per_print torch_autocast_dtype torch_autocast_enabled tput_timer
train_batch_size train_micro_batch_size_per_gpu training_dataloader
use_node_local_storage wall_clock_breakdown was_step_applied
weights world_size zero_gather_16bit_weights_on_model_save zero_grad zero_model_persistence_threshold
zero_optimization zero_optimization_partition_gradients zero_optimization_partition_weights
zero_optimization_stage zero_param_persistence_threshold zero_prefetch_bucket_size zero_reduce_bucket_size
"""
PRIVATE_OF_TRAINERS = ("_consolidated_16bit_state_dict", "_zero3_consolidated_16bit_state_dict")


def _surface(rank: int) -> list[str]:
    engine, *_ = dslaunch.initialize(model=make_model(), config=make_config())
    own = {name for name in vars(engine) if name not in vars(nn.Module())}
    for kind in dslaunch.Engine.__mro__[: dslaunch.Engine.__mro__.index(nn.Module)]:
        own |= set(vars(kind))
    own |= {name for name in dir(dslaunch.Engine) if not hasattr(nn.Module, name)} | {"module"}
    assert all(hasattr(engine, name) for name in PRIVATE_OF_TRAINERS)
    return sorted(name for name in own if not name.startswith("_"))


def test_the_public_surface_is_this(ranks: Ranks) -> None:
    assert ranks(_surface, world_size=1)[0] == SURFACE.split()


def deepspeed_names() -> set[str]:
    """The methods and attributes of DeepSpeed's engine, read and not run."""
    tree = ast.parse(DEEPSPEED.read_text(encoding="utf-8"))
    (engine,) = (
        node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "DeepSpeedEngine"
    )
    methods = {node.name for node in engine.body if isinstance(node, ast.FunctionDef)}
    attributes = {
        node.attr
        for node in ast.walk(engine)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }
    return {name for name in methods | attributes if not name.startswith("_")}


@pytest.mark.skipif(not DEEPSPEED.exists(), reason="needs DeepSpeed to compare with: make setup")
def test_every_name_of_deepspeed_s_engine_is_here_or_says_what_to_do() -> None:
    absent = [name for _, names in names_by_reason() for name in names]
    here = {*SURFACE.split(), *dir(nn.Module)}
    assert deepspeed_names() - here == set(absent)
    assert len(absent) == len(set(absent))


def test_both_kinds_of_engine_are_deepspeed_s_and_neither_is_the_other() -> None:
    for kind in (dslaunch.Engine, dslaunch.PipelineEngine):
        assert issubclass(kind, DeepSpeedEngine)
    assert not issubclass(dslaunch.PipelineEngine, StepEngine)


@pytest.mark.parametrize("name", RUN_BY_THE_PROGRAM)
def test_deepspeed_s_class_has_the_methods_that_run_micro_batches(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = getattr(DeepSpeedEngine, name)
    assert inspect.signature(call) == inspect.signature(getattr(StepEngine, name))
    step, stages = object.__new__(dslaunch.Engine), object.__new__(dslaunch.PipelineEngine)
    monkeypatch.setattr(StepEngine, name, lambda engine, *args, **kwargs: (args, kwargs))
    assert getattr(step, name)(1, lr_kwargs=2) == call(step, 1, lr_kwargs=2) == ((1,), {"lr_kwargs": 2})
    with pytest.raises(PipelineError, match=name):
        call(stages)


def _absent(rank: int) -> tuple[str, str, str, str]:
    class WithTimers(nn.Linear):
        timers = "the module's"

    engine, *_ = dslaunch.initialize(
        model=WithTimers(2, 2), config=make_config(optimizer={"type": "SGD", "params": {"lr": 0.1}})
    )
    said = []
    for name in ("save_fp16_model", "nonsense", "train_batch"):
        with pytest.raises(AttributeError) as caught:
            getattr(engine, name)
        said.append(str(caught.value))
    assert not hasattr(engine, "has_moe_layers")
    return said[0], said[1], said[2], engine.timers


def test_an_absent_name_says_what_to_do_unless_the_module_has_it(ranks: Ranks) -> None:
    absent, unknown, of_stages, of_module = ranks(_absent, world_size=1)[0]
    assert absent == "engine.save_fp16_model, which DeepSpeed has, is not here: call save_16bit_model()"
    assert unknown == "neither the engine nor its module, a WithTimers, has 'nonsense'"
    assert of_stages == (
        "engine.train_batch(): a PipelineModule has it; any other model has engine(batch), "
        "engine.backward(loss) and engine.step()"
    )
    assert of_module == "the module's"
    assert why_absent("nonsense") is None


def _fixed(rank: int) -> list[str]:
    engine, *_ = dslaunch.initialize(model=make_model(), config=make_config())
    said = []
    for name in ("gradient_average", "enable_backward_allreduce"):
        setattr(engine, name, True)
        with pytest.raises(ConfigError) as caught:
            setattr(engine, name, False)
        assert getattr(engine, name) is True
        said.append(str(caught.value))
    return said


def test_an_attribute_that_programs_set_and_that_has_one_value_here_refuses_others(ranks: Ranks) -> None:
    average, allreduce = ranks(_fixed, world_size=1)[0]
    assert average == (
        "engine.gradient_average = False: is always True here; the ds_config's gradient_allreduce_op says it"
    )
    assert allreduce.startswith("engine.enable_backward_allreduce = False: is always True here; ")


def _getters(rank: int) -> dict[str, Any]:
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}
    engine, *_ = dslaunch.initialize(
        model=make_model(),
        config=make_config(
            stage=2,
            fp16={"enabled": True, "initial_scale_power": 4},
            gradient_accumulation_steps=3,
            scheduler=scheduler,
            steps_per_print=7,
        ),
    )
    bare, *_ = dslaunch.initialize(
        model=make_model(),
        config={
            "train_batch_size": 12,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        },
    )
    assert (bare.optimizer_name(), bare.optimizer_params(), bare.get_type()) == (None, None, [])
    assert (bare.scheduler_name(), bare.scheduler_params(), bare.dynamic_loss_scale()) == (None, None, False)
    names = [
        "get_batch_info",
        "optimizer_name",
        "scheduler_name",
        "get_type",
        "steps_per_print",
        "wall_clock_breakdown",
        "dump_state",
        "dataloader_drop_last",
        "get_data_parallel_rank",
        "get_model_parallel_rank",
        "zero_reduce_bucket_size",
        "loss_scale",
        "dynamic_loss_scale",
        "initial_dynamic_scale",
        "torch_autocast_dtype",
    ]
    found = {name: getattr(engine, name)() for name in names}
    assert engine.optimizer_params()["lr"] == 0.01  # type: ignore[index]
    assert engine.scheduler_params()["warmup_num_steps"] == 5  # type: ignore[index]
    assert (engine.param_groups, engine.defaults) == (
        engine.optimizer.param_groups,
        engine.optimizer.defaults,
    )  # type: ignore[union-attr]
    assert not hasattr(bare, "param_groups")
    bare.global_steps, bare.global_samples, bare.micro_steps, bare.skipped_steps = 7, 84, 14, 1
    assert (bare.global_steps, bare.global_samples, bare.micro_steps, bare.skipped_steps) == (7, 84, 14, 1)
    return {**found, "ranks": (engine.dp_world_size, engine.mp_world_size)}


def test_getters_are_methods_that_return_values(ranks: Ranks) -> None:
    assert ranks(_getters, world_size=2)[1] == {
        "get_batch_info": (12, 2, 3),
        "optimizer_name": "AdamW",
        "scheduler_name": "WarmupLR",
        "get_type": [0.0],
        "steps_per_print": 7,
        "wall_clock_breakdown": False,
        "dump_state": False,
        "dataloader_drop_last": False,
        "get_data_parallel_rank": 1,
        "get_model_parallel_rank": 0,
        "zero_reduce_bucket_size": 600,
        "loss_scale": 0.0,
        "dynamic_loss_scale": True,
        "initial_dynamic_scale": 16.0,
        "torch_autocast_dtype": None,
        "ranks": (2, 1),
    }


def absent_table() -> str:
    rows = [
        f"| {', '.join(f'`{name}`' for name in names)} | {reason} |" for reason, names in names_by_reason()
    ]
    return "\n".join(["| name | what to do, or why |", "|---|---|", *rows, ""])


def test_the_guide_lists_what_is_absent() -> None:
    found = TABLE.search(GUIDE.read_text(encoding="utf-8"))
    assert found is not None
    assert found.group() == absent_table()


if __name__ == "__main__":
    GUIDE.write_text(TABLE.sub(lambda _: absent_table(), GUIDE.read_text(encoding="utf-8")), encoding="utf-8")
