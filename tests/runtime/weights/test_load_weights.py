"""engine.load_weights(): what from_pretrained() makes of the same folder, element for element, of which every
rank reads what it keeps.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

import dslaunch
from dslaunch import CheckpointError
from tests.runtime.models import assert_same_bits, make_config
from tests.runtime.ranks import Ranks
from tests.runtime.weights.test_model_names import EXPERTS, make


class LoadCase(NamedTuple):
    kind: str
    stage: int
    changes: dict[str, Any]
    is_on_meta: bool = True


SMALL = {"reduce_bucket_size": 50}  # units are cut small
TP2 = {"tensor_parallel": {"autotp_size": 2}}
BF16 = {"bf16": {"enabled": True}}
CASES = [
    LoadCase("Llama", 3, SMALL),
    LoadCase("Llama", 1, {**TP2}),
    LoadCase("GPT2", 3, {**BF16}),
    LoadCase("Mixtral", 3, SMALL),
    LoadCase("Qwen3Moe", 3, EXPERTS),
    LoadCase("Mixtral", 2, {**BF16}, is_on_meta=False),
]


def _step(engine: Any) -> None:
    engine.train()
    torch.manual_seed(0)  # of dropout
    ids = torch.arange(16).view(2, 8) + engine.get_data_parallel_rank()
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()


def _as_from_pretrained(rank: int, folder: str, cases: list[LoadCase] = CASES) -> None:
    for number, case in enumerate(cases):
        saved = make(case.kind)
        path = f"{folder}/{number}"
        if rank == 0:
            saved.save_pretrained(path, max_shard_size="6KB")
        dist.barrier()
        config = make_config(stage=case.stage, **case.changes)
        expected, *_ = dslaunch.initialize(model=type(saved).from_pretrained(path), config=config)
        with torch.device("meta") if case.is_on_meta else dslaunch.zero.Init():
            model = type(saved)(saved.config)
        engine, *_ = dslaunch.initialize(model=model, config=config)
        for one in (expected, engine):  # units are away, not whole
            sharded = [s for unit in one._model.units for s in unit.sub_buffers if s.is_sharded]
            assert sum(s.param_shard.values.flat.untyped_storage().nbytes() for s in sharded) == 0
        with pytest.raises(CheckpointError, match="on the meta device") if case.is_on_meta else nullcontext():
            engine(input_ids=torch.ones(1, 4, dtype=torch.int64))
        engine.load_weights(path)
        assert_same_bits(engine.state_dict(), expected.state_dict())
        for name, buffer in expected.module.named_buffers():
            assert torch.equal(engine.module.get_buffer(name), buffer), (case, name)
        for _ in range(2):
            _step(expected)
            _step(engine)
        assert_same_bits(engine.state_dict(), expected.state_dict())
        expected.destroy()
        engine.destroy()


def test_training_goes_on_as_from_the_model_of_from_pretrained(ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    ranks(_as_from_pretrained, str(tmp_path), world_size=2)


def _offloads(folder: Path) -> dict[str, dict[str, Any]]:
    cpu, nvme = {"device": "cpu"}, {"device": "nvme", "nvme_path": str(folder)}
    return {
        "none": {},
        "states on cpu": {"offload_optimizer": cpu},
        "states on nvme": {"offload_optimizer": nvme},
        "all on cpu": {"offload_optimizer": cpu, "offload_param": cpu},
        "all on nvme": {"offload_optimizer": nvme, "offload_param": nvme},
    }


@pytest.mark.exhaustive
@pytest.mark.parametrize("where", ["none", "states on cpu", "states on nvme", "all on cpu", "all on nvme"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_and_offload_gets_the_weights(
    ranks: Ranks, tmp_path: Path, stage: int, where: str
) -> None:
    pytest.importorskip("transformers")
    offload = _offloads(tmp_path)[where]
    if (offload and stage == 0) or ("offload_param" in offload and stage < 3):
        pytest.skip("no such offload at this stage")
    zero = make_config(stage=stage)["zero_optimization"] | offload
    cases = [
        LoadCase(kind, stage, {"zero_optimization": zero, **more}, is_on_meta)
        for kind in ("Mixtral", "GPT2")
        for more in ({}, BF16)
        for is_on_meta in (True, False)
    ]
    ranks(_as_from_pretrained, str(tmp_path), cases, world_size=2)


def _state(engine: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in engine.state_dict().items()}


def _misfits(rank: int, folder: str) -> None:
    at = Path(folder)
    saved = make("Llama")  # embeddings are tied
    weights = {name: value.contiguous() for name, value in saved.state_dict().items()}
    body = {name: value for name, value in weights.items() if name != "lm_head.weight"}
    norm = "model.norm.weight"
    other = {"model.embed_tokens.weight": weights["lm_head.weight"] + 1}
    files = {
        "both": weights,
        "differing": {name: value.clone() for name, value in (weights | other).items()},
        "head alone": {name: value for name, value in weights.items() if name not in other},
        "less": {name: value for name, value in body.items() if name != norm},
        "more": body | {"extra": torch.ones(2)},
        "shape": body | {norm: torch.ones(3)},
        f"of rank {rank}": body | {norm: body[norm].double() if rank else body[norm]},
        "eighths": body | {norm: body[norm].to(torch.float8_e4m3fn)},
    }
    for name, values in files.items():
        if rank == 0 or name.startswith("of rank"):
            (at / name).mkdir()
            save_file({key: value.clone() for key, value in values.items()}, at / name / "model.safetensors")
    dist.barrier()
    engine, *_ = dslaunch.initialize(model=make("Llama", hidden_act="gelu"), config=make_config(stage=3))
    with torch.no_grad(), dslaunch.zero.GatheredParameters(list(engine.parameters()), modifier_rank=0):
        for param in engine.parameters():
            param.fill_(0.5)
    before = _state(engine)
    wrong = {
        "none": "none is no folder; give the folder of a model",
        "differing": "has other values of 'model.embed_tokens.weight' than of 'lm_head.weight'",
        "less": f"only in the model: {norm}; only in the checkpoint: none; strict=False",
        "more": "only in the model: none; only in the checkpoint: extra; strict=False",
        "shape": rf"'{norm}' has shape \(3,\) in the checkpoint and \(16,\) in the model",
        f"of rank {rank}": "rank 1 finds other weights in .*of rank 1 than rank 0 in .*of rank 0; give",
        "eighths": f"'{norm}' is of torch.float8_e4m3fn",
    }
    for name, text in wrong.items():
        with pytest.raises(CheckpointError, match=text):
            engine.load_weights(at / name)
        assert_same_bits(_state(engine), before)
    with pytest.raises(CheckpointError, match="None names no folder"):
        engine.load_weights(at / "both" if rank else None)
    for name in ("more", "less"):
        engine.load_weights(at / name, strict=False)
        assert torch.equal(_state(engine)[norm], weights[norm])  # kept, in the second
    for name in ("both", "head alone"):
        engine.load_weights(at / name)
        assert_same_bits(_state(engine), weights)
    engine.save_checkpoint(at / "checkpoints", tag="ours")
    torch.save(weights, at / "pytorch_model.bin") if rank == 0 else None
    dist.barrier()
    for name in ("checkpoints", "checkpoints/ours", "."):
        with torch.device("meta"):
            model = make("Llama")
        filled, *_ = dslaunch.initialize(model=model, config=make_config(stage=2))
        with pytest.raises(CheckpointError, match=rf"does not have .*{norm}.* which have no values"):
            filled.load_weights(at / "less", strict=False)
        filled.load_weights(at / name)
        assert_same_bits(_state(filled), weights)
        filled.destroy()


def test_what_does_not_fit_is_named_on_all_ranks_and_nothing_changes(ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    ranks(_misfits, str(tmp_path), world_size=2)


def _adapted(rank: int, folder: str) -> None:
    peft = pytest.importorskip("peft")
    saved = make("Llama", tie_word_embeddings=False)
    if rank == 0:
        saved.save_pretrained(folder)
    dist.barrier()
    torch.manual_seed(1)
    for more in ({}, {"modules_to_save": ["lm_head"]}):
        lora = peft.LoraConfig(r=2, init_lora_weights=False, task_type="CAUSAL_LM", **more)
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            model = peft.get_peft_model(type(saved)(saved.config), lora)
        engine, *_ = dslaunch.initialize(model=model, config=make_config(stage=3))
        before = _state(engine)
        if more:
            with pytest.raises(CheckpointError, match=r"'.*lm_head' is one of PEFT's modules_to_save"):
                engine.load_weights(folder)
            return
        engine.load_weights(folder)
        found = {name: value.clone() for name, value in engine.weights(names="hf")}
        assert_same_bits({name: found[name] for name in saved.state_dict()}, saved.state_dict())
        adapters = {name: value for name, value in before.items() if ".lora_" in name}
        assert adapters
        assert_same_bits({name: _state(engine)[name] for name in adapters}, adapters)


def test_adapters_keep_their_values_over_the_base_model_of_the_files(ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    ranks(_adapted, str(tmp_path), world_size=2)


class _Experts(nn.Module):
    """A layer, and experts that are on different ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.moe = dslaunch.moe.MoE(4, nn.Linear(4, 4), num_experts=4, ep_size=2, k=1)


def _stages() -> nn.Module:
    layers = [dslaunch.LayerSpec(nn.Linear, 5, 5) for _ in range(4)]
    return dslaunch.PipelineModule(layers=layers, num_stages=2, loss_fn=nn.MSELoss())


def _own_models(rank: int, folder: str) -> None:
    for make_own, stage in ((_stages, 1), (_Experts, 3)):
        path = f"{folder}/{stage}"
        config = make_config(stage=stage, train_micro_batch_size_per_gpu=6, train_batch_size=None)
        config = {key: value for key, value in config.items() if value is not None}
        torch.manual_seed(0)
        expected, *_ = dslaunch.initialize(model=make_own(), config=config)
        expected.save_16bit_model(path, "model.safetensors")
        torch.manual_seed(1)
        for device in ("cpu", "meta"):
            with torch.device(device):
                model = make_own()
            engine, *_ = dslaunch.initialize(model=model, config=config)
            engine.load_weights(path)
            assert_same_bits(_state(engine), _state(expected))
            engine.destroy()
        expected.destroy()


def test_stages_and_experts_of_ones_own_find_their_names(ranks: Ranks, tmp_path: Path) -> None:
    ranks(_own_models, str(tmp_path), world_size=2)
