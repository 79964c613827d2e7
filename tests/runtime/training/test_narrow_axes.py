"""Masters and optimizer states of few bits beside layers, experts and stages on different ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dslaunch import zero
from tests.exhaustive import few
from tests.runtime.ranks import Ranks
from tests.runtime.training.axes import Layout, make_engine, train
from tests.runtime.training.test_narrow_states import BF16, KINDS

# Sums of gradients go in another order, so that a value whose random bits are near may go to its other
# neighbour. Seen: 0.990 for a model divided over 2 ranks.
LEAST_SAME, ROUNDING = 0.98, 1e-5
# Parts of a layer have random bits of their own, and blocks of their own of 8 bits.
ONE_CODE = {"states": 1 / 128, "8 bits": 1 / 8}
LOSS, NORM = 1e-6, 1e-6  # seen: 2.4e-7, 4.6e-8


def _dp(size: int, **more: Any) -> Layout:
    return Layout(dp=size, optimizer="AdamW", **more)


# The layout, and one with the same samples whose ranks hold all of the model
LAYOUTS = (
    (Layout(tp=2, stage=1, optimizer="AdamW"), _dp(1)),
    (_dp(2, ep=2, stage=3), _dp(2)),
    (Layout(pp=2, stage=3, optimizer="AdamW"), _dp(2)),
    (_dp(2, tp=2, ep=2, stage=3), _dp(2)),
    (Layout(pp=2, tp=2, stage=3, optimizer="AdamW"), _dp(2)),
    (_dp(2, pp=2, ep=2, stage=1), _dp(4)),
)


def _num_ranks(layout: Layout) -> int:
    return layout.pp * layout.dp * layout.sp * layout.tp


def _is_cut(name: str) -> bool:
    """Whether axis tp divides it."""
    return ".up." in name or ".down." in name


def _values_of(engine: Any) -> dict[str, Tensor]:
    """Return this rank's masters and states, whole, by their names in the whole model."""
    found: dict[str, Tensor] = {}
    for sub_buffer in (one for unit in engine._model.units for one in unit.sub_buffers):
        for index, member in enumerate(sub_buffer.members):
            name = sub_buffer.true_name(index)
            found[name] = zero.safe_get_full_fp32_param(member.param)
            for state in ("exp_avg", "exp_avg_sq"):
                found[f"{name} {state}"] = zero.safe_get_full_optimizer_state(member.param, state)
    return found


def _together(values: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the values of all ranks, which must agree where several have the same."""
    found: dict[str, Tensor] = {}
    for of_rank in values:
        for name, value in of_rank.items():
            assert torch.equal(found.setdefault(name, value), value), name
    return found


def _train(rank: int, layout: Layout, kind: str) -> tuple[list[float], list[float], dict[str, Tensor]]:
    engine = make_engine(layout, **KINDS[kind])
    losses, norms = train(engine, layout)
    values = _values_of(engine)
    engine.destroy()
    return losses, norms, values


@pytest.mark.slow
@pytest.mark.parametrize("kind", ONE_CODE)
@pytest.mark.parametrize(("layout", "whole"), few(LAYOUTS, lambda layout, _: layout.pp == layout.tp == 2))
def test_states_are_rounded_as_where_each_rank_has_all_layers(
    ranks: Ranks, kind: str, layout: Layout, whole: Layout
) -> None:
    judged = ranks(_train, whole, kind, world_size=_num_ranks(whole))
    expected_losses, expected_norms, _ = judged[0]
    expected = _together([values for *_, values in judged])
    results = ranks(_train, layout, kind, world_size=_num_ranks(layout))
    for losses, norms, _ in results:
        assert losses == pytest.approx(expected_losses, rel=LOSS)
        assert norms == pytest.approx(expected_norms, rel=NORM)
    found = _together([values for *_, values in results])
    assert found.keys() == expected.keys()
    same, num_whole = 0, 0
    for name, value in found.items():
        right, is_state = expected[name], " " in name
        if layout.tp == 1 or not _is_cut(name):
            same += int(torch.isclose(value, right, rtol=ROUNDING, atol=0.0).sum())
            num_whole += value.numel()
        if is_state:
            most = ONE_CODE[kind] * float(right.abs().max())  # a sum may be smaller than what is added
            torch.testing.assert_close(value, right, rtol=0.0, atol=most, msg=name)
    assert same >= LEAST_SAME * num_whole


# ---- checkpoints

CHAIN = (
    Layout(pp=2, tp=2, stage=3, order=("tp", "pp"), precision="bf16", optimizer="AdamW"),
    _dp(2, sp=2, ep=4, stage=3, precision="bf16"),
    _dp(2, pp=2, ep=2, stage=1, schedule="zbv", precision="bf16"),
    Layout(tp=2, stage=2, precision="bf16", optimizer="AdamW"),
    _dp(1, stage=0, precision="bf16"),
)


def _save(rank: int, layout: Layout, kind: str, folder: Path) -> dict[str, Tensor]:
    engine = make_engine(layout, **{"bf16": BF16, **KINDS[kind]})
    train(engine, layout)
    values = _values_of(engine)
    engine.save_checkpoint(folder)
    engine.destroy()
    return values


def _load(rank: int, layout: Layout, kind: str, folder: Path) -> dict[str, Tensor]:
    engine = make_engine(layout, **{"bf16": BF16, **KINDS[kind]})
    engine.load_checkpoint(folder)
    values = _values_of(engine)
    train(engine, layout, steps=1)
    engine.destroy()
    return values


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "number"),
    few(
        [(kind, number) for kind in ("both", "8 bits", "least") for number in range(len(CHAIN))],
        lambda kind, number: (kind, number) in (("both", 0), ("least", 1)),
    ),
)
def test_a_checkpoint_of_each_loads_at_the_next(ranks: Ranks, tmp_path: Path, kind: str, number: int) -> None:
    """Masters and what no rank has a part of are there bit by bit. Blocks of 8 bits are a part's."""
    layout, to = CHAIN[number], CHAIN[number - 1]
    saved = _together(ranks(_save, layout, kind, tmp_path, world_size=_num_ranks(layout)))
    loaded = _together(ranks(_load, to, kind, tmp_path, world_size=_num_ranks(to)))
    assert loaded.keys() == saved.keys()
    for name, value in loaded.items():
        if kind != "both" and " " in name and layout.tp != to.tp and _is_cut(name):
            least = 2e-5 * float(saved[name].abs().max())
            torch.testing.assert_close(value, saved[name], rtol=1 / 8, atol=least, msg=name)
        else:
            assert torch.equal(value, saved[name]), name
