"""engine.weights(): names and whole tensors on every rank, a unit at a time, and training unharmed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dslaunch
from dslaunch import ConfigError
from tests.runtime.models import Tied, assert_same_bits, batch, loss_of, make_config, make_model, snapshot
from tests.runtime.offload.census import Census
from tests.runtime.ranks import Ranks

WIDTH, DEPTH = 128, 6
LAYER = 4 * WIDTH * (WIDTH + 1)  # bytes


def _config(stage: int, device: str | None, folder: str) -> dict[str, Any]:
    config = make_config(stage=stage, bf16={"enabled": True})
    if device is not None:
        place = {"device": device, **({"nvme_path": folder} if device == "nvme" else {})}
        config["zero_optimization"] |= {"offload_param": place, "offload_optimizer": place}
    return config


def _trained(
    stage: int, device: str | None, folder: str, *, passes: int
) -> tuple[dict[str, Tensor], list[Any]]:
    """The weights after three steps, with passes before the last two."""
    engine, *_ = dslaunch.initialize(model=make_model(Tied), config=_config(stage, device, folder))
    found = []
    for step in range(3):
        for number in range(passes if step else 0):
            state = {name: value.clone() for name, value in engine.state_dict().items()}
            to = ("all", "first")[number % 2]
            weights = {name: (value.clone(), value.is_contiguous()) for name, value in engine.weights(to=to)}
            assert bool(weights) == (to == "all" or engine.global_rank == 0)
            found.append((state, weights))
        x = batch(step).chunk(engine.world_size)[engine.global_rank].bfloat16()
        engine.backward(loss_of(engine, x))
        engine.step()
    last = snapshot(engine.state_dict())
    trained = {
        name
        for name, _ in engine.weights(lambda name: name.replace("blocks.", "layers."), only_trainable=True)
    }
    assert trained == {
        "embed.weight",
        *(f"layers.{n}.{kind}" for n in (0, 2) for kind in ("weight", "bias")),
    }
    engine.destroy()
    return last, found


def _at_all_stages(rank: int, folder: str) -> None:
    for stage, device in ((0, None), (1, None), (2, None), (3, None), (3, "cpu"), (3, "nvme")):
        expected, _ = _trained(stage, device, folder, passes=0)
        last, found = _trained(stage, device, folder, passes=2)
        assert_same_bits(last, expected)
        assert len(found) == 4
        for state, weights in found:
            if not weights:
                continue
            names = list(weights)
            assert set(names) == state.keys() - {"head.weight"}, (stage, device)
            assert names.index("blocks.2.seen") == names.index("blocks.2.bias") + 1
            assert all(is_contiguous for _, is_contiguous in weights.values())
            assert_same_bits(
                {name: value for name, (value, _) in weights.items()}, {name: state[name] for name in names}
            )


def test_every_rank_gets_the_weights_at_every_stage_and_trains_on_with_equal_bits(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks(_at_all_stages, str(tmp_path), world_size=2)


class Four(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in "abcd":
            self.add_module(name, nn.Linear(WIDTH, WIDTH))


class Wide(nn.Module):
    """Units of four layers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Four() for _ in range(DEPTH))


def _measured(rank: int) -> tuple[int, int, int]:
    """Bytes of all weights, bytes that this rank received in a pass, and the most that was alive in it."""
    census = Census()
    with census:
        engine, *_ = dslaunch.initialize(model=make_model(Wide), config=make_config(stage=3))
        assert len(engine._model.units) == DEPTH + 1
        before, sent = census.look().device, engine._wire.meter.bytes_by_kind()
        census.watch(engine, allowed=before + LAYER * 5)
        total = sum(value.nbytes for _, value in engine.weights())
    received = sum(engine._wire.meter.bytes_by_kind().values()) - sum(sent.values())
    return total, received, census.most.device - before


def test_a_pass_sends_the_weights_once_and_needs_the_memory_of_one_unit_and_one_tensor(ranks: Ranks) -> None:
    for total, received, most in ranks(_measured, world_size=2):
        assert total == DEPTH * 4 * LAYER
        assert 0.45 * total < received < 1.02 * total / 2  # the other half is here
        assert most < 1.02 * 5 * LAYER


def _left_early(rank: int) -> list[str]:
    engine, *_ = dslaunch.initialize(model=make_model(), config=make_config(stage=3))
    expected = snapshot(engine.state_dict())
    seen = []

    def look() -> None:
        for name, value in engine.weights():
            assert torch.equal(value, expected[name])
            seen.append(name)
            if rank == 1 and len(seen) == 3:
                raise ValueError("a reward failed")

    if rank == 1:
        with pytest.raises(ValueError, match="a reward failed"):
            look()
    else:
        look()
    for name, _ in engine.weights():
        if name == seen[1]:
            break
    weights = engine.weights()
    assert next(weights)[0] == seen[0]
    del weights
    assert_same_bits(snapshot(engine.state_dict()), expected)
    return seen


def test_a_rank_that_leaves_early_leaves_no_other_waiting(ranks: Ranks) -> None:
    first, second = ranks(_left_early, world_size=2, deadline_s=60.0)
    assert second == first[:3]
    assert len(first) == len(make_model().state_dict())


def _refused(rank: int) -> list[str]:
    engine, *_ = dslaunch.initialize(model=make_model(Tied), config=make_config(stage=3))
    said = []
    for arguments in ({"names": lambda name: name.replace("blocks.0", "blocks.1")}, {"to": "one"}):
        with pytest.raises(ConfigError) as caught:
            engine.weights(**arguments)
        said.append(str(caught.value))
    return said


def test_names_that_cannot_be_given_are_refused_before_anything_is_sent(ranks: Ranks) -> None:
    for said in ranks(_refused, world_size=2):
        assert said == [
            "engine.weights(): 'blocks.0.weight' and 'blocks.1.weight' would both be called "
            "'blocks.1.weight'; give each parameter a name of its own",
            "engine.weights(to='one'): write 'all', for every rank, or 'first', for rank 0",
        ]
