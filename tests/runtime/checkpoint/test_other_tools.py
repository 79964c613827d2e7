"""torch's own tools read our checkpoints: whole tensors, DTensors of another number of ranks, one file."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, zeros

from dslaunch.runtime.checkpoint.files.reader import CheckpointReader
from dslaunch.runtime.checkpoint.storage.url_store import open_store
from tests.runtime.checkpoint.states import make, run
from tests.runtime.models import assert_same_bits
from tests.runtime.ranks import Ranks


def _save(rank: int, folder: str) -> None:
    engine = make(3, True)
    run(engine, first=0, steps=2)
    engine.save_checkpoint(folder, tag="here")


@pytest.fixture(scope="module")
def folder(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What three ranks at stage 3 wrote, whose shards end anywhere."""
    where = tmp_path_factory.mktemp("tools")
    ranks(_save, str(where), world_size=3)
    return where


def _expected(folder: Path) -> dict[str, torch.Tensor]:
    reader = CheckpointReader(open_store(folder), "here")
    return {name: reader.tensor(name) for name in reader.tensors()}


@pytest.mark.slow
def test_torch_loads_whole_tensors_and_makes_one_file(folder: Path, tmp_path: Path) -> None:
    expected = _expected(folder)
    assert expected["model.blocks.1.weight"].shape == (17, 15)
    assert expected["optimizer.state.blocks.1.weight.master"].dtype == torch.float32
    whole = {name: torch.zeros_like(value) for name, value in expected.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that one process is enough
        dcp.load(whole, checkpoint_id=folder / "here")
        dcp_to_torch_save(folder / "here", tmp_path / "one.pt")
    assert_same_bits(whole, expected)
    assert_same_bits(torch.load(tmp_path / "one.pt", weights_only=True), expected)


def _load_sharded(rank: int, folder: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    expected = _expected(Path(folder))
    names = [name for name, value in expected.items() if value.dim() and value.is_floating_point()]
    sharded = {
        name: zeros(
            *expected[name].shape, dtype=expected[name].dtype, device_mesh=mesh, placements=[Shard(0)]
        )
        for name in names
    }
    dcp.load(sharded, checkpoint_id=f"{folder}/here")
    for name, value in sharded.items():
        assert isinstance(value, DTensor)
        assert torch.equal(value.full_tensor(), expected[name]), name


def test_two_ranks_load_them_as_dtensors(ranks: Ranks, folder: Path) -> None:
    ranks(_load_sharded, str(folder), world_size=2)
