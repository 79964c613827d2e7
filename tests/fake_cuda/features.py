"""Steps of each feature, in which the waits of the host are counted."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import dslaunch
from tests.fake_cuda.torch_cuda import device
from tests.runtime.models import Blocks

Step = Callable[[], object]
NUM_BEFORE = 4  # steps before the one that is counted: what is looked at in steps 1, 2, 4, 8 is not counted
WIDTH, DEPTH = 64, 4  # of a dense model

OFFLOADED = {"zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memory": True}}}
# What a host waits for, as the fake device names it. The norm is copied to the host.
TO_HOST = NORM = "copy to the host"
VALUE = "aten::_local_scalar_dense"
EVENT = "event.synchronize"


def make_config(stage: int, **changes: Any) -> dict[str, Any]:
    """A ds_config in which all that is looked at in a step is on."""
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": WIDTH}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
        **changes,
        "zero_optimization": {**zero, **changes.get("zero_optimization", {})},
    }


def loss_of(engine: Any, own: Tensor) -> Tensor:
    """Of a model without labels."""
    result: Tensor = engine(own).float().pow(2).mean()
    return result


def train(engine: Any, loss: Callable[[], Tensor], num_micro_batches: int = 1) -> None:
    """One step."""
    for _ in range(num_micro_batches):
        engine.backward(loss())
        engine.step()


@contextmanager
def blocks(stage: int, **changes: Any) -> Iterator[Step]:
    """Steps of a dense model."""
    torch.manual_seed(0)
    engine, *_ = dslaunch.initialize(model=Blocks(WIDTH, DEPTH), config=make_config(stage, **changes))
    dtype = next(engine.module.parameters()).dtype
    own = torch.ones(2, WIDTH, dtype=dtype, device=engine.device)
    yield partial(train, engine, partial(loss_of, engine, own), changes.get("gradient_accumulation_steps", 1))
    engine.destroy()


@contextmanager
def evaluation(stage: int) -> Iterator[Step]:
    """Forwards without gradients, after a step."""
    engine, *_ = dslaunch.initialize(model=Blocks(WIDTH, DEPTH), config=make_config(stage))
    own = torch.ones(2, WIDTH, dtype=torch.bfloat16, device=engine.device)
    train(engine, partial(loss_of, engine, own))
    with torch.no_grad():
        yield partial(loss_of, engine, own)
    engine.destroy()


@contextmanager
def events() -> Iterator[Step]:
    """Steps with a monitor that writes files."""
    with tempfile.TemporaryDirectory() as folder:
        section = {"enabled": True, "output_path": folder, "job_name": "job"}
        with blocks(2, csv_monitor=section) as step:
            yield step


@contextmanager
def told() -> Iterator[Step]:
    """Steps whose numbers the launcher asks for; they go into a file."""
    from tests.runtime.metrics.told import telling

    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    with tempfile.NamedTemporaryFile() as file, telling(rank, file.name), blocks(2) as step:
        yield step


@contextmanager
def preemption() -> Iterator[Step]:
    """Steps in which the ranks ask each other whether they are to save and end."""
    with blocks(2, checkpoint={"preemption_save_dir": "/never/saved"}) as step:
        yield step


@contextmanager
def checkpointing(**section: Any) -> Iterator[Step]:
    """Steps with activation checkpointing."""

    class Checkpointed(Blocks):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = x + dslaunch.checkpointing.checkpoint(block, x)
            return x

    config = make_config(2, activation_checkpointing=section)
    engine, *_ = dslaunch.initialize(model=Checkpointed(WIDTH, DEPTH), config=config)
    own = torch.ones(2, WIDTH, dtype=torch.bfloat16, device=engine.device, requires_grad=True)
    yield partial(train, engine, partial(loss_of, engine, own))
    engine.destroy()


@contextmanager
def moe(ep_size: int, **options: Any) -> Iterator[Step]:
    """Two layers of experts."""
    from tests.runtime.experts.models import loss_of as loss_of_experts, make_layered

    model = make_layered(torch.distributed.get_rank() if ep_size > 1 else 0, ep_size, **options)
    engine, *_ = dslaunch.initialize(model=model, config=make_config(2))
    own = torch.ones(8, 7, dtype=torch.bfloat16, device=engine.device)
    yield partial(train, engine, partial(loss_of_experts, engine, own))
    engine.destroy()


@contextmanager
def hugging_face_experts(size: int) -> Iterator[Step]:
    """One layer of a model of transformers, whose own code waits for nothing in this implementation."""
    from tests.runtime.tensor.models import VOCAB, make_hugging_face

    model = make_hugging_face("Mixtral", num_hidden_layers=1)
    model.set_experts_implementation("batched_mm")
    section = {"enabled": True, "autoep_size": size}
    engine, *_ = dslaunch.initialize(model=model, config=make_config(2, expert_parallel=section))
    tokens = torch.arange(32, device=engine.device).view(4, 8) % VOCAB
    yield partial(train, engine, lambda: engine(input_ids=tokens, labels=tokens).loss)
    engine.destroy()


@contextmanager
def layers_divided() -> Iterator[Step]:
    """A model of transformers whose layers are divided over two ranks."""
    from tests.runtime.tensor.models import VOCAB, make_hugging_face

    config = make_config(2, tensor_parallel={"autotp_size": 2})
    engine, *_ = dslaunch.initialize(model=make_hugging_face("Llama"), config=config)
    tokens = torch.arange(32, device=engine.device).view(4, 8) % VOCAB
    yield partial(train, engine, lambda: engine(input_ids=tokens, labels=tokens).loss)
    engine.destroy()


@contextmanager
def sequences(*, is_packed: bool) -> Iterator[Step]:
    """A model of transformers over sequences that two ranks share."""
    from dslaunch.runtime.sequence.hugging_face import UlyssesSPAttentionHF
    from dslaunch.runtime.sequence.loss import mean_over_tokens
    from tests.runtime.tensor.models import VOCAB, make_hugging_face

    model = make_hugging_face("Llama")
    mpu = UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", 2, 2)
    try:
        engine, *_ = dslaunch.initialize(model=model, mpu=mpu, config=make_config(2))
        place, length = torch.distributed.get_rank(), 8
        tokens = torch.arange(2 * length, device=engine.device).view(2, length) % VOCAB
        first = 0 if is_packed else place * length
        positions = torch.arange(first, first + length, device=engine.device).repeat(2, 1)

        def loss() -> Tensor:
            logits = engine(input_ids=tokens, position_ids=positions, use_cache=False).logits
            return mean_over_tokens(logits, tokens)

        yield partial(train, engine, loss)
        engine.destroy()
    finally:
        UlyssesSPAttentionHF.unregister_from_transformers()


@contextmanager
def pipeline(schedule: str, *, num_stages: int = 2, is_evaluation: bool = False) -> Iterator[Step]:
    """Batches of a model in stages."""
    from dslaunch.runtime.compat.pipeline.module import PipelineModule
    from tests.runtime.pipeline.models import data, loss_fn, specs
    from tests.runtime.pipeline.test_train import MICRO, SIZE, config_of, pairs

    module = PipelineModule(
        specs(is_tied=False), num_stages, loss_fn=loss_fn, partition_method="uniform", schedule=schedule
    )
    engine: Any
    engine, *_ = dslaunch.initialize(model=module, config=config_of(1, MICRO))
    whole = [one.cuda() for one in data(0, size=SIZE * MICRO * engine.dp_world_size)]
    batch = engine.eval_batch if is_evaluation else engine.train_batch
    yield lambda: batch(pairs(*whole, engine, MICRO))
    engine.destroy()


@dataclass(frozen=True)
class Feature:
    """A kind of training, and how often each rank's host waits in a step of it, by what it waits for."""

    name: str
    steps: Callable[[], AbstractContextManager[Step]]
    waits: dict[str, int]
    num_ranks: int = 2  # at least


FP16 = {"bf16": {"enabled": False}, "fp16": {"enabled": True}}
FEATURES = (
    *(Feature(f"stage {stage}", partial(blocks, stage), {NORM: 1}) for stage in (0, 1, 2, 3)),
    Feature("stage 3 on one rank", partial(blocks, 3), {NORM: 1}, 1),
    Feature("two micro batches", partial(blocks, 2, gradient_accumulation_steps=2), {NORM: 1}),
    Feature("fp16", partial(blocks, 2, **FP16), {NORM: 1}),
    Feature("optimizer in pinned memory", partial(blocks, 2, **OFFLOADED), {NORM: 1, EVENT: 1}),
    Feature("numbers for the launcher", told, {NORM: 1}),
    Feature("events of a monitor", events, {NORM: 1}),
    Feature("preemption_save_dir", preemption, {NORM: 1}),
    Feature("activation checkpointing", checkpointing, {NORM: 1}),
    Feature("cpu_checkpointing", partial(checkpointing, cpu_checkpointing=True), {NORM: 1}),
    Feature("evaluation, stage 0", partial(evaluation, 0), {}),
    Feature("evaluation, stage 3", partial(evaluation, 3), {EVENT: 1}),
    Feature("evaluation, stage 3 on one rank", partial(evaluation, 3), {}, 1),
    Feature("MoE", partial(moe, 1), {NORM: 1}),
    Feature("MoE, no drop_tokens", partial(moe, 1, drop_tokens=False), {NORM: 1, VALUE: 2}),
    Feature("MoE over ranks", partial(moe, 2), {NORM: 1, EVENT: 2}),
    Feature("MoE over ranks, Jitter", partial(moe, 2, noisy_gate_policy="Jitter"), {NORM: 1, EVENT: 2}),
    Feature("MoE over ranks, RSample", partial(moe, 2, noisy_gate_policy="RSample"), {NORM: 1, EVENT: 2}),
    Feature("MoE over ranks, no drop_tokens", partial(moe, 2, drop_tokens=False), {NORM: 1, VALUE: 2}),
    Feature("Hugging Face experts", partial(hugging_face_experts, 1), {NORM: 1}),
    Feature("Hugging Face experts over ranks", partial(hugging_face_experts, 2), {TO_HOST: 2}),
    Feature("layers over ranks", layers_divided, {NORM: 1}),
    Feature("sequences over ranks", partial(sequences, is_packed=False), {TO_HOST: 2, VALUE: 1}),
    Feature("packed sequences over ranks", partial(sequences, is_packed=True), {TO_HOST: 2, VALUE: 1}),
    Feature("pipeline of one stage", partial(pipeline, "1f1b", num_stages=1), {TO_HOST: 2}, 1),
    Feature("pipeline 1f1b", partial(pipeline, "1f1b"), {TO_HOST: 2, EVENT: 1}),
    Feature("pipeline zbv", partial(pipeline, "zbv"), {TO_HOST: 2, EVENT: 1}),
    Feature(
        "evaluation of a pipeline", partial(pipeline, "1f1b", is_evaluation=True), {TO_HOST: 1, EVENT: 1}
    ),
)


def waits_of(rank: int, name: str) -> dict[str, int]:
    """Return how often this rank's host waits in a step of the feature, by what it waits for.

    The engine is made and trains where a tensor that does not say where it lies has no memory, which is an
    error once it meets another. The program's own tensors are there before.
    """
    (feature,) = (one for one in FEATURES if one.name == name)
    plain: Any = dslaunch.initialize

    def initialize(**given: Any) -> Any:
        with torch.device("meta"):
            return plain(**given)

    with patch.object(dslaunch, "initialize", initialize), feature.steps() as step, torch.device("meta"):
        for _ in range(NUM_BEFORE):
            step()
        device().clear_counters()
        step()
        return dict(device().host_waits())
