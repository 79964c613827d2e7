"""What a program of transformers may do where its sequences are divided, and which models cannot be."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dslaunch
from dslaunch.runtime.errors import ConfigError
from dslaunch.runtime.log import logger
from dslaunch.runtime.sequence.hugging_face import UlyssesSPAttentionHF
from dslaunch.runtime.sequence.loss import mean_over_tokens
from tests.runtime.ranks import Ranks
from tests.runtime.tensor.models import make_config, make_hugging_face

pytest.importorskip("transformers")

SAMPLES, LENGTH, VOCAB = 2, 8, 96
DEADLINE_S = 60.0


def _tokens() -> Tensor:
    return torch.randint(0, VOCAB, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(3))


def _positions() -> Tensor:
    return torch.arange(LENGTH).expand(SAMPLES, LENGTH)


def _start(model: Any, stage: int = 0) -> tuple[dslaunch.Engine, int]:
    """Return the engine, over 2 ranks, and which part of a sequence is this rank's."""
    mpu = UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", 2)
    config = make_config(stage, train_batch_size=4, gradient_accumulation_steps=1)
    engine, *_ = dslaunch.initialize(model=model, mpu=mpu, config=config)
    return engine, mpu.get_sequence_parallel_rank()


def _stop(engine: dslaunch.Engine | None = None) -> None:
    if engine is not None:
        engine.destroy()
    UlyssesSPAttentionHF.unregister_from_transformers()


def _train(engine: Any, tokens: Tensor, positions: Tensor) -> None:
    logits = engine(input_ids=tokens, position_ids=positions, use_cache=False).logits
    engine.backward(mean_over_tokens(logits, tokens))
    engine.step()


def _masks(rank: int, is_direct: bool) -> list[float]:
    """The first rank gives the same positions to each forward, the other one new ones; past the engine both
    give the same.
    """
    model = make_hugging_face("Llama").eval()
    masks = [torch.ones(SAMPLES, LENGTH, dtype=torch.long) for _ in range(2)]
    masks[1][0, :3] = 0
    given = {"input_ids": _tokens(), "position_ids": _positions(), "use_cache": False}
    with torch.no_grad():
        expected = [model(attention_mask=mask, **given).logits.chunk(2, dim=1)[rank] for mask in masks]
        engine, part = _start(model)
        engine.eval()
        found = []
        kept = _positions().chunk(2, dim=1)[part]
        for mask, logits in zip(masks, expected, strict=True):
            own = mask.chunk(2, dim=1)[part]
            run = engine.module if is_direct else engine
            got = run(
                input_ids=_tokens().chunk(2, dim=1)[part],
                attention_mask=own,
                position_ids=kept if rank == 0 or is_direct else kept.clone(),
                use_cache=False,
            ).logits
            found.append(float((got - logits)[own.bool()].abs().max()))
        _stop(engine)
    return found


def _masks_both_ways(rank: int) -> list[float]:
    return [*_masks(rank, False), *_masks(rank, True)]


def test_the_same_positions_may_come_with_another_mask(ranks: Ranks) -> None:
    for differences in ranks(_masks_both_ways, world_size=2, deadline_s=DEADLINE_S):
        assert max(differences) < 1e-5


def _norm(rank: int, num_forwards: int) -> float:
    """Of the gradient of a first forward, if others with the same positions come before its backward."""
    model = make_hugging_face("Llama")
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")  # the second of older ones
    next(getattr(model, name) for name in names if hasattr(model, name))()
    engine, part = _start(model)
    tokens, positions = (one.chunk(2, dim=1)[part] for one in (_tokens(), _positions()))
    masks = [torch.ones(SAMPLES, LENGTH, dtype=torch.long) for _ in range(num_forwards)]
    masks[0][:, 1:4] = 0
    given = {"input_ids": tokens, "position_ids": positions, "use_cache": False}
    outputs = [engine(attention_mask=mask.chunk(2, dim=1)[part], **given) for mask in masks]
    engine.backward(mean_over_tokens(outputs[0].logits, tokens))
    found = sum(float(param.grad.pow(2).sum()) for param in model.parameters() if param.grad is not None)
    _stop(engine)
    return found


def test_a_checkpointed_layer_computes_again_with_its_own_mask(ranks: Ranks) -> None:
    alone, interrupted = (ranks(_norm, number, world_size=2, deadline_s=DEADLINE_S) for number in (1, 2))
    assert min(alone) > 0
    assert interrupted == pytest.approx(alone, rel=1e-5)


def _lengths(rank: int) -> None:
    engine, part = _start(make_hugging_face("Llama"), stage=3)
    for length in (LENGTH, 4):
        own = LENGTH if rank < 2 else length
        tokens, positions = (one[:, :own].chunk(2, dim=1)[part] for one in (_tokens(), _positions()))
        _train(engine, tokens, positions)
    _stop(engine)


def test_ranks_with_other_samples_may_have_longer_sequences(ranks: Ranks) -> None:
    ranks(_lengths, world_size=4, deadline_s=DEADLINE_S)


def _unequal(rank: int) -> str:
    """In the third forward, in which the engine does not compare what models are given."""
    engine, part = _start(make_hugging_face("Llama"))
    tokens, positions = (one.chunk(2, dim=1)[part] for one in (_tokens(), _positions()))
    for _ in range(2):
        _train(engine, tokens, positions)
    with pytest.raises(ConfigError) as caught:
        _train(engine, tokens[:, rank:], positions[:, rank:])
    _stop()
    return str(caught.value)


def test_parts_of_other_lengths_are_named_in_every_forward(ranks: Ranks) -> None:
    said = "parts 0 and 1 of a sequence are [batch, positions] = [2, 4] and [2, 3]; give all 2 ranks"
    assert all(one.startswith(said) for one in ranks(_unequal, world_size=2, deadline_s=DEADLINE_S))


def _labels(rank: int) -> list[str]:
    """A model's own loss shifts labels in each part; with shift_labels it does not."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    engine, part = _start(make_hugging_face("Llama"))
    own = _tokens().chunk(2, dim=1)[part]
    given = {"input_ids": own, "position_ids": _positions().chunk(2, dim=1)[part], "use_cache": False}
    shifted = F.pad(_tokens(), (0, 1), value=-100)[:, 1:].chunk(2, dim=1)[part].contiguous()
    logger.addHandler(handler)
    try:
        engine(labels=shifted, shift_labels=shifted, **given)
        assert not said
        for _ in range(2):
            engine(labels=own, **given)
    finally:
        logger.removeHandler(handler)
        _stop(engine)
    return said


def test_labels_that_a_part_would_shift_are_warned_of_once(ranks: Ranks) -> None:
    for said in ranks(_labels, world_size=2, deadline_s=DEADLINE_S):
        (one,) = said
        assert "the last token of each part has no label in its loss" in one


def _counted_apart(rank: int) -> list[str]:
    """Positions that begin at 0 in each part, twice; then those of the whole."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        for is_apart in (True, False):
            engine, part = _start(make_hugging_face("Llama"))
            half = LENGTH // 2
            positions = _positions()[:, :half] if is_apart else _positions().chunk(2, dim=1)[part]
            for _ in range(2):
                _train(engine, _tokens().chunk(2, dim=1)[part], positions)
            _stop(engine)
    finally:
        logger.removeHandler(handler)
    return said


def test_positions_that_begin_anew_in_each_part_are_warned_of_once(ranks: Ranks) -> None:
    (one,), others = ranks(_counted_apart, world_size=2, deadline_s=DEADLINE_S)
    assert "begin at 0 in each of the 2 parts of a sequence" in one
    assert others == []


def _undivided(rank: int) -> list[str]:
    """A model that nobody has divided, in some forwards."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(VOCAB, 4), nn.TransformerEncoderLayer(4, 2, 4, batch_first=True))
    config = make_config(0, train_batch_size=4, gradient_accumulation_steps=1)
    engine: Any
    engine, *_ = dslaunch.initialize(model=module, config=config, mesh_param=(1, 2))
    logger.addHandler(handler)
    try:
        for _ in range(3):
            engine(_tokens())
    finally:
        logger.removeHandler(handler)
        _stop(engine)
    return said


def test_a_model_whose_sequences_are_not_divided_is_warned_of_once(ranks: Ranks) -> None:
    said, others = ranks(_undivided, world_size=2, deadline_s=DEADLINE_S)
    (one,) = said
    assert "sequence_parallel_size is 2, and Sequential has sent nothing between the ranks that share" in one
    assert others == []


SMALL = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SMALL |= {"num_key_value_heads": 2}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "Falcon": ({}, "FalconForCausalLM has computed without the attention 'sdpa' that is registered"),
    "Lfm2": ({"layer_types": ["conv"], "intermediate_size": 16}, "has layers of the type conv, which a rank"),
    "Bart": ({"d_model": 16, "decoder_layers": 1}, "BartForCausalLM takes no position_ids, and counts"),
    "Llama": ({"intermediate_size": 16}, "the model is given no position_ids, and would count the places"),
}


def _run(model: Any, tokens: Tensor, positions: Tensor | None) -> None:
    engine, _ = _start(model)
    if positions is None:
        engine(tokens)
    else:
        engine(input_ids=tokens, position_ids=positions, use_cache=False)


def _refused(rank: int) -> list[str]:
    import transformers

    said = []
    for kind, (changes, _) in REFUSED.items():
        config = getattr(transformers, f"{kind}Config")(**SMALL, **changes, attn_implementation="sdpa")
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
        own = _tokens().chunk(2, dim=1)[rank]
        with pytest.raises(ConfigError) as caught:
            _run(model, own, None if kind == "Llama" else _positions().chunk(2, dim=1)[rank])
        said.append(str(caught.value))
        _stop()
    return said


def test_models_that_would_not_see_the_whole_sequence_are_refused(ranks: Ranks) -> None:
    for said in ranks(_refused, world_size=2, deadline_s=DEADLINE_S):
        for one, (_, words) in zip(said, REFUSED.values(), strict=True):
            assert words in one


def _compiled(rank: int) -> bool:
    model = make_hugging_face("Llama")
    engine, part = _start(torch.compile(model, backend="eager"), stage=1)
    tokens, positions = (one.chunk(2, dim=1)[part] for one in (_tokens(), _positions()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's compiler looks at gradients of tensors that are no leaves
        for length in (4, 2, 3):
            _train(engine, tokens[:, :length], positions[:, :length])
    _stop(engine)
    return all(bool(param.isfinite().all()) for param in model.parameters())


@pytest.mark.exhaustive
@pytest.mark.slow
def test_layers_around_the_attention_are_compiled_with_changing_lengths(ranks: Ranks) -> None:
    assert all(ranks(_compiled, world_size=2))
