"""Masters and optimizer states in 16 bits: the same bits wherever they lie, and few bytes."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dslaunch
from dslaunch import ConfigError, zero
from dslaunch.runtime.optimizers.eight_bits import decode, encode
from dslaunch.shared.zero_bytes import TrainedBytes, adam_bytes, held_bytes
from tests.exhaustive import few
from tests.runtime.checkpoint.states import WARMUP
from tests.runtime.models import assert_same_bits, make_config, make_model, snapshot, train_engine
from tests.runtime.offload.residences import AWAY, ON_DEVICE, Where, make_engine
from tests.runtime.ranks import Ranks
from tests.runtime.training.test_memory import PADDING, Wide, live_bytes

STEPS = 5
BF16 = {"enabled": True}
STATES = {"data_types": {"optimizer_state_dtype": "bf16"}}
BOTH = {"bf16": {**BF16, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
EIGHT_BITS = {"data_types": {"optimizer_state_dtype": "8bit"}}
LEAST = {"data_types": {"optimizer_state_dtype": "8bit", "master_dtype": "bf16"}}
KINDS: dict[str, dict[str, Any]] = {"states": STATES, "both": BOTH, "8 bits": EIGHT_BITS, "least": LEAST}
LION = {"type": "Lion", "params": {"lr": 1e-3, "weight_decay": 0.1}}
SGD = {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}}
ADAGRAD = {"type": "Adagrad", "params": {"lr": 1e-2}}


def _step(engine: Any, step: int) -> None:
    """Each rank has the same sample, so that the average over 1, 2 or 4 ranks has the same bits."""
    x = torch.randn(1, 7, generator=torch.Generator().manual_seed(step)).bfloat16()
    engine.backward(engine(x).float().square().mean())
    engine.step()


def _train(
    rank: int, kind: str, rows: tuple[tuple[int, Where], ...], folder: str, changes: dict[str, Any]
) -> list[dict[str, Tensor]]:
    found = []
    for stage, where in rows:
        engine = make_engine(
            stage,
            "bf16",
            where,
            folder,
            train_batch_size=torch.distributed.get_world_size(),
            gradient_clipping=0.0,
            **{**KINDS[kind], **changes},
        )
        for step in range(STEPS):
            _step(engine, step)
        params = dict(engine.module.named_parameters())
        found.append(
            {
                **snapshot(engine.state_dict()),
                **{f"{name} master": zero.safe_get_full_fp32_param(one) for name, one in params.items()},
                **{
                    f"{name} {state}": zero.safe_get_full_optimizer_state(one, state)
                    for name, one in params.items()
                    for state in engine.optimizer.sub_buffers[0].optimizer_shard.state_names
                },
            }
        )
        engine.destroy()
    return found


EVERYWHERE = ((0, ON_DEVICE), (1, ON_DEVICE), (2, AWAY[0]), (3, ON_DEVICE), (3, AWAY[2]), (3, AWAY[6]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "world_size"),
    few(itertools.product(KINDS, (2, 4)), lambda *row: row in (("states", 2), ("least", 2))),
)
def test_bits_are_the_same_at_every_stage_world_and_place(
    ranks: Ranks, tmp_path: Path, kind: str, world_size: int
) -> None:
    rows = EVERYWHERE if world_size == 4 else EVERYWHERE[1:5]
    alone = ranks(_train, kind, EVERYWHERE[:1], "", {}, world_size=1)[0][0]
    for found in ranks(_train, kind, rows, str(tmp_path), {}, world_size=world_size):
        for one in found:
            assert_same_bits(one, alone)
    for name, values in alone.items():
        if " exp_avg" in name and KINDS[kind] in (STATES, BOTH):
            assert torch.equal(values.bfloat16().float(), values)


def _other_optimizers(rank: int) -> None:
    for optimizer, states in ((LION, ["exp_avg"]), (SGD, ["momentum_buffer"]), (ADAGRAD, ["sum"])):
        changes = {"optimizer": optimizer}
        one, other = _train(rank, "both", (EVERYWHERE[0], EVERYWHERE[4]), "", changes)
        assert_same_bits(one, other)
        assert {name.split()[1] for name in one if " " in name} == {"master", *states}


@pytest.mark.slow
def test_other_optimizers_keep_16_bits_too(ranks: Ranks) -> None:
    ranks(_other_optimizers, world_size=2)


# ---- checkpoints


def _engine(kind: str, seed: int) -> Any:
    config = make_config(
        stage=2 if kind == "states" else 3, **{"bf16": BF16, "scheduler": WARMUP, **KINDS.get(kind, {})}
    )
    return dslaunch.initialize(model=make_model(seed=seed), config=config)[0]


def _values(engine: Any) -> dict[str, Tensor]:
    """Parameters, masters and states by name, unsharded, on every rank."""
    params = dict(engine.module.named_parameters())
    found = snapshot(engine.state_dict())
    for name, param in params.items():
        found[f"{name} master"] = zero.safe_get_full_fp32_param(param)
        for state in ("exp_avg", "exp_avg_sq"):
            found[f"{name} {state}"] = zero.safe_get_full_optimizer_state(param, state)
    return found


def _as_kept(kind: str, name: str, values: Tensor) -> Tensor:
    """Return the values as an engine of this kind holds them after a load."""
    what, is_state = name.partition(" ")[2], " exp_avg" in name
    if "8bit" in str(KINDS.get(kind)) and is_state:
        return decode(*encode(values.reshape(-1), what, None), what).view_as(values)
    is_narrow = kind in ("both", "least") if what == "master" else is_state and kind in ("states", "both")
    return values.bfloat16().float() if is_narrow else values


def _checkpoints(rank: int, root: Path) -> None:
    kinds = ("float32", *KINDS)
    saved, later = {}, {}
    for kind in kinds:
        engine = _engine(kind, seed=0)
        train_engine(engine, steps=2, dtype=torch.bfloat16)
        engine.save_checkpoint(root / kind)
        saved[kind] = _values(engine)
        train_engine(engine, steps=2, first=2, dtype=torch.bfloat16)
        later[kind] = _values(engine)
        engine.destroy()
    for kind in kinds:
        engine = _engine(kind, seed=1)
        for source in kinds:
            train_engine(engine, steps=1, dtype=torch.bfloat16)
            engine.load_checkpoint(root / source)
            right = {name: _as_kept(kind, name, values) for name, values in saved[source].items()}
            assert_same_bits(_values(engine), right)
            if source == kind:  # the random bits are those of the step, too
                train_engine(engine, steps=2, first=2, dtype=torch.bfloat16)
                assert_same_bits(_values(engine), later[kind])
        engine.destroy()


@pytest.mark.slow
def test_checkpoints_load_from_any_dtype_to_any(ranks: Ranks, tmp_path: Path) -> None:
    ranks(_checkpoints, tmp_path, world_size=2)


class Odd(nn.Module):
    """Matrices of several blocks of 256 elements, the last of which are not full."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(7, 61), nn.Linear(61, 37), nn.LayerNorm(37), nn.Linear(37, 1))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x)
        return result


# Each goes on from the one before: ranks, stage, and where values lie
CHAIN = (
    (2, 1, AWAY[0]),
    (4, 3, AWAY[5]),
    (1, 2, AWAY[3]),
    (2, 3, AWAY[2]),
    (4, 2, ON_DEVICE),
    (1, 3, AWAY[6]),
)


def _link(rank: int, kind: str, number: int, folder: Path | None) -> dict[str, Tensor]:
    """Train two more steps than the one before has; without a folder all of them, at stage 0."""
    world_size, stage, where = (1, 0, ON_DEVICE) if folder is None else CHAIN[number]
    engine = make_engine(
        stage,
        "bf16",
        where,
        str(folder),
        kind=Odd,
        train_batch_size=world_size,
        gradient_clipping=0.0,
        reduce_bucket_size=50,
        **KINDS[kind],
    )
    if folder is not None and number:
        engine.load_checkpoint(folder, tag=str(number - 1))
    for step in range(0 if folder is None else 2 * number, 2 * number + 2):
        _step(engine, step)
    if folder is not None:
        engine.save_checkpoint(folder, tag=str(number))
    values = _values(engine)
    engine.destroy()
    return values


@pytest.mark.slow
@pytest.mark.parametrize("kind", few(("8 bits", "least", "both"), lambda kind: kind == "least"))
def test_runs_go_on_in_the_middle_of_blocks_anywhere_with_the_same_bits(
    ranks: Ranks, tmp_path: Path, kind: str
) -> None:
    for number, (world_size, *_) in enumerate(CHAIN):
        (alone,) = ranks(_link, kind, number, None, world_size=1)
        for values in ranks(_link, kind, number, tmp_path, world_size=world_size):
            assert_same_bits(values, alone)


# ---- memory


# of masters and states for a parameter, and of its gradient where it is sharded
BYTES = {"states": (8, 4), "both": (4, 2), "8 bits": (6 + 1 / 32, 4), "least": (2 + 1 / 32, 2)}


def _census(rank: int, kind: str, stage: int, between: float, total: float) -> tuple[int, int, int]:
    before = live_bytes()
    model = make_model(Wide)
    config = make_config(stage=stage, reduce_bucket_size=70_000, **{"bf16": BF16, **KINDS[kind]})
    engine, *_ = dslaunch.initialize(model=model, config=config)
    engine.backward(engine(torch.ones(3, 256, dtype=torch.bfloat16)).float().mean())
    grads = [param.grad for param in model.parameters()]  # else Python knows nothing of them
    with_gradients = live_bytes(before + total)
    del grads
    engine.step()
    return before, with_gradients, live_bytes(before + between)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "stage"),
    few(itertools.product(KINDS, (1, 2, 3)), lambda *row: row in (("8 bits", 2), ("least", 3))),
)
def test_bytes_are_the_formula(ranks: Ranks, kind: str, stage: int) -> None:
    """And the formula is what `dslaunch plan` takes where it has not rehearsed."""
    each = adam_bytes(2, {"bf16": BF16, **KINDS[kind]})
    assert each == TrainedBytes(2, *BYTES[kind])
    numel = sum(param.numel() for param in Wide().parameters())
    expected = held_bytes(numel, each=each, stage=stage, num_ranks=2).on_device
    for before, with_gradients, after in ranks(_census, kind, stage, expected, expected, world_size=2):
        assert with_gradients - before == pytest.approx(expected, rel=PADDING)
        assert after - before == pytest.approx(expected, rel=PADDING)


# ---- what is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"optimizer": {"type": "Lamb"}, **STATES},
            "data_types.optimizer_state_dtype asks for states in bfloat16, and optimizer Lamb keeps them in "
            "more; take AdamW, Adam, Lion, Adagrad or SGD in its usual form, or leave the key out",
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"amsgrad": True}}, **BOTH},
            "bf16.bf16_master_weights_and_grads asks for masters in bfloat16, and optimizer AdamW of torch",
        ),
        (
            {"data_types": {"master_dtype": "bf16"}},
            'data_types.master_dtype "bf16" needs bf16.enabled true: a bfloat16 parameter is its own master',
        ),
        (
            {"bf16": {"bf16_optimizer_states": True}},
            "bf16.bf16_optimizer_states true needs bf16.enabled true",
        ),
        (
            {**BOTH, "data_types": {"optimizer_state_dtype": "fp32"}},
            'data_types.optimizer_state_dtype "fp32" contradicts bf16.bf16_optimizer_states true',
        ),
        (
            {"data_types": {"optimizer_state_dtype": "fp16"}},
            'data_types.optimizer_state_dtype "fp16" is not "fp32", "bf16", "float32", "bfloat16" or "8bit"',
        ),
        (
            {"optimizer": LION, **EIGHT_BITS},
            "data_types.optimizer_state_dtype asks for states in 8 bits, and optimizer Lion keeps them in "
            "more; take AdamW or Adam in its usual form, or leave the key out",
        ),
    ],
)
def test_what_has_no_narrow_values_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        dslaunch.initialize(model=make_model(), config=make_config(**changes))
