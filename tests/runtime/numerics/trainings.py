"""Sound trainings of many kinds, each a function of the rank, for comparisons with plain torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dslaunch
from dslaunch.runtime.compat.pipeline.module import PipelineModule
from dslaunch.runtime.environment import computes_plainly
from dslaunch.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
)
from tests.runtime.models import Uneven, batch, make_config, make_model, train_engine
from tests.runtime.pipeline.models import data, loss_fn, specs
from tests.runtime.tensor import models as tensor_models
from tests.runtime.training import axes
from tests.runtime.training.axes import Layout

SGD = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def by_config(rank: int, changes: dict[str, Any]) -> None:
    """The model of uneven widths; all that differs is the ds_config."""
    engine, *_ = dslaunch.initialize(model=make_model(), config=make_config(**changes))
    dtype = next((dtype for name, dtype in DTYPES.items() if name in changes), torch.float32)
    train_engine(engine, steps=3, dtype=dtype)


def of_layout(rank: int, layout: Layout, changes: dict[str, Any] | None = None) -> None:
    """A model with attention, experts and dense layers, divided in every way."""
    if computes_plainly():  # with all experts, and the first run's values
        with patch.object(axes, "take_values", lambda *_: None):
            engine = axes.make_engine(layout, **(changes or {}))
    else:
        engine = axes.make_engine(layout, **(changes or {}))
    axes.train(engine, layout)


def of_pipeline(rank: int) -> None:
    """Two stages, of which the first and the last share a layer; two micro batches."""
    torch.manual_seed(0)
    module = PipelineModule(specs(4, is_tied=True), 2, loss_fn=loss_fn, partition_method="uniform")
    config = make_config(optimizer=SGD, gradient_accumulation_steps=2, train_batch_size=8)
    engine, *_ = dslaunch.initialize(model=module, config=config)
    for step in range(2):
        inputs, labels = data(step, size=8)
        engine.train_batch(iter(list(zip(inputs.chunk(2), labels.chunk(2), strict=True))))


def of_client(rank: int, stage: int, make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer]) -> None:
    """An optimizer of the program, with two groups and a schedule."""
    model = make_model()
    weights = [param for param in model.parameters() if param.dim() > 1]
    others = [param for param in model.parameters() if param.dim() <= 1]
    optimizer = make([{"params": weights, "weight_decay": 0.1}, {"params": others, "lr": 0.03}])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    config = {**make_config(stage=stage), "gradient_clipping": 0.2}
    del config["optimizer"]
    engine, *_ = dslaunch.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)
    train_engine(engine, steps=3)


class Adapted(nn.Module):
    """A frozen layer with a trained one of low rank beside it, and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Uneven()
        self.base.requires_grad_(False)
        self.down, self.up = nn.Linear(7, 3, bias=False), nn.Linear(3, 7, bias=False)
        self.again = self.up
        self.drop = nn.Dropout(0.3)
        self.register_buffer("scale", torch.rand(7))

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.up, self.again):
            x = x + self.drop(layer(self.down(x))) * self.scale + 0.01 * torch.randn_like(x)
        result: Tensor = self.base(x)
        return result


def of_adapters(rank: int, stage: int) -> None:
    """Frozen, tied, dropout, random numbers; weights that each run makes anew."""
    torch.manual_seed(torch.seed() if rank == 0 else 0)
    engine, *_ = dslaunch.initialize(model=Adapted(), config=make_config(stage=stage, optimizer=SGD))
    train_engine(engine, steps=3)


def made_in_shards(rank: int, stage: int) -> None:
    """zero.Init, direct backwards, and parameters that are gathered between steps."""
    config = make_config(stage=stage, train_micro_batch_size_per_gpu=2)
    torch.manual_seed(0)
    with dslaunch.zero.Init(config_dict_or_path=config):
        model = Uneven()
    engine, *_ = dslaunch.initialize(model=model, config=config)
    for step in range(3):
        for micro in batch(step).chunk(engine.gradient_accumulation_steps()):
            engine(micro.chunk(2)[rank]).square().mean().backward()
            engine.step()
        with dslaunch.zero.GatheredParameters(list(model.parameters())):
            assert all(param.isfinite().all() for param in model.parameters())


class Checkpointed(nn.Module):
    """A layer that is computed again in the backward."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.__dict__["attention_type"] = getattr(layer, "attention_type", None)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.layer, *args, use_reentrant=False, **kwargs)


def with_reads(rank: int, stage: int) -> None:
    """Reads and writes by the functions that know shards: every gradient is halved before the step."""
    model = make_model()
    config = make_config(stage=stage, train_micro_batch_size_per_gpu=2, optimizer=SGD)
    engine, *_ = dslaunch.initialize(model=model, config=config)
    for step in range(3):
        for micro in batch(step).chunk(engine.gradient_accumulation_steps()):
            engine.backward(engine(micro.chunk(2)[rank]).square().mean())
            if engine.is_gradient_accumulation_boundary():
                for param in model.parameters():
                    grad = safe_get_full_grad(param)
                    assert grad is not None
                    safe_set_full_grad(param, grad / 2)
            engine.step()
        value = safe_get_full_fp32_param(model.last.bias)
        assert value is not None
        safe_set_full_fp32_param(model.last.bias, value + 0.1)
        assert safe_get_full_optimizer_state(model.last.bias, "momentum_buffer") is not None


def with_edits(rank: int, stage: int) -> None:
    """Weights are written between steps, by one rank for all."""
    model = make_model()
    engine, *_ = dslaunch.initialize(model=model, config=make_config(stage=stage))
    for step in range(3):
        train_engine(engine, steps=1, first=step)
        with dslaunch.zero.GatheredParameters(set(model.parameters()), modifier_rank=1), torch.no_grad():
            if rank == 1:
                model.first.weight.mul_(0.5)


def resumed(rank: int, folder: str, changes: dict[str, Any]) -> None:
    """What another training has saved is loaded, and trained on."""
    config = make_config(**{"scheduler": {"type": "WarmupLR"}, **changes})
    engine, *_ = dslaunch.initialize(model=make_model(seed=7), config=config)
    path, state = engine.load_checkpoint(folder)
    assert path is not None
    assert state is not None
    train_engine(engine, steps=3, first=state["step"])


def saved(rank: int, folder: str, changes: dict[str, Any]) -> None:
    config = make_config(**{"scheduler": {"type": "WarmupLR"}, **changes})
    engine, *_ = dslaunch.initialize(model=make_model(), config=config)
    train_engine(engine, steps=2)
    engine.save_checkpoint(folder, client_state={"step": 2})


def of_two_engines(rank: int) -> None:
    """Two models in turn, beside one that is only evaluated; the first one is compiled."""
    first, *_ = dslaunch.initialize(model=make_model(), config=make_config(stage=2))
    first.compile(backend="aot_eager")
    second, *_ = dslaunch.initialize(model=make_model(seed=3), config=make_config(stage=3, optimizer=SGD))
    config = make_config(stage=3)
    del config["optimizer"]
    judge, *_ = dslaunch.initialize(model=make_model(seed=4), config=config)
    for step in range(3):
        own = batch(step).chunk(2)[rank]
        with torch.no_grad():
            wanted = judge(own)
        for engine in (first, second):
            engine.backward((engine(own) - wanted).square().mean())
            engine.step()


def of_hugging_face(rank: int, kind: str, stage: int, tp: int, changes: dict[str, Any]) -> None:
    """A small causal model of transformers, tied, with checkpointed activations."""
    model = tensor_models.make_hugging_face(kind, is_tied=True, **changes.pop("model", {}))
    if changes.pop("is_checkpointed", False):
        model.model.layers = nn.ModuleList(map(Checkpointed, model.model.layers))
    config = tensor_models.make_config(stage, tp=tp, **changes)
    engine, *_ = dslaunch.initialize(model=model, config=config)
    tensor_models.train(engine, tensor_models.loss_of_tokens, tensor_models.token_batches(), tp=tp)


def _adafactor(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(groups, lr=0.02)


CPU = {"device": "cpu"}
ADAM = {"type": "Adam", "params": {"lr": 0.01, "weight_decay": 0.1, "adam_w_mode": False}}
OFFLOADED = {"zero_optimization": {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU}}
HYBRID = {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}
IN_GROUPS = {"zero_optimization": {"stage": 3, "mics_shard_size": 2}}
EARLY = {"zero_optimization": {"stage": 3, "offload_optimizer": {**CPU, "super_offload": True}}}
LATE = {"zero_optimization": {"stage": 2, "offload_optimizer": {**CPU, "delayed_update": {"enabled": True}}}}
UNMANAGED = {"stage": 2, "managed_gradient_accumulation": False, "train_micro_batch_size_per_gpu": 6}
EXPERTS = {"expert_parallel": {"enabled": True, "autoep_size": 2}}
ACCUMULATED = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.1}

# Name -> the number of ranks, the training, and its arguments.
SOUND: dict[str, tuple[int, Callable[..., None], tuple[Any, ...]]] = {
    **{f"stage {stage}": (2, by_config, ({"stage": stage, **ACCUMULATED},)) for stage in range(4)},
    "bf16": (2, by_config, ({"stage": 3, "bf16": {"enabled": True}, **ACCUMULATED},)),
    "bf16, summed in bf16": (2, by_config, ({"stage": 0, "bf16": {"enabled": True}, **ACCUMULATED},)),
    "fp16": (2, by_config, ({"stage": 2, "fp16": {"enabled": True, "initial_scale_power": 8}},)),
    "autocast": (2, by_config, ({"stage": 3, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}},)),
    "offload": (2, by_config, (OFFLOADED,)),
    "offload, early steps": (2, by_config, (EARLY,)),
    "offload, late steps": (2, by_config, (LATE,)),
    "hybrid shards": (4, by_config, (HYBRID,)),
    "shards in groups": (4, by_config, (IN_GROUPS,)),
    "sums": (2, by_config, ({"stage": 1, "gradient_allreduce_op": "sum"},)),
    "each step() an update": (2, by_config, (UNMANAGED,)),
    "two engines": (2, of_two_engines, ()),
    "Lion": (2, by_config, ({"stage": 1, "optimizer": {"type": "Lion", "params": {"lr": 0.001}}},)),
    "Adam": (2, by_config, ({"stage": 1, "optimizer": ADAM},)),
    "Lamb": (2, by_config, ({"stage": 2, "optimizer": {"type": "Lamb", "params": {"lr": 0.02}}},)),
    "Muon": (2, by_config, ({"stage": 2, "optimizer": {"type": "Muon"}},)),
    "schedule": (
        2,
        by_config,
        ({"stage": 2, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}}},),
    ),
    "client's AdamW": (2, of_client, (2, partial(torch.optim.AdamW, lr=0.01))),
    "client's Adafactor": (2, of_client, (3, _adafactor)),
    "adapters": (2, of_adapters, (3,)),
    "reads and writes": (2, with_reads, (3,)),
    "edits": (2, with_edits, (3,)),
    "zero.Init": (2, made_in_shards, (3,)),
    "Llama": (2, of_hugging_face, ("Llama", 3, 1, {"is_checkpointed": True})),
    "GPT-NeoX in bf16": (2, of_hugging_face, ("GPTNeoX", 2, 1, {"bf16": {"enabled": True}})),
    "Llama, tp": (2, of_hugging_face, ("Llama", 0, 2, {})),
    "Llama, tp, dp, in bf16": (4, of_hugging_face, ("Llama", 2, 2, {"bf16": {"enabled": True}})),
    "tied stages": (2, of_pipeline, ()),
    "Mixtral, stacks of experts": (2, of_hugging_face, ("Mixtral", 1, 1, EXPERTS)),
    "GPT-NeoX, tp, dp": (4, of_hugging_face, ("GPTNeoX", 3, 2, {})),
    "pp in fp16": (2, of_layout, (Layout(pp=2, dp=1, stage=1, precision="fp16"),)),
    "pp": (2, of_layout, (Layout(pp=2, dp=1, stage=0),)),
    "pp, dp, zero bubble": (4, of_layout, (Layout(pp=2, dp=2, stage=1, schedule="zero_bubble"),)),
    "sp": (2, of_layout, (Layout(sp=2, dp=1, stage=3),)),
    "sp, sums": (4, of_layout, (Layout(sp=2, dp=2, stage=2, gradient="sum"),)),
    "ep": (2, of_layout, (Layout(ep=2, dp=2, stage=2),)),
    "pp, tp, ep": (4, of_layout, (Layout(pp=2, tp=2, dp=1, stage=0),)),
    "sp, tp in bf16": (4, of_layout, (Layout(sp=2, tp=2, dp=1, stage=1, precision="bf16"),)),
    "pp, ep": (4, of_layout, (Layout(pp=2, dp=2, ep=2, stage=1),)),
}
