"""Training on the fake CUDA device, whose side streams work as late as they may: the values of plain torch,
and no two accesses to memory that nothing has put in order.
"""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dslaunch
from dslaunch.runtime.activation import checkpointing, host_inputs
from dslaunch.runtime.checkpoint.files import writer
from dslaunch.runtime.checkpoint.files.snapshot import Snapshot
from dslaunch.runtime.checkpoint.saver import Saver
from dslaunch.runtime.compat.generation import unwrap_model_for_generation
from dslaunch.runtime.offload.device_copies import Arrival
from dslaunch.runtime.offload.pinned_memory import PINNED_MEMORY
from dslaunch.runtime.zero.model import parked_states
from dslaunch.runtime.zero.parameters.early_parameter import early_of
from tests.exhaustive import few
from tests.fake_cuda.torch_cuda import device
from tests.runtime.models import (
    GLOBAL_BATCH,
    Uneven,
    Writer,
    batch,
    loss_of,
    make_config,
    make_model,
    snapshot,
    worst_difference,
)
from tests.runtime.ranks import RankFailed, Ranks

STEPS = 4
CLIPPING = 0.05
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Of a parameter: a gradient near zero may get the other sign by rounding, and Adam steps by 0.01 whatever
# its size.
DRIFT = {"fp32": 1e-5, "bf16": 2.5e-2, "fp16": 2.0**-7}
NORM_DRIFT = {"fp32": 1e-5, "bf16": 2.0**-5, "fp16": 2.0**-7}  # as a part of the norm
PINNED, PLAIN = {"device": "cpu", "pin_memory": True}, {"device": "cpu", "pin_memory": False}
NVME = {"device": "nvme", "nvme_path": "FOLDER"}


class Case(NamedTuple):
    """One way to train."""

    stage: int
    precision: str
    world_size: int = 1
    num_micro_batches: int = 1
    zero: dict[str, Any] = {}  # noqa: RUF012  # never written


class Trained(NamedTuple):
    """What came of it."""

    params: dict[str, Tensor]
    norms: list[float]


OFFLOADS: list[tuple[int, dict[str, Any]]] = [
    (1, {"offload_optimizer": PINNED}),
    (2, {"offload_optimizer": PINNED}),
    (3, {"offload_optimizer": PINNED}),
    (2, {"offload_optimizer": PLAIN}),
    (3, {"offload_param": PINNED}),
    (3, {"offload_param": PLAIN}),
    (3, {"offload_param": PINNED, "offload_optimizer": PINNED}),
    (2, {"offload_optimizer": {**PINNED, "super_offload": True}}),
    (3, {"offload_optimizer": {**PINNED, "super_offload": True}}),
    (2, {"offload_optimizer": {**PINNED, "delayed_update": {"enabled": True, "warmup_steps": 100}}}),
    (3, {"offload_optimizer": {**PINNED, "ratio": 0.5}}),
    (2, {"offload_optimizer": NVME}),
    (3, {"offload_param": NVME}),
    (3, {"offload_param": NVME, "offload_optimizer": NVME}),
]
NOT_IN_PARITY: list[dict[str, Any]] = [
    {"offload_param": PLAIN},
    {"offload_param": NVME},
    {"offload_optimizer": PLAIN},
    {"offload_optimizer": NVME},
    {"offload_optimizer": {**PINNED, "delayed_update": {"enabled": True, "warmup_steps": 100}}},
]
CASES = (
    [
        Case(stage, precision, world_size, num_micro_batches)
        for world_size in (1, 2, 4)
        for precision in ("fp32", "bf16", "fp16")
        for num_micro_batches in ((1, 2) if world_size < 4 else (1,))  # 12 samples have no more equal parts
        for stage in (0, 1, 2, 3)
    ]
    + [
        Case(stage, precision, world_size, num_micro_batches, zero)
        for world_size in (1, 2)
        for precision, num_micro_batches in (("fp32", 1), ("bf16", 1), ("bf16", 2), ("fp16", 2))
        for stage, zero in OFFLOADS
    ]
    + [
        Case(3, precision, 4, num_micro_batches, zero)
        for precision, num_micro_batches in (("fp32", 1), ("bf16", 1))
        for zero in (
            {"mics_shard_size": 2},
            {"zero_hpz_partition_size": 2},
            {"mics_shard_size": 2, "offload_optimizer": PINNED},
        )
    ]
)


def config_of(case: Case, folder: str) -> dict[str, Any]:
    """With units of one layer."""
    more: dict[str, Any] = {
        "gradient_accumulation_steps": case.num_micro_batches,
        "gradient_clipping": CLIPPING,
    }
    if case.precision == "bf16":
        more["bf16"] = {"enabled": True}
    if case.precision == "fp16":
        more["fp16"] = {"enabled": True, "loss_scale": 64}
    config = make_config(stage=case.stage, reduce_bucket_size=50, **more)
    zero = {
        key: {**value, "nvme_path": folder} if isinstance(value, dict) and "nvme_path" in value else value
        for key, value in case.zero.items()
    }
    config["zero_optimization"].update(zero)
    return config


def train_steps(engine: dslaunch.Engine, *, first: int = 0, steps: int = STEPS) -> list[float]:
    """Train on this rank's part of each batch, and return the norms."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dtype = next(engine.module.parameters()).dtype
    norms = []
    for step in range(first, first + steps):
        for micro in batch(step).chunk(engine.gradient_accumulation_steps()):
            own = micro.chunk(world_size)[rank].to(engine.device).to(dtype)
            engine.backward(loss_of(engine, own))
            engine.step()
        norms.append(engine.get_global_grad_norm() or 0.0)
    return norms


def values_of(engine: dslaunch.Engine) -> dict[str, Tensor]:
    """The masters' values on the host."""
    named = dict(engine.module.named_parameters())
    return {name: dslaunch.zero.safe_get_full_fp32_param(param).cpu() for name, param in named.items()}


def _trained(rank: int, case: Case, folder: str) -> Trained:
    engine, *_ = dslaunch.initialize(model=make_model(), config=config_of(case, folder))
    assert engine.device == torch.device("cuda", rank)
    norms = train_steps(engine)
    params = values_of(engine)
    shown = {name: value.cpu() for name, value in snapshot(engine.module.named_parameters()).items()}
    assert all(torch.equal(value, params[name].to(value.dtype)) for name, value in shown.items())
    engine.destroy()
    return Trained(params, norms)


@functools.cache
def plain(precision: str, num_micro_batches: int, kind: type[nn.Module] = Uneven, on: str = "cpu") -> Trained:
    """Of plain torch in this process, which has no such device unless a test of a true one calls it;
    of the trained parameters.
    """
    dtype = DTYPES[precision]
    masters, model = make_model(kind).to(on), make_model(kind).to(on, dtype)
    optimizer = torch.optim.AdamW(trained_of(masters).values(), lr=0.01, weight_decay=0.1)
    norms = []
    for step in range(STEPS):
        model.zero_grad()
        for micro in batch(step).chunk(num_micro_batches):
            (loss_of(model, micro.to(on, dtype)) / num_micro_batches).backward()
        for master, param in zip(trained_of(masters).values(), trained_of(model).values(), strict=True):
            assert param.grad is not None
            master.grad = param.grad.float()
        norms.append(float(nn.utils.clip_grad_norm_(masters.parameters(), CLIPPING)))
        optimizer.step()
        with torch.no_grad():
            for master, param in zip(masters.parameters(), model.parameters(), strict=True):
                param.copy_(master)
    return Trained({name: param.detach().cpu() for name, param in trained_of(masters).items()}, norms)


def trained_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are, by name."""
    return {name: param for name, param in model.named_parameters() if param.requires_grad}


def name_of(case: Case) -> str:
    """For the test's name."""
    words = [f"{key}={value}" for key, value in case.zero.items()]
    return f"{case.stage}-{case.precision}-{case.world_size}-{case.num_micro_batches}-{' '.join(words)}"


def is_kept(case: Case) -> bool:
    """In make test: with two ranks and bf16."""
    return (case.precision, case.num_micro_batches, case.world_size) == ("bf16", 2, 2)


def few_cases() -> list[Any]:
    """Those that the table of test_parity.py has no value for. A case is one value, though it is a tuple."""
    return [
        pytest.param(case, id=name_of(case), marks=() if is_kept(case) else pytest.mark.exhaustive)
        for case in CASES
        if case.zero in NOT_IN_PARITY and case.precision == "bf16"
    ]


@pytest.mark.parametrize("case", few_cases())
def test_training_is_that_of_plain_torch(cuda_ranks: Ranks, tmp_path: Path, case: Case) -> None:
    expected = plain(case.precision, case.num_micro_batches)
    for found in cuda_ranks(_trained, case, str(tmp_path), world_size=case.world_size):
        assert worst_difference(found.params, expected.params) <= DRIFT[case.precision]
        for ours, theirs in zip(found.norms, expected.norms, strict=True):
            assert ours == pytest.approx(theirs, rel=NORM_DRIFT[case.precision])


# ---- at other times than as late as possible


def _in_order(rank: int, case: Case, order: str, seed: int) -> Trained:
    device().set_order(order, seed)
    try:
        return _trained(rank, case, "")
    finally:
        device().set_order("late", 0)


@pytest.mark.parametrize(
    ("order", "seed"),
    few([("early", 0), *(("random", seed) for seed in range(8))], lambda order, seed: seed < 2),
)
def test_values_do_not_depend_on_when_side_streams_work(cuda_ranks: Ranks, order: str, seed: int) -> None:
    case = Case(3, "bf16", 2, 2, {"offload_param": PINNED, "offload_optimizer": PINNED})
    for late, other in zip(
        cuda_ranks(_trained, case, "", world_size=2),
        cuda_ranks(_in_order, case, order, seed, world_size=2),
        strict=True,
    ):
        assert all(torch.equal(value, other.params[name]) for name, value in late.params.items())


def _with_late_reads(rank: int, case: Case, folder: str) -> Trained:
    device().set_pageable_async(True)
    try:
        return _trained(rank, case, folder)
    finally:
        device().set_pageable_async(False)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name_of(case), marks=() if is_kept else pytest.mark.exhaustive)
        for case, is_kept in (
            (Case(3, "bf16", 2, 2, {"offload_param": NVME, "offload_optimizer": NVME}), True),
            (Case(3, "bf16", 2, 2, {"offload_param": NVME}), False),
            (Case(2, "bf16", 2, 2, {"offload_optimizer": PLAIN}), True),
            (Case(3, "bf16", 2, 2, {"offload_param": PLAIN, "offload_optimizer": PLAIN}), False),
        )
    ],
)
def test_a_gpu_may_read_host_memory_that_is_not_pinned_late(
    cuda_ranks: Ranks, tmp_path: Path, case: Case
) -> None:
    """As one does that has the host's page tables: what it reads is neither freed nor changed before."""
    expected = plain(case.precision, case.num_micro_batches)
    for found in cuda_ranks(_with_late_reads, case, str(tmp_path), world_size=2):
        assert worst_difference(found.params, expected.params) <= DRIFT[case.precision]


# ---- faults that are planted


def _without_wait(self: Arrival) -> None:
    self._event = self._source = None
    then, self._then = self._then, None
    if then is not None:
        then()


def _with_fault(rank: int, fault: str) -> Trained:
    patch = pytest.MonkeyPatch()
    with patch.context() as change:
        if fault == "no wait on the device":
            change.setattr(Arrival, "wait_on_device", lambda self: None)
        if fault == "no wait on the host":
            change.setattr(Arrival, "wait", _without_wait)
        if fault == "no wait for a collective":
            from tests.fake_cuda.nccl import Work

            change.setattr(Work, "wait", lambda self, timeout=None: True)
        if fault == "freed at once":
            begin = Arrival.__init__

            def and_free(self: Arrival, source: Tensor, target: Tensor, *, then: Any = None) -> None:
                begin(self, source, target)
                if then is not None:
                    then()

            change.setattr(Arrival, "__init__", and_free)
        if fault == "no wait for what computes":
            change.setattr(torch.cuda.Stream, "wait_stream", lambda self, other: None)
        zero = {"offload_param": PINNED, "offload_optimizer": PINNED}
        return _trained(rank, Case(3, "bf16", dist.get_world_size(), 1, zero), "")


@pytest.mark.parametrize(
    ("fault", "world_size"),
    [
        ("no wait on the device", 1),  # where others send what was copied, waiting for that is enough
        ("no wait on the host", 2),
        ("no wait for a collective", 2),
        ("freed at once", 2),
        ("no wait for what computes", 2),
    ],
)
def test_a_fault_is_found(cuda_ranks: Ranks, fault: str, world_size: int) -> None:
    with pytest.raises(
        RankFailed, match=r"nothing has put the two in order|the host changed|nan|AssertionError"
    ):
        cuda_ranks(_with_fault, fault, world_size=world_size, deadline_s=30.0)


# ---- the same for memory that is let go of, or used, while a copy that blocks nothing is under way


def _park(rank: int, folder: str) -> None:
    """States go to host memory between steps, and others get their memory meanwhile."""
    engine, *_ = dslaunch.initialize(model=make_model(), config=config_of(Case(2, "bf16"), folder))
    train_steps(engine, steps=1)
    expected = values_of(engine)
    torch.cuda.synchronize()
    engine.offload_states(non_blocking=True)
    for of_kind in engine._model.parked_states._parked.values():
        for one in of_kind:
            torch.full((one._host.numel(),), 7, dtype=torch.uint8, device="cuda")
    engine.reload_states(non_blocking=True)
    assert worst_difference(values_of(engine), expected) == 0.0
    train_steps(engine, first=1, steps=1)
    engine.destroy()


def _save_beside(rank: int, folder: str) -> None:
    """The copy for a checkpoint is made before the next step, or after it if nothing waits for it."""
    config = config_of(Case(3, "bf16"), folder)
    expected = {}
    for is_saved in (False, True):  # who looks at values or norms waits for them
        engine, *_ = dslaunch.initialize(
            model=make_model(), config={**config, "checkpoint": {"async_save": True}}
        )
        _step(engine, 0)
        if is_saved:
            engine.save_checkpoint(folder)
            _step(engine, 1)
            _AFTER_STEP.set()
        else:
            expected = values_of(engine)
        engine.destroy()  # which waits for the save
    fresh, *_ = dslaunch.initialize(model=make_model(seed=1), config=config)
    fresh.load_checkpoint(folder)
    assert worst_difference(values_of(fresh), expected) == 0.0
    fresh.destroy()


def _step(engine: dslaunch.Engine, number: int) -> None:
    engine.backward(loss_of(engine, batch(number).to(engine.device).bfloat16()))
    engine.step()


_AFTER_STEP = threading.Event()  # of the rank that saves


def _swap(rank: int, folder: str) -> None:
    """Parameters and states come from a disk, through host memory that a GPU may read late."""
    zero = {"offload_param": NVME, "offload_optimizer": NVME}
    _with_late_reads(rank, Case(3, "bf16", 1, 1, zero), folder)


class _OfTorch(nn.Module):
    """Layers whose inputs torch's checkpoint() keeps."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(15, 15) for _ in range(4))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x.tanh(), use_reentrant=self.reentrant)
        return x


def _keep_inputs(rank: int, folder: str) -> None:
    """Inputs of checkpointed blocks wait in host memory: of ours, and of torch's in an engine's forward."""
    checkpointing.configure(None, checkpoint_in_cpu=True)
    blocks = [nn.Linear(15, 15).cuda() for _ in range(3)]
    for step in range(2):
        x = torch.full((4, 15), 1.0 + step, device="cuda", requires_grad=True)
        expected = x
        for block in blocks:
            x, expected = checkpointing.checkpoint(block, x), block(expected)
        assert torch.equal(*(torch.autograd.grad(one.sum(), blocks[0].weight)[0] for one in (x, expected)))
    for reentrant in (True, False):
        found = []
        for on_host in (True, False):
            checkpointing.configure(None, checkpoint_in_cpu=on_host)
            engine, *_ = dslaunch.initialize(model=_OfTorch(reentrant), config=make_config(stage=3))
            for step in range(2):
                x = torch.full((4, 15), 1.0 + step, device="cuda", requires_grad=True)
                y = engine(x)
                if not reentrant:  # a part of a backward, of which a copy to the device is left over
                    torch.autograd.grad(y.sum(), engine.module.layers[3].weight)
                    del y
                    gc.collect()
                    assert all(
                        not one.any() for one in [torch.zeros(4, 15, device="cuda") for _ in range(20)]
                    )
                    y = engine(x)
                engine.backward(y.pow(2).sum())
                engine.step()
            found.append(values_of(engine))
            engine.destroy()
        assert worst_difference(*found) == 0.0


def _not_in_order(source: Tensor, target: Tensor, **_: Any) -> Tensor:
    Arrival(source, target)
    return target


def _only_begun(direction: str) -> Callable[..., None]:
    plain = parked_states._copy

    def copy(source: Tensor, target: Tensor, *, non_blocking: bool) -> None:
        if (direction == "to the host") == source.is_cuda:
            _not_in_order(source, target)
        else:
            plain(source, target, non_blocking=non_blocking)

    return copy


def _taken_at_once(self: Any) -> Tensor:
    self._arrival = None
    tensor: Tensor = self._tensor
    return tensor


def _freed_at_once() -> Callable[..., None]:
    begin = Arrival.__init__

    def and_free(self: Arrival, source: Tensor, target: Tensor, *, then: Any = None) -> None:
        begin(self, source, target)
        if then is not None:
            then()

    return and_free


def _taken_after_the_step() -> Callable[[Any], None]:
    take = Snapshot.take_rest

    def late(self: Any) -> None:
        _AFTER_STEP.wait(20.0)
        take(self)

    return late


PATHS: dict[str, Callable[[int, str], None]] = {
    "parked states": _park,
    "a save beside training": _save_beside,
    "swaps to a disk": _swap,
    "inputs in host memory": _keep_inputs,
}
FAULTS: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "freed while it is parked": (
        "parked states",
        lambda change: change.setattr(parked_states, "_copy", _only_begun("to the host")),
    ),
    "used before it is back": (
        "parked states",
        lambda change: change.setattr(parked_states, "_copy", _only_begun("to the device")),
    ),
    "written before it is copied": (
        "a save beside training",
        lambda change: change.setattr(torch.cuda.Stream, "synchronize", lambda self: None),
    ),
    "changed before it is copied": (
        "a save beside training",
        lambda change: (
            change.setattr(Saver, "before_change", lambda self: None),
            change.setattr(Snapshot, "take_rest", _taken_after_the_step()),
        )[0],
    ),
    "read anew before it is copied": (
        "swaps to a disk",
        lambda change: change.setattr(Arrival, "__init__", _freed_at_once()),
    ),
    "brought back before it is there": (
        "inputs in host memory",
        lambda change: change.setattr(host_inputs.HostInputs, "_let_leave", lambda self, at_most: None),
    ),
    "computed anew before it is back": (
        "inputs in host memory",
        lambda change: change.setattr(host_inputs._Coming, "take", _taken_at_once),
    ),
    "given back before it is there": (
        "inputs in host memory",
        lambda change: change.setattr(host_inputs._Coming, "__del__", lambda self: None),
    ),
}


def _along(rank: int, path: str, fault: str | None, folder: str) -> None:
    _AFTER_STEP.clear()
    with pytest.MonkeyPatch.context() as change:
        if fault is not None:
            FAULTS[fault][1](change)
        PATHS[path](rank, folder)


@pytest.mark.parametrize("path", PATHS)
def test_copies_that_block_nothing_are_in_order(cuda_ranks: Ranks, tmp_path: Path, path: str) -> None:
    cuda_ranks(_along, path, None, str(tmp_path), world_size=1)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_memory_that_a_copy_still_uses_is_found(cuda_ranks: Ranks, tmp_path: Path, fault: str) -> None:
    with pytest.raises(
        RankFailed, match=r"nothing has put the two in order|the host changed|nan|AssertionError"
    ):
        cuda_ranks(_along, FAULTS[fault][0], fault, str(tmp_path), world_size=1, deadline_s=60.0)


# ---- torch's own detector of races, which a machine with a GPU is asked for, too


def _with_torchs_detector(rank: int, fault: str) -> None:
    """It sees nothing in a right training, and the fault in one that has it."""
    from torch.cuda import _sanitizer

    device().set_finds_conflicts(False)  # the fake device would find the fault first
    _sanitizer.enable_cuda_sanitizer()
    _with_fault(rank, "none")
    if fault != "none":
        with pytest.raises(_sanitizer.CUDASanitizerErrors, match="detected 1 error"):
            _with_fault(rank, fault)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "world_size"),
    [
        ("no wait on the device", 1),
        pytest.param("no wait for what computes", 1, marks=pytest.mark.exhaustive),
        pytest.param("none", 2, marks=pytest.mark.exhaustive),
    ],
)
def test_torchs_own_detector_sees_a_fault_and_nothing_where_there_is_none(
    cuda_ranks: Ranks, fault: str, world_size: int
) -> None:
    """Of the faults above it sees those between streams: it knows neither host memory nor collectives."""
    cuda_ranks.stop()  # torch's detector stays in a process for good
    try:
        cuda_ranks(_with_torchs_detector, fault, world_size=world_size)
    finally:
        cuda_ranks.stop()


# ---- checkpoints, zero.Init, and others


def _saved(rank: int, stage: int, is_async: bool, folder: str) -> tuple[Trained, Trained]:
    config = config_of(Case(stage, "bf16"), folder)
    config["checkpoint"] = {"async_save": is_async}
    engine, *_ = dslaunch.initialize(model=make_model(), config=config)
    train_steps(engine)
    engine.save_checkpoint(folder)
    engine.save_checkpoint(folder, tag="again")  # in the memory of the first
    at_the_save = values_of(engine)
    train_steps(engine, first=STEPS)
    engine.save_checkpoint(folder, tag="last")
    fresh, *_ = dslaunch.initialize(model=make_model(seed=1), config=config)
    fresh.load_checkpoint(folder, tag="again")
    assert all(torch.equal(value, at_the_save[name]) for name, value in values_of(fresh).items())
    own, theirs = Trained(values_of(engine), []), Trained({}, train_steps(fresh, first=STEPS))
    theirs = Trained(values_of(fresh), theirs.norms)
    engine.destroy()
    fresh.destroy()
    return own, theirs


@pytest.mark.parametrize(("stage", "is_async"), [(0, True), (1, True), (2, False), (3, True)])
def test_a_checkpoint_is_continued(cuda_ranks: Ranks, tmp_path: Path, stage: int, is_async: bool) -> None:
    for own, theirs in cuda_ranks(_saved, stage, is_async, str(tmp_path), world_size=2):
        assert all(torch.equal(value, theirs.params[name]) for name, value in own.params.items())


class Wide(nn.Module):
    """Two units of a few pages each."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(7 if index == 0 else 65, 65) for index in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def _saved_in_boxes(rank: int, folder: str, order: str) -> tuple[list[int], int, int]:
    """Return how many boxes were on their way whenever one was written, and the bytes of pinned memory in use
    before and after.
    """
    engine, *_ = dslaunch.initialize(model=make_model(Wide), config=config_of(Case(2, "bf16"), folder))
    train_steps(engine)
    expected = values_of(engine)
    ahead: list[int] = []
    save_box, num_saved = writer._save_box, 0

    def counted(values: Tensor, sink: Any) -> None:
        nonlocal num_saved
        num_saved += 1
        ahead.append(device().copies()["device to host"][0] - num_saved)
        save_box(values, sink)

    gc.collect()
    before = pinned_in_use()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "BOX_BYTES", 4096)
        patch.setattr(writer, "_save_box", counted)
        torch.cuda.synchronize()
        device().clear_counters()
        device().set_order(order, 0)
        try:
            engine.save_checkpoint(folder)
        finally:
            device().set_order("late", 0)
    after = pinned_in_use()
    fresh, *_ = dslaunch.initialize(model=make_model(Wide, seed=1), config=config_of(Case(2, "bf16"), folder))
    fresh.load_checkpoint(folder)
    assert all(torch.equal(value, expected[name]) for name, value in values_of(fresh).items())
    engine.destroy()
    fresh.destroy()
    return ahead, before, after


def pinned_in_use() -> int:
    """Bytes that tensors have."""
    _ = PINNED_MEMORY.num_bytes  # which looks what was let go of
    return sum(block.num_bytes for block in PINNED_MEMORY._in_use.values())


@pytest.mark.parametrize("order", ["late", "early"])
def test_a_save_copies_the_next_box_while_one_is_written(
    cuda_ranks: Ranks, tmp_path: Path, order: str
) -> None:
    """Through pinned memory that is given back."""
    for ahead, before, after in cuda_ranks(_saved_in_boxes, str(tmp_path), order, world_size=2):
        last_of_shelf = min(ahead)  # and what else was copied before
        assert set(ahead) == {last_of_shelf, last_of_shelf + 1}
        assert ahead.count(last_of_shelf) <= 3 < 10 < len(ahead)
        assert before == after


class Checkpointed(nn.Module):
    """Whose blocks are computed twice, dropout included."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 15)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(15, 17), nn.Dropout(0.3), nn.Tanh(), nn.Linear(17, 15)) for _ in range(3)
        )
        self.last = nn.Linear(15, 1)
        self.is_checkpointed = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            if self.is_checkpointed:
                x = x + torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            else:
                x = x + block(x)
        result: Tensor = self.last(x)
        return result


def _checkpointed(rank: int, stage: int) -> bool:
    found = []
    for is_checkpointed in (True, False):
        model = make_model(Checkpointed)
        model.is_checkpointed = is_checkpointed
        engine, *_ = dslaunch.initialize(model=model, config=config_of(Case(stage, "fp32"), ""))
        torch.cuda.manual_seed(5)
        train_steps(engine)
        found.append(values_of(engine))
        engine.destroy()
    return all(torch.equal(value, found[1][name]) for name, value in found[0].items())


@pytest.mark.parametrize("stage", [2, 3])
def test_recomputed_activations_change_no_bit(cuda_ranks: Ranks, stage: int) -> None:
    assert cuda_ranks(_checkpointed, stage, world_size=2) == [True, True]


def _begun_in_shards(
    rank: int, section: dict[str, Any], arguments: dict[str, Any]
) -> tuple[Trained, set[str]]:
    """Return what is trained, and the kinds of devices on which values lie before `initialize()`."""
    config = config_of(Case(3, "fp32"), "")
    config["zero_optimization"] |= section
    with dslaunch.zero.Init(config_dict_or_path=config, dtype=torch.float32, **arguments):
        model = make_model()
    records = map(early_of, model.parameters())
    where = {record.own_values.device.type for record in records if record is not None}
    engine, *_ = dslaunch.initialize(model=model, config=config)
    norms = train_steps(engine)
    trained = Trained(values_of(engine), norms)
    engine.destroy()
    return trained, where


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_model_that_begins_in_shards_trains_the_same(cuda_ranks: Ranks, world_size: int) -> None:
    """Where parameters are offloaded, the model is not on the device before the engine has it, either."""
    offloaded: dict[str, Any] = {"offload_param": {"device": "cpu"}}
    for section, arguments in (({}, {}), (offloaded, {}), ({}, {"remote_device": "cpu"})):
        found = cuda_ranks(_begun_in_shards, section, arguments, world_size=world_size)
        expected, _ = found[0]
        for trained, where in found:
            assert trained.norms == expected.norms
            assert worst_difference(trained.params, expected.params) == 0.0
            assert where == ({"cpu"} if section or arguments else {"cuda"})


def _no_trained_twice(rank: int) -> int:
    engine, *_ = dslaunch.initialize(model=make_model(), config=config_of(Case(3, "bf16"), ""))
    train_steps(engine)
    engine.eval()
    with torch.no_grad():
        for _ in range(3):
            engine(batch(0, size=GLOBAL_BATCH).to(engine.device).bfloat16())
    engine.train()
    train_steps(engine, first=STEPS)
    engine.destroy()
    return 1


def test_evaluation_between_steps(cuda_ranks: Ranks) -> None:
    assert cuda_ranks(_no_trained_twice, world_size=2) == [1, 1]


# ---- adapters beside a frozen model, and generation


class Adapted(nn.Module):
    """A linear layer that is frozen, and two small matrices beside it, as PEFT puts them."""

    def __init__(self, base_layer: nn.Linear, rank: int = 3) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.Linear(base_layer.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base_layer.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base_layer(x) + self.lora_B(self.lora_A(x)) * 2.0
        return result


class WithAdapters(Uneven):
    """Only the adapters in the blocks are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        for block in self.blocks:
            assert isinstance(block, nn.Sequential)
            for index in (0, 2):
                base = block[index]
                assert isinstance(base, nn.Linear)
                block[index] = Adapted(base)


def _adapted(rank: int, case: Case) -> tuple[Trained, dict[str, Tensor]]:
    engine, *_ = dslaunch.initialize(model=make_model(WithAdapters), config=config_of(case, ""))
    norms = train_steps(engine)
    masters = {
        name: dslaunch.zero.safe_get_full_fp32_param(param).cpu()
        for name, param in trained_of(engine.module).items()
    }
    shown = {name: value.cpu() for name, value in snapshot(engine.module.named_parameters()).items()}
    engine.destroy()
    return Trained(masters, norms), {name: shown[name] for name in shown if name not in masters}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name_of(case), marks=() if is_kept else pytest.mark.exhaustive)
        for case, is_kept in (
            (Case(0, "bf16", 2, 2), False),
            (Case(1, "bf16", 2, 2), False),
            (Case(2, "bf16", 2, 2), True),
            (Case(3, "fp32", 2, 1), False),
            (Case(3, "bf16", 2, 2), True),
            (Case(3, "bf16", 2, 2, {"offload_param": PINNED, "offload_optimizer": PINNED}), True),
        )
    ],
)
def test_adapters_beside_a_frozen_model_are_trained_as_by_plain_torch(cuda_ranks: Ranks, case: Case) -> None:
    expected = plain(case.precision, case.num_micro_batches, WithAdapters)
    begun = dict(make_model(WithAdapters).to(DTYPES[case.precision]).named_parameters())
    for found, frozen in cuda_ranks(_adapted, case, world_size=2):
        assert worst_difference(found.params, expected.params) <= DRIFT[case.precision]
        for ours, theirs in zip(found.norms, expected.norms, strict=True):
            assert ours == pytest.approx(theirs, rel=NORM_DRIFT[case.precision])
        assert frozen.keys() | found.params.keys() == begun.keys()
        assert all(torch.equal(value, begun[name]) for name, value in frozen.items())


def _texts(step: int, world_size: int) -> Tensor:
    return torch.randint(11, (2 * world_size, 5), generator=torch.Generator().manual_seed(step))


def _text_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def _generated(rank: int) -> dict[str, Tensor]:
    engine, *_ = dslaunch.initialize(model=Writer(), config=config_of(Case(3, "fp32"), ""))
    whole = Writer().eval()
    for number in range(3):
        own = _texts(number, 2).chunk(2)[rank].to(engine.device)
        engine.backward(_text_loss(engine, own))
        engine.step()
        shown = snapshot(engine.module.named_parameters())
        whole.load_state_dict({name: value.cpu() for name, value in shown.items()})
        prompt = torch.tensor([[1, 2, 3, 4, 5]])[:, : 2 + 3 * rank]
        engine.eval()
        # Each forward is a collective: ranks call it equally often, with texts as long as they are.
        made = engine.module.generate(prompt.to(engine.device), 6)
        assert torch.equal(made.cpu(), whole.generate(prompt, 6))
        with unwrap_model_for_generation(engine) as model:
            made = model.module.generate(prompt.to(engine.device), 2 + 5 * rank)
        assert torch.equal(made.cpu(), whole.generate(prompt, 2 + 5 * rank))
        engine.train()
    params = values_of(engine)
    engine.destroy()
    return params


def test_generation_between_steps_is_that_of_a_whole_model(cuda_ranks: Ranks) -> None:
    """And training goes on as if there had been none."""
    expected = Writer()
    optimizer = torch.optim.AdamW(expected.parameters(), lr=0.01, weight_decay=0.1)
    for number in range(3):
        optimizer.zero_grad()
        _text_loss(expected, _texts(number, 2)).backward()
        nn.utils.clip_grad_norm_(expected.parameters(), CLIPPING)
        optimizer.step()
    for found in cuda_ranks(_generated, world_size=2):
        assert worst_difference(found, snapshot(expected.named_parameters())) <= DRIFT["fp32"]
