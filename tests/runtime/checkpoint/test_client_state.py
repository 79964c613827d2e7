"""client_state: what each rank gives comes back, or a line says what does not."""

from __future__ import annotations

import io
import logging
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dslaunch import CheckpointError
from dslaunch.runtime.checkpoint import client_state
from dslaunch.runtime.checkpoint.client_state import fingerprint, of_rank
from dslaunch.runtime.checkpoint.deepspeed.training import ClientStates
from dslaunch.runtime.checkpoint.files.reader import CheckpointReader
from dslaunch.runtime.checkpoint.storage.url_store import open_store
from tests.runtime.checkpoint.states import make
from tests.runtime.ranks import Ranks


class Small(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 1)


def _each_gives(rank: int, folder: str, given: list[dict[str, Any] | None]) -> list[Any]:
    engine = make(1, False, kind=Small)
    engine.save_checkpoint(folder, "mine", client_state=given[rank])
    return [engine.load_checkpoint(folder, "mine")[1]]


def _saved(folder: Path) -> dict[str, Any]:
    return CheckpointReader(open_store(folder), "mine").training()


@pytest.mark.parametrize(
    ("given", "returned"),
    [
        ([{"seen": 1, "at": "a"}, {"seen": 2, "at": "a"}], [{"seen": 1, "at": "a"}, {"seen": 2, "at": "a"}]),
        ([None, {"seen": 2}], [{"seen": 2}, {"seen": 2}]),
        ([{"seen": 1}, {}], [{"seen": 1}, {"seen": 1}]),
        ([{"a": 1, "b": {2, 3}}, {"b": {3, 2}, "a": 1}], [{"a": 1, "b": {2, 3}}] * 2),
        ([None, None], [{}, {}]),
    ],
    ids=["each-its-own", "only-rank-1", "only-rank-0", "the-same", "none"],
)
def test_every_rank_gets_its_own_client_state(
    ranks: Ranks, tmp_path: Path, given: list[dict[str, Any] | None], returned: list[dict[str, Any]]
) -> None:
    assert ranks(_each_gives, str(tmp_path), given, world_size=2) == [[one] for one in returned]
    differ = all(given) and returned[0] != returned[1]
    assert ("client_states" in _saved(tmp_path)) == differ  # equal ones are written once


def _give_tensors(rank: int, folder: str) -> list[list[float]]:
    engine = make(3, False, kind=Small)
    engine.save_checkpoint(folder, "mine", client_state={"ema": torch.full((2,), float(rank)), "same": 1})
    return [engine.load_checkpoint(folder, "mine")[1]["ema"].tolist()]


def test_tensors_that_differ_are_each_ranks_own_and_one_rank_says_what_it_does_not_get(
    ranks: Ranks, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert ranks(_give_tensors, str(tmp_path), world_size=2) == [[[0.0, 0.0]], [[1.0, 1.0]]]
    saved = _saved(tmp_path)
    with caplog.at_level(logging.WARNING, logger="dslaunch"):
        assert of_rank(saved, rank=0, num_ranks=1)["ema"].tolist() == [0.0, 0.0]
        assert of_rank(saved, rank=1, num_ranks=3)["ema"].tolist() == [0.0, 0.0]
    (message,) = caplog.messages
    assert message.startswith(
        "the checkpoint was written by 2 ranks that gave client_state with different values of 'ema', and is "
        "read by 1: every rank gets rank 0's; load with 2 ranks "
    )


def _gives_what_cannot_be_kept(rank: int, folder: str) -> list[str]:
    engine = make(1, False, kind=Small)
    messages = []
    itself: dict[str, Any] = {}
    itself["itself"] = itself
    for bad in ({"path": Path("x")}, itself):
        with pytest.raises(CheckpointError) as caught:
            engine.save_checkpoint(folder, "bad", client_state=bad if rank == 1 else {"epoch": 1})
        messages.append(str(caught.value))
    return messages


def test_a_client_state_of_rank_1_that_cannot_be_kept_is_an_error_on_all_ranks(
    ranks: Ranks, tmp_path: Path
) -> None:
    first, second = ranks(_gives_what_cannot_be_kept, str(tmp_path), world_size=2)
    assert first == second
    assert first[0].startswith("on rank 1: client_state['path'] is a pathlib.")
    assert first[1].startswith("client_state of rank 1 cannot be read through: RecursionError: ")
    assert not (tmp_path / "bad").exists()


def test_a_checkpoint_from_before_has_one_client_state_for_all() -> None:
    saved = {"client_state": {"epoch": 3}}
    assert [of_rank(saved, rank=rank, num_ranks=2) for rank in (0, 1)] == [{"epoch": 3}] * 2


def test_the_files_of_stage_3_that_deepspeed_wrote_have_one_for_each_rank(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """DeepSpeed 0.19.8 `_save_checkpoint`: where parameters are sharded every rank writes its client_state,
    else rank 0 alone.
    """
    files = [{"module": {}, "ds_version": "0.19.8", "seen": rank} for rank in range(2)]
    folder: Any = SimpleNamespace(num_model_files=2, model=files.__getitem__)
    saved = {"client_state": {"seen": 0}, "client_states": ClientStates(folder)}
    assert [of_rank(saved, rank=rank, num_ranks=2) for rank in range(2)] == [{"seen": 0}, {"seen": 1}]
    with caplog.at_level(logging.WARNING, logger="dslaunch"):
        assert of_rank(saved, rank=0, num_ranks=4) == {"seen": 0}
    assert "different values of 'seen'" in caplog.text


@pytest.mark.parametrize(
    ("a", "b", "are_equal"),
    [
        ({"x": torch.arange(4.0)[::2]}, {"x": torch.tensor([0.0, 2.0])}, True),
        ({"x": torch.tensor([0.0, 2.0])}, {"x": torch.tensor([0, 2])}, False),
        ({"x": torch.zeros(2, 1)}, {"x": torch.zeros(1, 2)}, False),
        ({"x": torch.ones((), dtype=torch.bfloat16)}, {"x": torch.ones((), dtype=torch.bfloat16)}, True),
        ({"x": torch.zeros(0)}, {"x": torch.zeros(0)}, True),
        ({"x": torch.eye(2).to_sparse()}, {"x": torch.eye(2).to_sparse()}, True),
        ({"x": torch.eye(2).to_sparse()}, {"x": torch.ones(2, 2).to_sparse()}, False),
        ({"x": torch.tensor([1j]).conj()}, {"x": torch.tensor([complex(0, -1)])}, True),
        ({"x": 1}, {"x": True}, False),
        ({"x": 1}, {"x": 1.0}, False),
        ({"x": [1, 2]}, {"x": [2, 1]}, False),
        ({"x": OrderedDict(a=1)}, {"x": {"a": 1}}, False),
        ({"x": ["ab", "ab"]}, {"x": ["ab", "".join(["a", "b"])]}, True),
    ],
)
def test_equal_values_have_equal_fingerprints(a: object, b: object, are_equal: bool) -> None:
    assert (fingerprint(a) == fingerprint(b)) is are_equal


def test_equal_bytes_of_another_dtype_are_another_value() -> None:
    marks = {client_state.fingerprint(torch.zeros(1, dtype=dtype)) for dtype in (torch.int32, torch.float32)}
    assert len(marks) == 2


def test_a_rank_that_gave_none_gets_what_the_first_gave() -> None:
    files = []
    for value in (1, 2):
        buffer = io.BytesIO()
        torch.save({"a": value}, buffer)
        files.append(buffer.getvalue())
    merged = client_state.merge([files[0], None, files[1]])
    assert merged["client_states"] == [{"a": 1}, {"a": 1}, {"a": 2}]
