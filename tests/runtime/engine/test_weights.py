"""Weights for other programs: the whole model's state_dict on rank 0, a file of it, and the way back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import dslaunch
from dslaunch import CheckpointError, ConfigError
from dslaunch.runtime.weights import files
from tests.runtime.models import Tied, assert_same_bits, batch, make_config, make_model, snapshot
from tests.runtime.ranks import Ranks

STAGES = (0, 1, 2, 3)


FROZEN = {"blocks.1.weight", "blocks.1.bias", "count"}


def _engine(stage: int, **changes: Any) -> dslaunch.Engine:
    engine, *_ = dslaunch.initialize(model=make_model(Tied), config=make_config(stage=stage, **changes))
    x = batch(0).chunk(engine.world_size)[engine.global_rank]
    engine.backward(engine(x.bfloat16() if engine.bfloat16_enabled() else x).float().pow(2).mean())
    engine.step()
    return engine


def _consolidated(rank: int, stage: int, bf16: bool) -> list[Any]:
    engine = _engine(stage, bf16={"enabled": bf16})
    expected = {name: value.clone() for name, value in engine.state_dict().items()}
    assert list(engine.module_state_dict()) == list(expected)
    found: list[Any] = [expected]
    for excludes in (False, True):
        state = engine._zero3_consolidated_16bit_state_dict(excludes)
        assert (state is None) == (rank > 0)
        found.append(state)
        assert engine.module_state_dict(exclude_frozen_parameters=excludes).keys() == expected.keys() - (
            FROZEN if excludes else set()
        )
    if rank == 0:
        assert found[1]["head.weight"] is found[1]["embed.weight"]
        assert found[1]["embed.weight"].dtype is (torch.bfloat16 if bf16 else torch.float32)
    return found


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_rank_0_gets_the_whole_state_dict(ranks: Ranks, stage: int, bf16: bool) -> None:
    expected, whole, trained = ranks(_consolidated, stage, bf16, world_size=2)[0]
    assert list(whole) == list(make_model(Tied).state_dict())
    assert_same_bits(whole, expected)
    assert trained.keys() == whole.keys() - FROZEN
    assert_same_bits(trained, {name: whole[name] for name in trained})


def _saved(rank: int, stage: int, folder: str) -> dict[str, Tensor]:
    engine = _engine(stage)
    assert engine.zero_gather_16bit_weights_on_model_save()
    assert engine.save_16bit_model(folder) is True
    assert engine.save_16bit_model(folder, "trained.pt", exclude_frozen_parameters=True)
    return dict(engine.state_dict())


@pytest.mark.parametrize("stage", STAGES)
def test_the_file_loads_into_a_plain_model(ranks: Ranks, stage: int, tmp_path: Path) -> None:
    expected = ranks(_saved, stage, str(tmp_path / "new" / "folder"), world_size=2)[0]
    assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == [
        "pytorch_model.bin",
        "trained.pt",
    ]
    loaded = torch.load(tmp_path / "new" / "folder" / "pytorch_model.bin")
    model = make_model(Tied, seed=1)
    model.load_state_dict(loaded)
    assert_same_bits(dict(model.state_dict()), expected)
    trained = torch.load(tmp_path / "new" / "folder" / "trained.pt")
    assert trained.keys() == loaded.keys() - FROZEN


def _not_written(rank: int, folder: str) -> list[str]:
    engine = _engine(3)
    said = []
    for name in ("m.bin", "m.safetensors"):
        with pytest.raises(CheckpointError) as caught:
            engine.save_16bit_model(f"{folder}/file", name)
        said.append(str(caught.value))
    engine.state_dict()  # no rank has been left in a collective
    return said


def test_what_cannot_be_written_is_an_error_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for whole, streamed in ranks(_not_written, str(tmp_path), world_size=2, deadline_s=60.0):
        assert whole.startswith(f"{tmp_path}/file/m.bin cannot be written")
        assert streamed.startswith(f"{tmp_path}/file")


def _streamed(rank: int, folder: str) -> dict[str, Tensor]:
    expected: dict[str, Tensor] = {}
    for stage in STAGES:
        engine = _engine(stage)
        engine.save_16bit_model(f"{folder}/{stage}", "model.safetensors", max_shard_size=500)
        engine.save_16bit_model(f"{folder}/{stage}", "trained.safetensors", True)
        expected |= {f"{stage} {name}": value.clone() for name, value in engine.state_dict().items()}
    return expected


def test_safetensors_have_what_a_state_dict_has_and_tied_parameters_once(
    ranks: Ranks, tmp_path: Path
) -> None:
    expected = ranks(_streamed, str(tmp_path), world_size=2)[0]
    for stage in STAGES:
        files = sorted((tmp_path / str(stage)).glob("model-*-of-*.safetensors"))
        assert len(files) > 3
        found = {name: value for file in files for name, value in load_file(file).items()}
        assert found.keys() == make_model(Tied).state_dict().keys() - {"head.weight"}
        assert_same_bits(found, {name: expected[f"{stage} {name}"] for name in found})
        trained = load_file(tmp_path / str(stage) / "trained.safetensors")
        assert_same_bits(trained, {name: found[name] for name in found.keys() - FROZEN})


def _loaded(rank: int, stage: int, is_custom: bool) -> dict[str, Tensor]:
    """Weights of another model, under "module"; then a step, which goes on from them."""
    engine = _engine(stage, bf16={"enabled": True})
    weights = make_model(Tied, seed=5).bfloat16().state_dict()

    def copy(src: Mapping[str, Tensor], dst: nn.Module) -> None:
        for name, param in dst.named_parameters():
            param.copy_(src[name])

    engine.load_module_state_dict({"module": weights}, custom_load_fn=copy if is_custom else None)
    found = snapshot(engine.named_parameters())
    assert_same_bits(found, {name: weights[name] for name in found})
    for sub_buffer in engine._model.trained:
        assert torch.equal(sub_buffer.optimizer_shard.master.bfloat16(), sub_buffer.param_shard.own)
    with pytest.raises(
        CheckpointError, match=rf"and {len(weights) - 4} more, .* call engine\.load_state_dict"
    ):
        engine.load_module_state_dict(weights)
    part = {"module": {name: torch.zeros_like(value) for name, value in weights.items()}}
    (left_out,) = (part["module"].pop(name) is None or name for name in list(part["module"])[:1])
    with pytest.raises(RuntimeError, match="Missing key"):
        engine.load_module_state_dict(part, allowed_missing_keys=["another"])
    engine.load_module_state_dict(part, fetch_z3_params=True, allowed_missing_keys=[left_out])
    for name, value in snapshot(engine.named_parameters()).items():
        assert torch.equal(value, found[name]) if name == left_out else not value.any()
    return found


class WithExtraState(nn.Linear):
    def __init__(self) -> None:
        super().__init__(7, 15)

    def get_extra_state(self) -> str:
        return "note"

    def set_extra_state(self, state: str) -> None:
        pass


def _without_extra_state(rank: int, folder: str) -> list[str]:
    engine, *_ = dslaunch.initialize(model=make_model(WithExtraState), config=make_config(stage=3))
    said: list[str] = []
    with mock.patch.object(files._log, "warning", lambda text, *args: said.append(text % args)):
        engine.save_16bit_model(folder, "model.safetensors")
    return said


def test_extra_states_that_a_file_of_weights_leaves_out_are_named_once(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks(_without_extra_state, str(tmp_path), world_size=2)
    assert first == [f"{tmp_path} holds tensors only: without _extra_state"]
    assert second == []


def _other_shapes(rank: int, stage: int) -> tuple[str, str]:
    engine = _engine(stage)
    before = snapshot(engine.state_dict())
    with pytest.raises(RuntimeError) as loaded:
        engine.load_state_dict({**before, "embed.weight": torch.ones(3, 7), "head.weight": torch.ones(3, 7)})
    assert_same_bits(snapshot(engine.state_dict()), before)
    bias = engine.module.get_parameter("blocks.0.bias")

    def replace() -> None:
        with dslaunch.zero.GatheredParameters([bias], modifier_rank=0):
            bias.data = torch.ones(3)

    with pytest.raises(ConfigError) as given:
        replace()
    return str(loaded.value), str(given.value)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_tensor_of_another_shape_is_refused_with_what_to_do(ranks: Ranks, stage: int) -> None:
    for loaded, given in ranks(_other_shapes, stage, world_size=2):
        assert "size mismatch for embed.weight" in loaded
        assert loaded.endswith(
            "\nNothing was loaded. Build the model with the shapes of the state_dict, or leave these names "
            "out of it and give strict=False."
        )
        assert given == (
            "parameter 'blocks.0.bias' was given data of shape (3,), and had (15,) at initialize(); give it "
            "data of that shape, or change the model's shapes before initialize()"
        )


@pytest.mark.parametrize("is_custom", [False, True])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_module_state_dict_is_loaded_into_parameters_and_masters(
    ranks: Ranks, stage: int, is_custom: bool
) -> None:
    ranks(_loaded, stage, is_custom, world_size=2)
