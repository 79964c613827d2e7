"""A rank sends along each axis what --mesh_estimate says of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import dslaunch
from dslaunch.launcher.job.mesh import JobMesh
from dslaunch.runtime.compat.pipeline.module import PipelineModule
from dslaunch.runtime.sequence.hugging_face import UlyssesSPAttentionHF
from dslaunch.runtime.sequence.loss import mean_over_tokens
from tests.launcher.job.test_mesh_estimate import LLAMA, SEQ, estimate
from tests.runtime.ranks import Ranks

MICRO = 2


def _sent(rank: int, stage: int, axis: str) -> int:
    """Bytes that a rank sends in its third step, but for what ranks tell each other in numbers.

    Ranks along tp compare the gradients of whole parameters in steps 1, 2, 4 and so on, which is no part of
    the estimate; see copied_gradients.py.
    """
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, attn_implementation="sdpa"))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": MICRO,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "reduce_bucket_size": 20_000,  # else a model as small as this is one unit, gathered once
        },
        **({"tensor_parallel": {"autotp_size": 2}} if axis == "tp" else {}),
    }
    mpu = UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", 2) if axis == "sp" else None
    engine: Any
    engine, *_ = dslaunch.initialize(model=model, config=config, mpu=mpu)
    tokens = torch.arange(SEQ)[None] % 32
    given = {"input_ids": tokens, "position_ids": torch.arange(SEQ)[None]}
    if axis == "sp":
        given = {name: value.chunk(2, dim=1)[rank] for name, value in given.items()}
    before = 0
    for _step in range(3):
        kinds = engine._wire.meter.bytes_by_kind()
        before = sum(kinds.values()) - kinds.get("scalar", 0)
        for _ in range(MICRO):
            logits = engine(**given, use_cache=False).logits
            own = given["input_ids"]
            loss = mean_over_tokens(logits, own) if axis == "sp" else logits.float().logsumexp(-1).mean()
            engine.backward(loss)
            engine.step()
    kinds = engine._wire.meter.bytes_by_kind()
    engine.destroy()
    if axis == "sp":
        UlyssesSPAttentionHF.unregister_from_transformers()
    return sum(kinds.values()) - kinds.get("scalar", 0) - before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axis", "stage"), [("dp", 0), ("dp", 1), ("dp", 2), ("dp", 3), ("tp", 0), ("sp", 1)]
)
def test_the_runtime_sends_what_was_estimated(ranks: Ranks, tmp_path: Path, axis: str, stage: int) -> None:
    one = estimate(tmp_path, micro_batches=MICRO, stage=stage)
    mesh = JobMesh(**{axis: 2})  # type: ignore[arg-type]
    wanted = sum(one.sent_bytes(mesh, name) for name in {axis, "dp"})
    for sent in ranks(_sent, stage, axis, world_size=2):
        assert sent == pytest.approx(wanted, rel=0.15)  # of 4 blocks; tp sends for both ends, too


def _stages(rank: int) -> int:
    layers = [torch.nn.Linear(4, 4) for _ in range(3)]
    module = PipelineModule(layers, 3, loss_fn=lambda out, _: out.sum(), partition_method="uniform")
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4}
    config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}  # type: ignore[assignment]
    engine: Any
    engine, *_ = dslaunch.initialize(model=module, config=config)
    batch = [(torch.ones(1, 4), torch.zeros(1))] * 4
    engine.train_batch(iter(batch))
    before = engine._wire.meter.bytes_by_kind()["send"]
    engine.train_batch(iter(batch))
    return int(engine._wire.meter.bytes_by_kind()["send"] - before)


@pytest.mark.slow
def test_a_stage_between_others_sends_what_was_estimated(ranks: Ranks, tmp_path: Path) -> None:
    one = estimate(tmp_path, micro_batches=4, seq=1)
    one = one._replace(sizes=one.sizes._replace(hidden=4))
    assert ranks(_stages, world_size=3)[1] == one.sent_bytes(JobMesh(pp=3), "pp")
