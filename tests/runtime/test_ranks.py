"""What is said of ranks that stand still."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.runtime.ranks import RankFailed, Ranks

pytestmark = pytest.mark.ranks


def _one_is_missing(rank: int) -> None:
    if rank == 0:
        _wait_for_rank_1()
    else:
        dist.recv(torch.zeros(1), src=0)


def _wait_for_rank_1() -> None:
    dist.all_reduce(torch.zeros(1))


def _nothing(rank: int) -> None:
    """The processes are started, and have imported all."""


def test_ranks_that_do_not_return_show_where_they_stand(ranks: Ranks) -> None:
    ranks(_nothing, world_size=2)
    with pytest.raises(RankFailed) as caught:
        ranks(_one_is_missing, world_size=2, deadline_s=3.0)
    of_rank_0, of_rank_1 = str(caught.value).split("rank 1:\n")
    assert "did not return" in of_rank_0
    assert "in _wait_for_rank_1" in of_rank_0
    assert "in _one_is_missing" in of_rank_1
    assert "_wait_for_rank_1" not in of_rank_1
