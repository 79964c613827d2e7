"""Sequences that are divided over ranks train as one process trains the whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import dslaunch
from dslaunch.runtime.compat import groups
from dslaunch.runtime.errors import ConfigError
from dslaunch.runtime.sequence.attention import DistributedAttention
from dslaunch.runtime.sequence.hugging_face import UlyssesSPAttentionHF
from dslaunch.runtime.sequence.loader import UlyssesSPDataLoaderAdapter
from dslaunch.runtime.sequence.loss import mean_over_tokens, vocab_sequence_parallel_cross_entropy
from dslaunch.runtime.sequence.tiled import TiledFusedLogitsLoss, TiledMLP, sequence_tiled_compute
from tests.runtime.ranks import Ranks
from tests.runtime.tensor.models import CLIP, Numbers, check, make_config, make_hugging_face

pytest.importorskip("transformers")

LENGTH, SAMPLES, STEPS, VOCAB = 16, 4, 2, 96
ONCE = {"gradient_accumulation_steps": 1}


def _tokens(step: int) -> Tensor:
    return torch.randint(0, VOCAB, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(3 + step))


def _labels(tokens: Tensor) -> Tensor:
    """Shifted, and more of them masked at the front, so that the parts of a sequence have other numbers."""
    labels = F.pad(tokens, (0, 1), value=-100)[:, 1:].clone()
    labels[:, : LENGTH // 2] = -100
    labels[:, 3] = tokens[:, 4]
    return labels


def _positions(is_packed: bool) -> Tensor:
    """Documents of 6 and 10 tokens, where there are two."""
    one = torch.cat((torch.arange(6), torch.arange(LENGTH - 6))) if is_packed else torch.arange(LENGTH)
    return one.repeat(SAMPLES, 1)


def _loss(model: Any, tokens: Tensor, labels: Tensor, positions: Tensor, *, is_divided: bool) -> Tensor:
    logits = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
    if is_divided:
        return mean_over_tokens(logits, labels)
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100)


def _train_plain(model: nn.Module, num_data: int, *, is_packed: bool = False) -> Numbers:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = torch.zeros(())
        for part in _tokens(step).chunk(num_data):
            positions = _positions(is_packed)[: len(part)]
            total = total + _loss(model, part, _labels(part), positions, is_divided=False) / num_data
        total.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        found.append((total.item(), float(norm)))
    return found


def _train(engine: dslaunch.Engine, *, is_packed: bool = False) -> Numbers:
    found = []
    num_data, size = engine.dp_world_size, engine.sequence_parallel_size
    place = groups.sequence_parallel_rank()
    for step in range(STEPS):
        own = _tokens(step).chunk(num_data)[engine.get_data_parallel_rank()]
        cut = [
            one.chunk(size, dim=1)[place].to(engine.device)
            for one in (own, _labels(own), _positions(is_packed)[: len(own)])
        ]
        loss = _loss(engine, *cut, is_divided=True)
        engine.backward(loss)
        engine.step()
        total = loss.detach().double()
        dist.all_reduce(total)
        found.append((total.item() / engine.world_size, float(engine.get_global_grad_norm() or 0.0)))
    return found


@contextmanager
def _registered(model: Any, size: int, **options: Any) -> Iterator[Any]:
    try:
        yield UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", size, SAMPLES, **options)
    finally:
        UlyssesSPAttentionHF.unregister_from_transformers()


def _config(stage: int, **changes: Any) -> dict[str, Any]:
    return make_config(stage, **{"train_batch_size": SAMPLES, **ONCE, **changes})


def _trained(
    rank: int, stage: int, size: int, kind: str, is_packed: bool, changes: dict[str, Any]
) -> tuple[Numbers, Numbers]:
    num_data = dist.get_world_size() // size
    plain = make_hugging_face(kind)
    expected = _train_plain(plain, num_data, is_packed=is_packed)
    model = make_hugging_face(kind, seed=rank)
    with _registered(model, size) as mpu:
        engine, *_ = dslaunch.initialize(model=model, mpu=mpu, config=_config(stage, **changes))
        assert (engine.dp_world_size, engine.sequence_parallel_size) == (num_data, size)
        assert engine.train_batch_size() == SAMPLES
        got = _train(engine, is_packed=is_packed)
        engine.destroy()
    return got, expected


SUM = {"sequence": {"gradient": "sum"}}  # which the loss knows of


def test_loss_and_norm_are_those_of_one_process(ranks: Ranks) -> None:
    """At other stages, on other axes and settings: training/test_parity.py."""
    for size, stage, is_packed, changes in (
        (4, 0, False, {}),  # two heads of keys for four ranks
        (2, 3, True, SUM),
    ):
        for got, expected in ranks(_trained, stage, size, "Llama", is_packed, changes, world_size=4):
            check(got, expected)


def test_on_the_fake_cuda_device_they_are_the_same(cuda_ranks: Ranks) -> None:
    for got, expected in cuda_ranks(_trained, 3, 2, "Llama", True, {}, world_size=2):
        check(got, expected)


def _with_layers_divided(rank: int, is_arranged: bool) -> tuple[Numbers, Numbers]:
    plain = make_hugging_face("Llama", num_attention_heads=8, hidden_size=64)
    expected = _train_plain(plain, 1)
    model = make_hugging_face("Llama", seed=rank, num_attention_heads=8, hidden_size=64)
    config = _config(1, tensor_parallel={"autotp_size": 2})
    with _registered(model, 2, tensor_parallel_size=2 if is_arranged else 1) as mpu:
        if not is_arranged:
            with pytest.raises(ConfigError, match="neighbours once layers are divided over 2 ranks"):
                dslaunch.initialize(model=model, mpu=mpu, config=config)
            return expected, expected
        engine, *_ = dslaunch.initialize(model=model, mpu=mpu, config=config)
        assert (engine.dp_world_size, engine.sequence_parallel_size, engine.mp_world_size) == (1, 2, 2)
        got = _train(engine)
        engine.destroy()
    return got, expected


@pytest.mark.parametrize("is_arranged", [True, False])
def test_layers_may_be_divided_too(ranks: Ranks, is_arranged: bool) -> None:
    for got, expected in ranks(_with_layers_divided, is_arranged, world_size=4):
        check(got, expected)


# ---- bytes, evaluation, checkpoints


def _sent(rank: int) -> tuple[int, int]:
    model = make_hugging_face("Llama")
    with _registered(model, 4) as mpu:
        engine, *_ = dslaunch.initialize(model=model, mpu=mpu, config=_config(1))
        _train(engine)
        sent = engine._wire.meter.bytes_by_kind()["all_to_all"]
        engine.destroy()
    held, heads, kv_heads, head_dim, blocks = SAMPLES * LENGTH // 4, 4, 4, 8, 2
    one_block = 2 * 3 * held * 4 * (2 * heads + 2 * kv_heads) * head_dim // 4
    return sent, STEPS * blocks * one_block


def test_bytes_on_the_wire_are_those_of_the_formula(ranks: Ranks) -> None:
    for sent, formula in ranks(_sent, world_size=4):
        assert sent == formula


def _masked_and_evaluated(rank: int, window: int | None) -> float:
    """Padding on the left of one sample, which only the first rank sees."""
    kind, changes = ("Mistral", {"sliding_window": window}) if window else ("Llama", {})
    model = make_hugging_face(kind, **changes)
    mask = torch.ones(SAMPLES, LENGTH, dtype=torch.long)
    mask[1, :3] = 0
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    tokens, config = _tokens(0), _config(0)
    model.eval()
    with torch.no_grad():
        expected = model(
            input_ids=tokens, attention_mask=mask, position_ids=positions, use_cache=False
        ).logits
        with _registered(model, 2) as mpu:
            engine, *_ = dslaunch.initialize(model=model, mpu=mpu, config=config)
            engine.eval()
            cut = [one.chunk(2, dim=1)[rank] for one in (tokens, mask, positions, expected, mask)]
            got = engine(input_ids=cut[0], attention_mask=cut[1], position_ids=cut[2], use_cache=False).logits
            engine.destroy()
    return float((got - cut[3])[cut[4].bool()].abs().max())


@pytest.mark.parametrize("window", [None, 5])
def test_padding_and_windows_count_over_the_whole_sequence(ranks: Ranks, window: int | None) -> None:
    for difference in ranks(_masked_and_evaluated, window, world_size=2):
        assert difference < 1e-5


def _not_in_evaluation(rank: int) -> tuple[float, bool]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model, before = make_hugging_face("Llama"), ALL_ATTENTION_FUNCTIONS["sdpa"]
    with torch.no_grad(), _registered(model, 2, disable_in_eval=True) as mpu:
        expected = model.eval()(input_ids=_tokens(0)).logits
        engine, *_ = dslaunch.initialize(model=model, mpu=mpu, config=_config(3))
        engine.eval()
        got = engine(input_ids=_tokens(0)).logits
        engine.destroy()
    return float((got - expected).abs().max()), ALL_ATTENTION_FUNCTIONS["sdpa"] is before


def test_evaluation_takes_whole_sequences_if_asked_to_and_there_is_a_way_back(ranks: Ranks) -> None:
    for difference, is_back in ranks(_not_in_evaluation, world_size=2):
        assert difference < 1e-6
        assert is_back


def _saved_and_loaded(rank: int, folder: str) -> tuple[float, float]:
    model = make_hugging_face("Llama")
    with _registered(model, 2) as mpu:
        engine, *_ = dslaunch.initialize(model=model, mpu=mpu, config=_config(3))
        _train(engine)
        engine.save_checkpoint(folder)
        expected = {name: one.clone() for name, one in (engine.state_dict() or {}).items()}
        engine.destroy()
    other = make_hugging_face("Llama", seed=5)
    engine, *_ = dslaunch.initialize(model=other, config=_config(1))
    engine.load_checkpoint(folder)
    got = engine.state_dict() or {}
    worst = max((float((got[name] - one).abs().max()) for name, one in expected.items()), default=0.0)
    engine.destroy()
    return worst, float(len(expected))


def test_a_checkpoint_loads_where_no_sequence_is_divided(ranks: Ranks, tmp_path: Path) -> None:
    results = ranks(_saved_and_loaded, str(tmp_path), world_size=2)
    assert max(count for _, count in results) > 10
    assert all(worst == 0.0 for worst, _ in results)


# ---- attention, loader, losses and tiles by themselves


def _attention(rank: int, batch_dim: int, num_heads: int, num_kv_heads: int) -> float:
    """The gradient of a whole attention, also for heads that the ranks cannot have as many of."""
    torch.manual_seed(0)
    shape = (3, 8) if batch_dim == 0 else (8, 3)
    whole = [torch.randn(*shape, heads, 4) for heads in (num_heads, num_kv_heads, num_kv_heads)]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        axes = (0, 2, 1, 3) if batch_dim == 0 else (1, 2, 0, 3)
        back = (0, 2, 1, 3) if batch_dim == 0 else (2, 0, 1, 3)
        made = F.scaled_dot_product_attention(
            *(one.permute(axes) for one in (q, k, v)), is_causal=True, enable_gqa=True
        )
        return made.permute(back)

    leaves = [one.clone().requires_grad_() for one in whole]
    expected = attend(*leaves)
    expected.pow(2).sum().backward()
    world, cut = dist.get_world_size(), 1 - batch_dim
    parts = [one.chunk(world, dim=cut)[rank].clone().requires_grad_() for one in whole]
    got = DistributedAttention(attend, dist.group.WORLD)(*parts, batch_dim)
    got.pow(2).sum().backward()
    pairs = [(got, expected.chunk(world, dim=cut)[rank])]
    for part, leaf in zip(parts, leaves, strict=True):
        assert part.grad is not None
        assert leaf.grad is not None
        pairs.append((part.grad, leaf.grad.chunk(world, dim=cut)[rank]))
    return max(float((one - other).detach().abs().max()) for one, other in pairs)


@pytest.mark.parametrize(
    ("batch_dim", "num_heads", "num_kv_heads"), [(0, 4, 4), (1, 8, 2), (0, 6, 3), (1, 4, 1)]
)
def test_attention_over_ranks_has_the_values_and_gradients_of_the_whole(
    ranks: Ranks, batch_dim: int, num_heads: int, num_kv_heads: int
) -> None:
    for difference in ranks(_attention, batch_dim, num_heads, num_kv_heads, world_size=2):
        assert difference < 1e-5


def _batches(rank: int) -> list[list[list[int]]]:
    """Rank r brings sequences of 100 r + their place; the second rank's are longer."""
    length = 8 + 4 * rank
    own = torch.arange(length).repeat(2, 1) + 100 * rank
    batch = {"input_ids": own, "labels": own, "position_ids": torch.arange(length).repeat(2, 1), "name": rank}
    loader = UlyssesSPDataLoaderAdapter([batch], rank, dist.group.WORLD, 2, "cpu")
    assert len(loader) == 2
    found = []
    for _ in range(2):  # epochs
        found = [
            [one["input_ids"][1].tolist(), one["shift_labels"][1].tolist(), [one["name"]]] for one in loader
        ]
    return found


def test_ranks_get_their_parts_of_one_batch_after_the_other(ranks: Ranks) -> None:
    first, second = ranks(_batches, world_size=2)
    assert first == [[[0, 1, 2, 3], [1, 2, 3, 4], [0]], [[*range(100, 106)], [*range(101, 107)], [1]]]
    assert second == [
        [[4, 5, 6, 7], [5, 6, 7, -100], [0]],
        [[*range(106, 112)], [*range(107, 112), -100], [1]],
    ]


def _bad_batches(rank: int) -> list[str]:
    """Only the second rank's are wrong, and both are told."""
    good = {"input_ids": torch.zeros(1, 8), "position_ids": torch.zeros(1, 8)}
    changed = [
        {"input_ids": torch.zeros(1, 7), "position_ids": torch.zeros(1, 7)},
        {"input_ids": torch.zeros(1, 8)},
        {**good, "mask": torch.zeros(1, 1, 8, 8)},
    ]
    texts = []
    for bad in changed:
        loader = UlyssesSPDataLoaderAdapter([bad if rank else good], rank, dist.group.WORLD, 2, "cpu")
        with pytest.raises(ConfigError) as caught:
            next(loader)
        texts.append(str(caught.value))
    return texts


def test_batches_that_cannot_be_divided_are_named_on_all_ranks(ranks: Ranks) -> None:
    for texts in ranks(_bad_batches, world_size=2):
        for text, words in zip(
            texts, ("pad them to 8", "position_ids is missing", "mask of shape"), strict=True
        ):
            assert "rank 1: " in text
            assert words in text


def _losses(rank: int) -> tuple[float, float]:
    logits = torch.randn(8, 2, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    target = torch.randint(0, 5, (8, 2), generator=torch.Generator().manual_seed(1))
    target[:3] = -100
    expected = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-100, reduction="none")
    expected.sum().backward()
    part = logits.detach().chunk(2)[rank].clone().requires_grad_()
    got = vocab_sequence_parallel_cross_entropy(part, target.chunk(2)[rank], dist.group.WORLD)
    got.sum().backward()
    assert part.grad is not None
    assert logits.grad is not None
    return (
        float((got.flatten() - expected).detach().abs().max()),
        float((part.grad - logits.grad.chunk(2)[rank]).abs().max()),
    )


def test_losses_of_all_parts_give_each_rank_its_own_gradient(ranks: Ranks) -> None:
    for value, gradient in ranks(_losses, world_size=2):
        assert value < 1e-6
        assert gradient < 1e-6


class _Tiled(nn.Module):
    """A layer, in tiles or not, and a head with its loss."""

    def __init__(self, *, is_tiled: bool) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(6, 24), nn.Linear(24, 6), nn.Linear(6, 5)
        self.is_tiled = is_tiled

    def _mlp(self, x: Tensor) -> Tensor:
        made: Tensor = self.down(torch.tanh(self.up(x)))
        return made

    def _loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x), y, reduction="sum")

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if not self.is_tiled:
            return self._loss(self._mlp(self._mlp(x)).flatten(0, 1), y.flatten()) / y.numel()
        x = TiledMLP.apply(_Tiled._mlp, self, x, 3)
        x = sequence_tiled_compute(self._mlp, x.shape[1], 2, {"x": x}, {}, "x", output_reduction=None)
        return TiledFusedLogitsLoss.apply(_Tiled._loss, self, x, y, None, 4, None, "sum") / y.numel()


def _tiled(rank: int, stage: int) -> tuple[Numbers, Numbers]:
    found: list[Numbers] = []
    for is_tiled in (False, True):
        torch.manual_seed(0)
        engine, *_ = dslaunch.initialize(model=_Tiled(is_tiled=is_tiled), config=_config(stage))
        numbers: Numbers = []
        for step in range(STEPS):
            seed = torch.Generator().manual_seed(10 * step + rank)
            loss = engine(torch.randn(2, 7, 6, generator=seed), torch.randint(0, 5, (2, 7), generator=seed))
            engine.backward(loss)
            engine.step()
            numbers.append((loss.item(), float(engine.get_global_grad_norm() or 0.0)))
        engine.destroy()
        found.append(numbers)
    return found[1], found[0]


def test_tiles_train_as_the_whole_does(ranks: Ranks) -> None:
    for got, expected in ranks(_tiled, 3, world_size=2):
        check(got, expected)


# ---- what is refused


def _refused(rank: int, case: str) -> str:
    model = make_hugging_face("Llama")
    changes: dict[str, Any] = {}
    arguments: dict[str, Any] = {}
    if case == "size":
        changes = {"sequence_parallel_size": 3}
    elif case == "data":
        changes = {"sequence_parallel_size": 2, "data_parallel_size": 2}
    elif case == "mesh":
        arguments = {"mesh_param": (2, 2)}
    elif case == "both":
        changes, arguments = {"sequence_parallel_size": 2}, {"mesh_param": (1, 1), "mpu": object()}
    with pytest.raises(ConfigError) as caught:  # noqa: PT012  (any of them)
        if case == "heads":
            odd = make_hugging_face("Llama", num_attention_heads=3, num_key_value_heads=3, hidden_size=24)
            UlyssesSPAttentionHF.register_with_transformers(odd, "sdpa", 2)
        elif case == "eager":
            UlyssesSPAttentionHF.register_with_transformers("nowhere", "eager", 2)
        elif case == "positions":
            with _registered(model, 2) as mpu:
                engine, *_ = dslaunch.initialize(model=model, mpu=mpu, config=_config(0))
                engine(input_ids=_tokens(0)[:, :8])
        elif case == "shapes":
            with _registered(model, 2) as mpu:
                engine, *_ = dslaunch.initialize(model=model, mpu=mpu, config=_config(0))
                cut = slice(0, 8 - 2 * rank)
                engine(input_ids=_tokens(0)[:, cut], position_ids=_positions(False)[:, cut])
        elif case == "registered":
            with _registered(model, 2):
                dslaunch.initialize(model=model, config=_config(0))
        else:
            dslaunch.initialize(model=model, config=_config(0, **changes), **arguments)
    return str(caught.value)


def _refused_along_tp(rank: int) -> str:
    model = make_hugging_face("Llama", num_attention_heads=2, num_key_value_heads=2)
    with pytest.raises(ConfigError) as caught:
        UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", 2, tensor_parallel_size=2)
    return str(caught.value)


def test_heads_of_the_whole_model_are_told_where_ranks_along_tp_have_parts(ranks: Ranks) -> None:
    for text in ranks(_refused_along_tp, world_size=4):
        assert "the model's 2 attention heads, 2 of keys and values, 1/2 of which is on each rank" in text


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("size", "sequence_parallel_size 3 does not divide the 2 ranks"),
        ("data", "data_parallel_size 2 is 1"),
        ("mesh", "2 x 2 is not what the 2 ranks are divided into"),
        ("both", "has none of the methods of an mpu"),
        ("heads", "they do not divide 3 heads"),
        ("eager", "'sdpa' or a flash attention"),
        ("positions", "is given no position_ids"),
        ("shapes", "differ in [1]['input_ids']: (4, 8) and (4, 6)"),
        ("registered", "is registered for sequences that 2 ranks share"),
    ],
)
def test_what_cannot_be_is_refused_by_name(ranks: Ranks, case: str, words: str) -> None:
    for text in ranks(_refused, case, world_size=2):
        assert words in text
