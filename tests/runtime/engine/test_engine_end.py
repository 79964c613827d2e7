"""What is left when an engine has ended, and that there is only one of it."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dslaunch
from dslaunch import CheckpointError, ConfigError
from dslaunch.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tests.exhaustive import few
from tests.runtime.models import (
    assert_same_bits,
    batch,
    loss_of,
    make_config,
    make_model,
    snapshot,
    train_engine,
    train_plain,
    worst_difference,
)
from tests.runtime.ranks import Ranks
from tests.runtime.training.test_skipped import Lines
from tests.runtime.training.test_stages import FP32_DRIFT

# Everything that has its own process groups: sharded parameters, and meshes of two axes.
CONFIGS: tuple[dict[str, Any], ...] = (
    {"stage": 3, "stage3_param_persistence_threshold": 0},
    {"stage": 3, "mics_shard_size": 2},
    {"stage": 3, "zero_hpz_partition_size": 2},
)


def _num_open() -> tuple[int, int]:
    """Descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def _live(section: dict[str, Any]) -> dslaunch.Engine:
    config = make_config()
    config["zero_optimization"] |= section
    engine = dslaunch.initialize(model=make_model(), config=config)[0]
    engine.backward(loss_of(engine, batch(0, size=3)))
    engine.step()
    engine.destroy()
    return engine


def _left_behind(rank: int, section: dict[str, Any]) -> tuple[int, int]:
    """What three engines more leave, though the program still has them."""
    engines = [_live(section)]
    gc.collect()
    fds, threads = _num_open()
    engines += [_live(section) for _ in range(3)]
    gc.collect()
    more_fds, more_threads = _num_open()
    return more_fds - fds, more_threads - threads


@pytest.mark.parametrize("section", CONFIGS, ids=str)
def test_a_destroyed_engine_leaves_no_descriptor_and_no_thread(ranks: Ranks, section: dict[str, Any]) -> None:
    for fds, threads in ranks(_left_behind, section, world_size=4):
        assert fds <= 1  # one that torch opens and closes by itself
        assert threads <= 1


def _copies(rank: int) -> list[str]:
    engine = dslaunch.initialize(model=make_model(), config=make_config())[0]
    said = []
    actions: tuple[Callable[[Any], object], ...] = (copy.deepcopy, copy.copy, pickle.dumps)
    for action in actions:
        with pytest.raises(ConfigError) as caught:
            action(engine)
        said.append(str(caught.value))
    return said


def test_an_engine_is_not_copied_and_its_refusal_says_what_to_take(ranks: Ranks) -> None:
    for text in ranks(_copies, world_size=1)[0]:
        assert text.startswith("the engine was given to copy or pickle, ")
        assert "engine.module_state_dict()" in text


@pytest.mark.parametrize("kind", [ValueError, AssertionError, RuntimeError])
@pytest.mark.parametrize("error", [ConfigError, CheckpointError])
def test_what_a_program_for_deepspeed_catches_is_caught(
    error: type[Exception], kind: type[Exception]
) -> None:
    with warnings.catch_warnings(), pytest.raises(kind, match="said"):
        raise error("said")


def test_where_no_checkpoint_is_deepspeeds_file_not_found_is_caught(tmp_path: Any) -> None:
    for tag in (None, "t"):
        with pytest.raises(FileNotFoundError, match=str(tmp_path)) as caught:
            get_fp32_state_dict_from_zero_checkpoint(tmp_path, tag)
        assert isinstance(caught.value, CheckpointError)


def _two_engines(rank: int, stage: int) -> dict[str, Tensor]:
    model = make_model()
    config = make_config(stage=stage)
    first = dslaunch.initialize(model=model, config=config)[0]
    engine = dslaunch.initialize(model=model, config=config)[0]
    for attempt in (
        lambda: first(batch(0)),
        lambda: first.backward(loss_of(engine, batch(0))),
        first.step,
        lambda: first.save_checkpoint("nowhere"),
        lambda: first.load_checkpoint("nowhere"),
        first.module_state_dict,
    ):
        with pytest.raises(ConfigError, match=r"were given to another initialize\(\), which trains"):
            attempt()
    engine.zero_grad()
    train_engine(engine, steps=1)
    first.destroy()  # which changes nothing of the other
    train_engine(engine, steps=1, first=1)
    return snapshot(model.named_parameters())


def _failed(rank: int, is_late: bool) -> tuple[list[str], str]:
    """A second initialize() of a model fails; return what it and the first engine say, and train again."""
    model = make_model()
    config = make_config(stage=1)
    first = dslaunch.initialize(model=model, config=config)[0]
    stranger = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(make_model().parameters(), lr=0.1), 1)
    late = {"training_data": iter(())}  # no loader can be made of it
    given: dict[str, Any] = late if is_late else {"lr_scheduler": stranger}
    with Lines() as lines, pytest.raises((ConfigError, TypeError)):
        dslaunch.initialize(model=model, config=config, **given)
    said = ""
    try:
        train_engine(first, steps=1)
    except ConfigError as error:
        said = str(error)
        train_engine(dslaunch.initialize(model=model, config=config)[0], steps=1)
    return lines.found, said


@pytest.mark.parametrize("is_late", [False, True])
def test_an_initialize_that_fails_leaves_the_engine_before_or_says_what_is_lost(
    ranks: Ranks, is_late: bool
) -> None:
    for lines, said in ranks(_failed, is_late, world_size=2):
        if is_late:
            assert [line.partition(",")[0] for line in lines] == [
                "initialize() has failed after it had taken over parameters of another engine"
            ]
            assert "had taken over parameters of this engine, and failed:" in said
        else:
            assert (lines, said) == ([], "")


def _bare_backward(rank: int) -> dict[str, Tensor]:
    """Each of two engines divides the gradients of a backward that it does not run; the first lets go."""
    model = make_model()
    config = make_config(stage=0, gradient_accumulation_steps=2)
    engines = [dslaunch.initialize(model=model, config=config)[0] for _ in range(2)]
    for micro_batch in batch(0).chunk(2):
        loss_of(engines[1], micro_batch.chunk(2)[rank]).backward()  # type: ignore[no-untyped-call]
        engines[1].step()
    return {"norm": torch.tensor(engines[1].get_global_grad_norm())}


def test_an_engine_whose_model_has_another_leaves_a_bare_backward_alone(ranks: Ranks) -> None:
    plain = make_model()
    (norm,) = train_plain(plain, torch.optim.SGD(plain.parameters(), lr=0.0), steps=1)
    for found in ranks(_bare_backward, world_size=2):
        assert float(found["norm"]) == pytest.approx(norm, rel=1e-5)


def _shared_and_frozen(rank: int) -> None:
    trunk = nn.Linear(7, 15).requires_grad_(False)
    engines = [
        dslaunch.initialize(model=nn.Sequential(trunk, nn.Linear(15, 1)), config=make_config(stage=2))[0]
        for _ in range(2)
    ]
    for engine in engines:
        train_engine(engine, steps=1)


def test_a_frozen_part_may_be_in_two_engines(ranks: Ranks) -> None:
    ranks(_shared_and_frozen, world_size=2)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_model_has_one_engine_and_the_one_before_says_so(ranks: Ranks, stage: int) -> None:
    plain = make_model()
    train_plain(plain, torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.1), steps=2)
    for params in ranks(_two_engines, stage, world_size=2):
        assert worst_difference(params, snapshot(plain.named_parameters())) <= FP32_DRIFT


def _values(engine: dslaunch.Engine) -> dict[str, Tensor]:
    with dslaunch.zero.GatheredParameters(engine.module.parameters()):
        return {name: value.detach().clone() for name, value in engine.module.named_parameters()}


def _hand_on(rank: int, sections: list[dict[str, Any]], is_kept: bool) -> None:
    """A model goes from one engine to the next as Lightning has it: train, evaluate, train. Nobody destroys
    an engine, and the program keeps it or not.
    """
    model = make_model()
    kept: list[dslaunch.Engine] = []
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    for index, section in enumerate(sections):
        config = {**make_config(), "zero_optimization": {"reduce_bucket_size": 50, **section}}
        if index % 2:
            del config["optimizer"]
        engine = dslaunch.initialize(model=model, config=config)[0]
        assert not any(map(_held_by, kept))  # neither shards nor states, so nothing is held twice
        assert_same_bits(_values(engine), before)
        if index % 2:
            with torch.no_grad():
                engine.eval()(batch(0))
        else:
            train_engine(engine.train(), steps=2)
        before = _values(engine)
        kept = [*kept, engine] if is_kept else []
        del engine
        gc.collect()


def _held_by(engine: dslaunch.Engine) -> int:
    """How many elements of shards, masters and states an engine has."""
    sub_buffers = [sub_buffer for unit in engine._model.units for sub_buffer in unit.sub_buffers]
    shards = sum(one.param_shard.kept.numel() for one in sub_buffers if one.is_sharded)
    return shards + sum(state.numel() for one in sub_buffers for state in one.optimizer_shard.held())


THREE: dict[str, Any] = {"stage": 3, "stage3_param_persistence_threshold": 0}
ON_HOST = {**THREE, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}


HANDED_ON = {
    "stages": [THREE, THREE, {"stage": 2}, THREE, THREE],
    "host": [ON_HOST, ON_HOST, THREE, THREE, ON_HOST],
    "disk": ["disk", "disk", "disk"],
}


@pytest.mark.parametrize(
    ("name", "is_kept"),
    few(
        [(name, is_kept) for name in HANDED_ON for is_kept in (True, False)],
        lambda name, is_kept: is_kept == (name == "disk"),
    ),
)
def test_a_model_is_handed_on_with_every_bit_and_nothing_is_held_twice(
    ranks: Ranks, tmp_path: Path, name: str, is_kept: bool
) -> None:
    disk = {"device": "nvme", "nvme_path": str(tmp_path)}
    on_disk = {**THREE, "offload_param": disk, "offload_optimizer": disk}
    sections = [on_disk if one == "disk" else one for one in HANDED_ON[name]]
    ranks(_hand_on, sections, is_kept, world_size=2)


def _hand_on_a_part(rank: int) -> dict[str, Tensor]:
    """The next engine has a part of the model, and something else; the rest is the program's again."""
    model = make_model()
    config = make_config(stage=3)
    first = dslaunch.initialize(model=model, config=config)[0]
    before = _values(first)
    assert isinstance(model, nn.Module)
    part = next(one for one in model.children() if next(one.parameters(), None) is not None)
    with (
        pytest.raises(ConfigError, match=r"initialize\(\) of a model of another engine while the param"),
        dslaunch.zero.GatheredParameters(model.parameters()),
    ):
        dslaunch.initialize(model=part, config=config)
    engine = dslaunch.initialize(model=part, config=config)[0]
    taken = {id(param) for param in part.parameters()}
    rest = {name: param for name, param in model.named_parameters() if id(param) not in taken}
    assert rest
    assert_same_bits(
        {name: param.detach() for name, param in rest.items()}, {name: before[name] for name in rest}
    )
    assert {type(param) for param in rest.values()} == {nn.Parameter}
    with dslaunch.zero.GatheredParameters(model.parameters(), modifier_rank=0):
        pass
    assert not any(hasattr(param, "ds_id") for param in rest.values())
    assert all(hasattr(param, "ds_id") for param in part.parameters())
    return _values(engine)


def test_what_the_next_engine_does_not_take_is_plain_again(ranks: Ranks) -> None:
    ranks(_hand_on_a_part, world_size=2)


def _used_after_its_end(rank: int, stage: int, folder: str) -> list[str]:
    config = make_config(stage=stage)
    engine = dslaunch.initialize(model=make_model(), config=config)[0]
    engine.backward(loss_of(engine, batch(0, size=3)))
    engine.step()
    engine.destroy()
    loss = loss_of(engine, batch(0, size=3))  # the module can be used
    attempts: tuple[Callable[[], object], ...] = (
        lambda: engine.backward(loss),
        engine.step,
        lambda: engine.save_checkpoint(folder),
        lambda: engine.load_checkpoint(folder),
    )
    said = []
    for attempt in attempts:
        with pytest.raises(ConfigError) as caught:
            attempt()
        said.append(str(caught.value))
    assert os.listdir(folder) == []
    return said


@pytest.mark.parametrize("stage", [0, 3])
def test_a_destroyed_engine_says_that_it_was_destroyed(ranks: Ranks, tmp_path: Path, stage: int) -> None:
    names = ("engine.backward()", "engine.step()", "save_checkpoint()", "load_checkpoint()")
    for said in ranks(_used_after_its_end, stage, str(tmp_path), world_size=2):
        for message, name in zip(said, names, strict=True):
            assert message.startswith(f"{name} came after engine.destroy()")
