"""Checkpoints that DeepSpeed itself wrote: continued here at other stages and worlds, with the same
elements and losses.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import dslaunch
from dslaunch import CheckpointError
from dslaunch.runtime.checkpoint.deepspeed.pickle_file import load_file
from dslaunch.runtime.checkpoint.deepspeed.reader import DeepSpeedReader
from dslaunch.runtime.checkpoint.inspect.listing import rows
from dslaunch.runtime.checkpoint.opened import open_checkpoint
from dslaunch.runtime.checkpoint.storage.url_store import open_store
from dslaunch.runtime.compat.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tests.runtime.checkpoint.deepspeed_cases import (
    AFTER,
    BEFORE,
    CASES,
    CLIENT_STATE,
    CLIPPING,
    NUM_RANKS,
    TAG,
    WARMUP,
    Case,
    make_tied,
)
from tests.runtime.checkpoint.states import whole_state
from tests.runtime.models import GLOBAL_BATCH, assert_same_bits, train_engine
from tests.runtime.ranks import Ranks

DEEPSPEED = Path(sys.prefix) / "deepspeed"  # `make setup` puts the package there
WORKER = Path(__file__).parent / "deepspeed_worker.py"
DEADLINE_S = 300.0  # it imports DeepSpeed twice, on a machine that may do much else
BY_NAME = {case.name: case for case in CASES}

# Three steps in float32, whose kernels and sums over ranks round in another order than torch's, 2^-24 each.
# Seen: 1.9e-7 of the loss.
SAME_FLOAT32 = 1e-6
# In 16 bits both compute the same; a weight whose master lies in the middle of two may be rounded to the
# other, 2^-8 apart. Seen: 0.
SAME_16_BITS = 2.0**-8
SAME_LR = 2.0**-50  # the schedule's logarithms are divided here and multiplied by an inverse there


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of all cases, from one start of two ranks of DeepSpeed."""
    if not (DEEPSPEED / "deepspeed" / "runtime").is_dir():
        reason = f"no DeepSpeed in {DEEPSPEED}; `make setup` puts it there"
        if os.environ.get("DSLAUNCH_LAB") == "required":
            pytest.fail(reason)
        pytest.skip(reason)
    root = tmp_path_factory.mktemp("deepspeed")
    checkout = Path(__file__).parents[3]
    workers = []
    for rank in range(NUM_RANKS):
        env = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(NUM_RANKS),
            "DS_ACCELERATOR": "cpu",
            "PYTHONPATH": os.pathsep.join((str(DEEPSPEED), str(checkout))),
        }
        with (root / f"log-{rank}").open("wb") as log:
            command = [sys.executable, "-W", "ignore", str(WORKER), str(root)]
            workers.append(subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [worker.wait(DEADLINE_S) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    logs = "\n".join((root / f"log-{rank}").read_text(errors="replace")[-4000:] for rank in range(NUM_RANKS))
    assert codes == [0] * NUM_RANKS, logs
    return root


class Truth(NamedTuple):
    """What DeepSpeed's own process held."""

    tensors: dict[str, Tensor]
    losses: list[list[float]]  # of the next steps, by rank
    lr: list[float]
    scale: float
    skipped: int
    steps: int  # at stage 0 in 16 bits DeepSpeed makes one with zeros before the first


def _truth(folder: Path) -> Truth:
    found = torch.load(folder / "truth.pt", weights_only=True)
    return Truth(**{name: found[name] for name in Truth._fields})


def _engine(
    case: Case,
    stage: int,
    *,
    zero: dict[str, Any] | None = None,
    optimizer: str = "AdamW",
    scheduler: dict[str, Any] = WARMUP,
) -> Any:
    model, groups = make_tied(seed=99)
    precision = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(case.dtype)
    config: dict[str, Any] = {
        "train_batch_size": GLOBAL_BATCH,
        "gradient_clipping": CLIPPING,
        "scheduler": scheduler,
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "reduce_bucket_size": 600,
            **(zero or {}),
        },
    }
    if precision:
        config[precision] = {"enabled": True, **case.more.get("fp16", {})}
    client = torch.optim.SGD(groups, lr=0.3, momentum=0.9) if case.sgd else None
    if client is None:
        config["optimizer"] = {"type": optimizer, "params": {"lr": 0.5}}
    return dslaunch.initialize(model=model, model_parameters=groups, optimizer=client, config=config)[0]


class Loaded(NamedTuple):
    state: dict[str, Tensor]
    losses: list[float]
    lr: list[float]
    scale: float
    counters: tuple[int, ...]
    client_state: dict[str, Any]
    path: str


def _load(rank: int, folder: str, case: Case, stage: int, zero: dict[str, Any], tag: str | None) -> Loaded:
    engine = _engine(case, stage, zero=zero)
    train_engine(engine, steps=1, first=50, dtype=case.dtype)  # whatever was there must be gone
    path, client_state = engine.load_checkpoint(folder, tag=tag)
    state, lr, scale = whole_state(engine), engine.get_lr(), engine.optimizer.loss_scale
    assert torch.equal(state.pop("again.weight"), state["square.weight"])  # tied
    counters = (engine.global_steps, engine.global_samples, engine.skipped_steps, engine.optimizer.num_steps)
    losses = train_engine(engine, steps=AFTER, first=BEFORE, dtype=case.dtype)
    return Loaded(state, losses, lr, scale, counters, client_state, path)


COSINE = {"type": "CosineAnnealingLR", "params": {"T_max": 9}}  # of torch
CPU_OFFLOAD = {"offload_optimizer": {"device": "cpu"}}


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stage", "world", "zero", "is_universal"),
    [
        ("stage0-bf16", 1, 2, {}, False),
        ("stage1", 3, 2, {}, True),
        ("stage1-sgd", 2, 2, {}, False),
        ("stage2", 3, 2, CPU_OFFLOAD, False),
        ("stage2", 1, 4, {}, False),
        ("stage2-fp16", 2, 2, {}, False),
        ("stage2-bf16", 0, 2, {}, False),
        ("stage3", 3, 1, {}, False),
        ("stage3", 2, 2, {}, True),
        ("stage3-bf16", 2, 2, {}, False),
    ],
)
def test_what_deepspeed_saved_is_continued(
    ranks: Ranks, made: Path, name: str, stage: int, world: int, zero: dict[str, Any], is_universal: bool
) -> None:
    """Every element is equal to the bit; the next losses are DeepSpeed's own where as many ranks
    share the batches.
    """
    case, truth = BY_NAME[name], _truth(made / name)
    tag = f"{TAG}_universal" if is_universal else None
    results = ranks(_load, str(made / name), case, stage, zero, tag, world_size=world)
    tolerance = SAME_FLOAT32 if case.dtype == torch.float32 else SAME_16_BITS
    for rank, loaded in enumerate(results):
        assert_same_bits(loaded.state, truth.tensors)
        assert loaded.lr == pytest.approx(truth.lr, rel=SAME_LR)
        assert loaded.scale == truth.scale
        assert loaded.counters == (BEFORE, BEFORE * GLOBAL_BATCH, truth.skipped, truth.steps)
        assert loaded.client_state == CLIENT_STATE
        assert loaded.path == str(made / name / (tag or TAG))
        if world == NUM_RANKS:
            differences = [abs(a - b) for a, b in zip(loaded.losses, truth.losses[rank], strict=True)]
            assert max(differences) <= tolerance * max(truth.losses[rank]), (
                loaded.losses,
                truth.losses[rank],
            )


@pytest.mark.exhaustive
@pytest.mark.slow
def test_its_checkpoints_are_listed_with_what_they_are(made: Path) -> None:
    for name, case in BY_NAME.items():
        found = rows(open_store(made / name))
        assert [row.tag for row in found if row.is_latest] == [TAG], name
        for row in found:
            assert (row.state, row.problem) == ("DeepSpeed", ""), (name, row)
            assert (row.step, row.world_size, row.zero_stage) == (BEFORE, NUM_RANKS, case.stage), (name, row)


def _load_partly(rank: int, folder: str) -> list[str]:
    said = []
    case = BY_NAME["stage1"]
    engine = _engine(case, 1, optimizer="Lion")
    with pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint(folder)
    said.append(str(caught.value))
    engine.load_checkpoint(folder, load_optimizer_states=False)
    assert engine.optimizer.num_steps == 0
    assert engine.global_steps == BEFORE
    taken: dict[str, Any] = {}
    engine.load_checkpoint(
        folder, load_optimizer_states=False, custom_load_fn=lambda src, dst: taken.update(src)
    )
    truth = _truth(Path(folder)).tensors
    names = set(dict(engine.module.state_dict()))
    assert set(taken) == names
    assert all(torch.equal(taken[name], truth.get(name, truth["square.weight"])) for name in names)
    with pytest.raises(CheckpointError) as caught:
        _engine(case, 1, scheduler=COSINE).load_checkpoint(folder)
    said.append(str(caught.value))
    return said


@pytest.mark.exhaustive
@pytest.mark.slow
def test_weights_can_be_taken_alone_by_another_optimizer(ranks: Ranks, made: Path) -> None:
    assert ranks(_load_partly, str(made / "stage1"), world_size=1)[0] == [
        (
            "the checkpoint's optimizer is AdamW, this run's is Lion; load with load_optimizer_states=False "
            "to take the weights alone"
        ),
        "the checkpoint's scheduler remembers last_batch_iteration, this run's CosineAnnealingLR T_max, "
        "_get_lr_called_within_step, _is_initial, _last_lr, _step_count and 3 more; load with "
        "load_lr_scheduler_states=False",
    ]


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_exported_weights_are_those_of_deepspeeds_own_script(made: Path, name: str) -> None:
    case, folder = BY_NAME[name], made / name
    expected = torch.load(folder / "truth.pt", weights_only=True).get("exported")
    if expected is None:  # it refuses; what its process held is as good
        truth = _truth(folder).tensors
        masters = "master" if case.stage else "none"  # at stage 0 no file says which is which
        expected = {
            key: truth.get(f"{key} {masters}", value).float()
            for key, value in truth.items()
            if " " not in key
        }
        expected |= {"calls": truth["calls"], "again.weight": expected["square.weight"]}
    frozen = ("frozen.weight", "frozen.bias")  # DeepSpeed's script forgets them at stage 1
    expected |= {key: _truth(folder).tensors[key] for key in frozen if key not in expected}
    for tag in [TAG, *([f"{TAG}_universal"] if case.is_universal else [])]:
        found = get_fp32_state_dict_from_zero_checkpoint(folder, tag)
        assert all(value.dtype == torch.float32 for key, value in found.items() if key != "calls")
        assert found["again.weight"] is found["square.weight"]
        assert_same_bits(
            found, {key: value.float() if key != "calls" else value for key, value in expected.items()}
        )
    if name == "stage3":
        trained = get_fp32_state_dict_from_zero_checkpoint(folder, exclude_frozen_parameters=True)
        assert set(expected) - set(trained) == {"frozen.weight", "frozen.bias"}


@pytest.mark.exhaustive
@pytest.mark.slow
def test_only_the_files_that_hold_what_is_wanted_are_opened(made: Path) -> None:
    """Of the first parameter, which lies in rank 0's partition, rank 1's file is not touched."""
    reader = DeepSpeedReader(made / "stage2-bf16" / TAG)
    reader.tensor("optimizer.state.first.weight.exp_avg")
    assert reader._folder.optimizer.cache_info().currsize == 1
    reader.tensor("optimizer.state.last.weight.exp_avg")
    assert reader._folder.optimizer.cache_info().currsize == 2


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "change", "beginning"),
    [
        (
            "stage1",
            lambda tag: (tag / "mp_rank_01_model_states.pt").touch(),
            "{tag}/mp_rank_01_model_states.pt is of a tensor or",
        ),
        (
            "stage1",
            lambda tag: (tag / "layer_0_expert_1_mp_rank_00_model_states.pt").touch(),
            (
                "{tag}/layer_0_expert_1_mp_rank_00_model_states.pt: experts in files of their own (MoE) "
                "cannot be read here"
            ),
        ),
        (
            "stage1",
            lambda tag: (tag / "layer_00-model_states.pt").touch(),
            (
                "{tag}/layer_00-model_states.pt: layers in files of their own (pipeline parallelism) cannot "
                "be read here"
            ),
        ),
        (
            "stage3",
            lambda tag: (tag / "offloaded_tensors").mkdir(),
            "{tag}/offloaded_tensors: optimizer states that NVMe offload",
        ),
        (
            "stage3",
            lambda tag: (tag / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink(),
            "{tag} has 1 files *_optim_states.pt and was written by 2 ranks",
        ),
        (
            "stage3",
            lambda tag: (tag / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink(),
            "{tag} has 1 files *_model_states.pt and was written by 2 ranks",
        ),
        (
            "stage1",
            lambda tag: (tag / "zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink(),
            "{tag} has no *_optim_states.pt of rank 0",
        ),
        (
            "stage3",
            lambda tag: [path.unlink() for path in tag.glob("*_optim_states.pt")],
            "{tag} has no *_optim_states.pt, where ZeRO stage 3 keeps all weights",
        ),
        (
            "stage1",
            lambda tag: torch.save({"module": {}}, tag / "mp_rank_00_model_states.pt"),
            "{tag} is not as DeepSpeed 0.19 writes checkpoints: KeyError: ",
        ),
        (
            "stage1",
            lambda tag: (tag / "mp_rank_00_model_states.pt").write_bytes(b"PK\x03\x04 and no more"),
            "{tag}/mp_rank_00_model_states.pt cannot be read: ",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(
    made: Path, tmp_path: Path, name: str, change: Callable[[Path], object], beginning: str
) -> None:
    tag = tmp_path / TAG
    shutil.copytree(made / name / TAG, tag)
    change(tag)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(open_store(tmp_path), TAG)
    assert str(caught.value).startswith(beginning.format(tag=tag))


class Runs:
    """A pickle that runs a program when it is read by one that trusts it."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (self.command,)


class Unknown:
    """A class of a user's program."""


@pytest.mark.parametrize("is_evil", [True, False])
def test_a_class_that_is_not_deepspeeds_is_refused_by_name_and_not_run(tmp_path: Path, is_evil: bool) -> None:
    path, trace = tmp_path / "mp_rank_00_model_states.pt", tmp_path / "trace"
    torch.save({"module": {}, "mine": Runs(f"touch {trace}") if is_evil else Unknown()}, path)
    with pytest.raises(CheckpointError) as caught:
        load_file(path)
    named = f"{os.system.__module__}.system" if is_evil else f"{__name__}.Unknown"
    assert str(caught.value).startswith(
        f"{path} holds a {named}, which is none of the classes that DeepSpeed's"
    )
    assert not trace.exists()


def test_plain_values_of_programs_are_read(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    state = {
        "args": argparse.Namespace(width=7),
        "path": tmp_path,
        "order": OrderedDict(a=1),
        "best": numpy.float64(0.5),
        "drawn": numpy.arange(3),
    }
    torch.save(state, tmp_path / "file.pt")
    found = load_file(tmp_path / "file.pt")
    assert (found["args"].width, found["path"], found["order"]) == (7, str(tmp_path), {"a": 1})
    assert (float(found["best"]), found["drawn"].tolist()) == (0.5, [0, 1, 2])


def _anonymous_bytes() -> int:
    """Memory of this process that is no copy of a file's."""
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:")
    )
    return int(line.split()[1]) * 1024


def test_tensors_stay_on_the_disk_until_they_are_used(tmp_path: Path) -> None:
    path, num_bytes = tmp_path / "file.pt", 64 << 20
    torch.save({"big": torch.ones(num_bytes // 4)}, path)
    before = _anonymous_bytes()
    big = load_file(path)["big"]
    assert big[-1] == big[0] == 1
    assert big.sum() == num_bytes // 4  # it is read through
    assert _anonymous_bytes() - before < num_bytes // 8
