"""Files beside the weights of a checkpoint, as programs that know DeepSpeed's open them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import dslaunch
from dslaunch import CheckpointError
from dslaunch.runtime.compat.state_files import get_model_state_file, get_model_state_files, get_optim_files
from dslaunch.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tests.runtime.models import batch, loss_of, make_config
from tests.runtime.ranks import Ranks

CLIENT = {"epoch": 3, "callbacks": {"best": torch.tensor([1.0, 2.0])}, "pytorch-lightning_version": "2.6.6"}
# What lightning 2.6.6 leaves out of what it takes over: pytorch/utilities/deepspeed.py.
NOT_TAKEN = {
    *("module", "optimizer", "lr_scheduler", "csr_tensor_module_names"),
    *("skipped_steps", "global_steps", "dp_world_size", "mp_world_size"),
}


def _save(rank: int, folder: str) -> None:
    for stage in (1, 3):
        engine: Any = dslaunch.initialize(model=torch.nn.Linear(7, 7), config=make_config(stage=stage))[0]
        for step in range(2):
            engine.backward(loss_of(engine.module, batch(step)))
            engine.step()
        engine.save_checkpoint(folder, f"stage{stage}", client_state=CLIENT)
        engine.destroy()


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    ranks(_save, str(folder), world_size=1)
    return folder


def _files(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_size for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("stage", [1, 3])
def test_stage_and_client_state_are_where_deepspeed_has_them(saved: Path, stage: int) -> None:
    before = _files(saved)
    folder = saved / f"stage{stage}"
    (optim_file,) = get_optim_files(folder)
    optimizer = torch.load(optim_file, map_location="cpu", weights_only=False)
    assert optimizer["optimizer_state_dict"] == {"zero_stage": stage, "partition_count": 1}
    assert optimizer["ds_config"]["zero_optimization"]["stage"] == stage
    model_file = get_model_state_file(str(folder), optimizer["optimizer_state_dict"]["zero_stage"])
    assert Path(model_file).name == ("zero_pp_rank_0_" if stage == 3 else "") + "mp_rank_00_model_states.pt"
    assert get_model_state_files(folder) == [model_file]
    model = torch.load(model_file, map_location="cpu", weights_only=False)
    assert (model["global_steps"], model["dp_world_size"], model["mp_world_size"]) == (2, 1, 1)
    taken = {key: value for key, value in model.items() if key not in NOT_TAKEN}
    assert taken.keys() == {*CLIENT, "global_samples", "ds_config"}
    assert taken["callbacks"]["best"].tolist() == [1.0, 2.0]
    assert (taken["epoch"], taken["pytorch-lightning_version"]) == (3, "2.6.6")
    assert get_fp32_state_dict_from_zero_checkpoint(saved, f"stage{stage}").keys() == {"weight", "bias"}
    assert _files(saved) == before  # nothing is written into a checkpoint


def test_the_folder_of_checkpoints_stands_for_the_newest(saved: Path) -> None:
    assert get_optim_files(saved) == get_optim_files(saved / "stage3")
    assert get_optim_files(saved) != get_optim_files(saved / "stage1")


def test_files_of_deepspeed_are_returned_in_the_order_of_ranks(tmp_path: Path) -> None:
    for rank in (10, 2, 0):
        (tmp_path / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").touch()
    ranks = [
        Path(file).name.split("_")[4] for file in get_optim_files(tmp_path)
    ]  # before there is a model's file
    assert ranks == ["0", "2", "10"]
    model = tmp_path / "mp_rank_00_model_states.pt"
    model.touch()
    assert get_model_state_file(tmp_path, 2) == str(model)
    assert get_model_state_files(tmp_path) == [str(model)]


def test_what_is_not_there_is_refused(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is of stage 3; give the zero_stage"):
        get_model_state_file(saved / "stage3", 2)
    with pytest.raises(CheckpointError, match="is of a stage below 3"):
        get_model_state_file(saved / "stage1", 3)
    for function in (get_optim_files, get_model_state_files):
        with pytest.raises(CheckpointError, match="does not exist"):
            function(tmp_path)
    (tmp_path / "mp_rank_00_model_states.pt").touch()
    with pytest.raises(CheckpointError, match=r"has no \*_optim_states\.pt: it is of ZeRO stage 0"):
        get_optim_files(tmp_path)
