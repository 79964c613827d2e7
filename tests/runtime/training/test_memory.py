"""The memory that a rank holds between steps is the formula's, found by looking at every
tensor that is alive.

It is the same after many steps, and all of it is given back when the engine and the model are let go.
"""

from __future__ import annotations

import gc
import itertools
import time
import weakref
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import dslaunch
from dslaunch import zero
from dslaunch.runtime.placement.stage_policy import policy_for_stage
from dslaunch.runtime.strided import is_strided
from tests.exhaustive import few
from tests.runtime.footprint import memory_bytes, optimizer_bytes_per_element
from tests.runtime.models import make_config, make_model, train_engine
from tests.runtime.ranks import Ranks
from tests.runtime.training.test_hard_cases import check_freed

PADDING = 0.02  # of the whole; every unit is padded to 256 bytes per rank
LET_GO_S = 5.0  # of what is not needed any more
LAYER = 64 * 65  # elements of a layer of Deep


class Wide(nn.Module):
    """Two units of 66,048 parameters and a small root: padding is below a hundredth."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(256, 257), nn.Linear(257, 255))
        self.last = nn.Linear(255, 17)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.blocks(x))
        return result


class Storages(NamedTuple):
    count: int
    num_bytes: int


def _live_storages() -> Storages:
    """Of the tensors that Python knows; those that were given back and are of no size do not count."""
    sizes = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in gc.get_objects()
        if type(tensor) in (Tensor, nn.Parameter) and is_strided(tensor) and tensor.untyped_storage().nbytes()
    }
    return Storages(len(sizes), sum(sizes.values()))


def live_bytes(wanted: float | None = None) -> int:
    """`wanted` is waited for: gloo's threads let go of a collective's tensors a moment after it has ended."""
    gc.collect()
    deadline = time.monotonic() + LET_GO_S
    while True:
        found = _live_storages().num_bytes
        if wanted is None or found == pytest.approx(wanted, rel=PADDING) or time.monotonic() > deadline:
            return found


def _measure(rank: int, stage: int, bf16: bool, between: float, total: float) -> tuple[int, int, int, int]:
    """Return live bytes before the model exists, after initialize, after a backward, and after the step."""
    before = live_bytes()
    model = make_model(Wide)
    config = make_config(stage=stage, bf16={"enabled": bf16}, reduce_bucket_size=70_000)
    engine, *_ = dslaunch.initialize(model=model, config=config)
    ready = live_bytes(before + between)
    x = torch.ones(3, 256, dtype=torch.bfloat16 if bf16 else torch.float32)
    engine.backward(engine(x).float().mean())
    del x
    grads = [param.grad for param in model.parameters()]  # else Python knows nothing of them
    with_gradients = live_bytes(before + total)
    del grads
    engine.step()
    return before, ready, with_gradients, live_bytes(before + between)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "world_size", "bf16"),
    few(
        itertools.product([0, 1, 2, 3], [1, 2, 4], [False, True]),
        lambda stage, world_size, bf16: world_size == (2 if bf16 else 1) or (stage, bf16) == (3, True),
    ),
)
def test_live_storages_are_the_formula(ranks: Ranks, stage: int, world_size: int, bf16: bool) -> None:
    param_bytes = 2 if bf16 else 4
    expected = memory_bytes(
        policy_for_stage(stage),
        numel=sum(param.numel() for param in Wide().parameters()),
        param_bytes=param_bytes,
        grad_bytes=4 if stage >= 2 and world_size > 1 else param_bytes,  # shards are added up in fp32
        optimizer_bytes=optimizer_bytes_per_element(num_states=2, param_bytes=param_bytes),
        num_shards=world_size,
    )
    # A rank that is alone has gradients from backward to step only: they are autograd's own.
    between = expected.total - (expected.gradients if world_size == 1 else 0)
    found = ranks(_measure, stage, bf16, between, expected.total, world_size=world_size)
    for before, ready, with_gradients, after in found:
        assert ready - before == pytest.approx(between, rel=PADDING)
        assert with_gradients - before == pytest.approx(expected.total, rel=PADDING)
        assert after - before == pytest.approx(between, rel=PADDING)


MANY_STEPS = 50


def _is_back_to(storages: Storages) -> bool:
    """gloo's threads let go of a collective's tensors a moment after it has ended."""
    deadline = time.monotonic() + LET_GO_S
    while True:
        now = _live_storages()
        if now.count <= storages.count and now.num_bytes <= storages.num_bytes:
            return True
        if time.monotonic() > deadline:
            return False


def _trained_for_long(rank: int, stage: int) -> bool:
    """Whether there are as many storages after many steps as after a few,
    without a garbage collection between.
    """
    engine, *_ = dslaunch.initialize(model=make_model(), config=make_config(stage=stage))
    train_engine(engine, steps=5)
    gc.collect()
    gc.disable()
    try:
        few = _live_storages()
        for step in range(5, MANY_STEPS):
            train_engine(engine, steps=1, first=step)
            check_freed(engine)
        return _is_back_to(few)
    finally:
        gc.enable()


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_many_steps_leave_no_storage_behind_not_even_as_garbage(ranks: Ranks, stage: int) -> None:
    assert ranks(_trained_for_long, stage, world_size=2) == [True, True]


def _let_go(rank: int, stage: int) -> dict[str, bool]:
    """Which of them are gone, first without the engine, then without the model."""
    gc.collect()
    before = _live_storages()
    model = make_model()
    engine, optimizer, *_ = dslaunch.initialize(model=model, config=make_config(stage=stage))
    train_engine(engine, steps=2)
    sub_buffers = [weakref.ref(sub_buffer) for unit in engine._model.units for sub_buffer in unit.sub_buffers]
    alone = {"engine": weakref.ref(engine), "optimizer": weakref.ref(optimizer)}
    with_model = {"sharded model": weakref.ref(engine._model), "module": weakref.ref(model)}
    del engine, optimizer
    gc.collect()
    gone = {name: reference() is None for name, reference in alone.items()}
    del model
    gc.collect()
    gone |= {name: reference() is None for name, reference in with_model.items()}
    gone["parts"] = all(reference() is None for reference in sub_buffers)
    gone["memory"] = _is_back_to(before)
    return gone


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "world_size"),
    few(itertools.product([0, 1, 2, 3], [1, 2]), lambda stage, world_size: world_size == 2),
)
def test_one_collection_frees_an_engine_and_its_model_that_were_let_go(
    ranks: Ranks, stage: int, world_size: int
) -> None:
    for gone in ranks(_let_go, stage, world_size=world_size):
        assert all(gone.values()), gone


class Deep(nn.Module):
    """An embedding and six blocks of two layers, which a parent initializes when all are made."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 64)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(6)])
        self.apply(self._init)

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return x


class Peak(TorchDispatchMode):
    """The most bytes that tensors made inside hold at one time, looked at after each operation.

    gloo's threads let go of a finished collective's tensors a moment late:
    more than `allowed` is looked at again.
    """

    def __init__(self, *, allowed: float) -> None:
        super().__init__()
        self._seen: dict[int, StorageWeakRef] = {}
        self._allowed = allowed
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, Tensor):
                self._seen[one.untyped_storage()._cdata] = StorageWeakRef(one.untyped_storage())
        deadline = time.monotonic() + 5.0
        while (live := self.live_bytes()) > self._allowed and time.monotonic() < deadline:
            pass
        self.nbytes = max(self.nbytes, live)
        return result

    def live_bytes(self) -> int:
        self._seen = {place: ref for place, ref in self._seen.items() if not ref.expired()}
        live = [torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in self._seen.values()]
        return sum(storage.nbytes() for storage in live if storage is not None)


def _peak(rank: int, is_early: bool, allowed: float) -> int:
    """Return the most bytes until initialize() has the model."""
    config = make_config(stage=3, reduce_bucket_size=2 * LAYER)
    del config["optimizer"]
    with Peak(allowed=allowed) as peak:
        with zero.Init(enabled=is_early):
            model = Deep()
        dslaunch.initialize(model=model, config=config)
    return peak.nbytes


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_model_made_in_zero_init_is_never_whole(ranks: Ranks, world_size: int) -> None:
    whole = 4 * sum(param.numel() for param in Deep().parameters())
    small = 4096  # padding, placeholders
    # The shard, the largest module and the largest unit.
    allowed = whole / world_size + 4 * LAYER + 4 * 2 * LAYER + small
    assert max(ranks(_peak, True, allowed, world_size=world_size)) <= allowed
    assert min(ranks(_peak, False, float("inf"), world_size=world_size)) >= whole > allowed
