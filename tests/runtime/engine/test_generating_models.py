"""Tokens of engine.generate() are those of transformers with one process, for models of several kinds."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import dslaunch
from dslaunch.runtime.errors import ConfigError
from tests.runtime.answering_models import CONFIGS, check_tokens, make_inputs, make_model
from tests.runtime.models import make_config
from tests.runtime.ranks import Ranks

transformers = pytest.importorskip("transformers")

STATIC = {"static": {"do_sample": False, "cache_implementation": "static"}}


def _check_tokens(engine: dslaunch.Engine, name: str, rank: int, plain: Any) -> None:
    check_tokens(engine, plain, name, rank, **{} if name in ("T5", "Whisper") else STATIC)


def _engine(name: str, zero: dict[str, Any]) -> dslaunch.Engine:
    config = make_config(stage=3, reduce_bucket_size=50)
    config["zero_optimization"] |= zero
    return dslaunch.initialize(model=make_model(name), config=config)[0]


def _same_tokens(rank: int, names: tuple[str, ...], weights: str | None, zero: dict[str, Any]) -> None:
    for name in names:
        engine = _engine(name, zero)
        with engine.generating(weights=weights):
            _check_tokens(engine, name, rank, make_model(name).eval())
        engine.destroy()


def _same_tokens_after_steps(rank: int, zero: dict[str, Any], folder: str) -> None:
    """Of what was trained, and in a new engine of what was saved."""
    for is_resumed in (False, True):
        engine = _engine("Llama", zero)
        if is_resumed:
            engine.load_checkpoint(folder)
        tokens = make_inputs("Llama", rank)["input_ids"]
        for _ in range(2):
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
        if not is_resumed:
            engine.save_checkpoint(folder)
        plain = make_model("Llama").eval()
        with dslaunch.zero.GatheredParameters(engine.parameters()):
            plain.load_state_dict(engine.module.state_dict())
        _check_tokens(engine, "Llama", rank, plain)
        engine.destroy()


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_tokens_are_those_of_what_was_trained_and_resumed(ranks: Ranks, stage: int, tmp_path: Path) -> None:
    ranks(_same_tokens_after_steps, {"stage": stage}, str(tmp_path), world_size=2)


@pytest.mark.parametrize("weights", [None, "units"])
def test_tokens_are_those_of_one_process(ranks: Ranks, weights: str | None) -> None:
    ranks(_same_tokens, ("Llama", "T5"), weights, {}, world_size=2)


def _counts_forwards(rank: int, weights: str) -> None:
    engine = dslaunch.initialize(
        model=make_model("Llama"), config=make_config(stage=3, reduce_bucket_size=50)
    )[0]
    num_forwards: list[int] = []
    engine.module.register_forward_hook(lambda *_: num_forwards.append(1))
    own, long = 3 + 4 * rank, 7
    with pytest.MonkeyPatch.context() as patch:  # as a Trainer that is told of ZeRO-3 has it
        patch.setattr(transformers.generation.utils, "is_deepspeed_zero3_enabled", lambda: True)
        for generate, wanted in ((engine.generate, own), (engine.module.generate, long)):
            with engine.generating(weights=weights):
                generate(
                    **make_inputs("Llama", rank), max_new_tokens=own, min_new_tokens=own, do_sample=False
                )
            assert len(num_forwards) >= wanted  # what comes after the last token may cost one more
            assert len(num_forwards) <= wanted + 1
            num_forwards.clear()


@pytest.mark.parametrize("weights", ["whole", "units"])
def test_a_rank_that_has_ended_computes_no_more(ranks: Ranks, weights: str) -> None:
    """The module's own generate() of transformers lets it, where it was told of ZeRO-3."""
    ranks(_counts_forwards, weights, world_size=2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("weights", ["whole", "units"])
@pytest.mark.parametrize(
    ("stage", "offload"),
    [(0, "none"), *((stage, offload) for stage in (1, 2, 3) for offload in ("none", "cpu", "nvme"))],
)
def test_tokens_of_all_models(ranks: Ranks, weights: str, stage: int, offload: str, tmp_path: Path) -> None:
    section = {"device": offload, **({"nvme_path": str(tmp_path)} if offload == "nvme" else {})}
    zero: dict[str, Any] = {"stage": stage}
    if offload != "none":
        zero["offload_optimizer"] = section
        if stage == 3:
            zero["offload_param"] = section
    ranks(_same_tokens, tuple(CONFIGS), weights, zero, world_size=2)


def _with_divided_layers(rank: int, weights: str) -> None:
    """Pairs of ranks are given the same prompts, and each pair others."""
    for name in ("Llama", "Qwen3"):
        plain = make_model(name)
        config = make_config(stage=3, reduce_bucket_size=50, tensor_parallel={"autotp_size": 2})
        engine = dslaunch.initialize(model=copy.deepcopy(plain), config=config)[0]
        plain.eval()
        pair = engine.get_data_parallel_rank()
        length = {"max_new_tokens": 3 + 4 * pair, "do_sample": False}
        with engine.generating(weights=weights):
            for _ in range(2):
                made = engine.generate(**make_inputs(name, pair), **length)
                assert torch.equal(made, plain.generate(**make_inputs(name, pair), **length))
        with pytest.raises(ConfigError, match=r"different inputs: .*max_new_tokens.* is number 3 on rank"):
            engine.generate(**make_inputs(name, pair), max_new_tokens=3 + rank % 2)
        engine.destroy()


@pytest.mark.exhaustive
@pytest.mark.parametrize("weights", ["whole", "units"])
def test_pairs_of_ranks_that_divide_layers_generate_as_much_as_they_like(ranks: Ranks, weights: str) -> None:
    ranks(_with_divided_layers, weights, world_size=4)


def _with_adapters(rank: int, weights: str) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    with warnings.catch_warnings():  # peft asks transformers by an old name
        warnings.simplefilter("ignore", FutureWarning)
        plain = peft.get_peft_model(make_model("Llama"), adapters)
    config = make_config(stage=3, reduce_bucket_size=50)
    engine = dslaunch.initialize(model=copy.deepcopy(plain), config=config)[0]
    plain.eval()
    length = {"max_new_tokens": 3 + 4 * rank, "do_sample": False}
    with engine.generating(weights=weights):
        made = engine.generate(**make_inputs("Llama", rank), **length)
    assert torch.equal(made, plain.generate(**make_inputs("Llama", rank), **length))


@pytest.mark.exhaustive
@pytest.mark.parametrize("weights", ["whole", "units"])
def test_a_model_with_adapters_generates(ranks: Ranks, weights: str) -> None:
    ranks(_with_adapters, weights, world_size=2)
