"""A board's own connection to the job's store."""

from __future__ import annotations

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from dslaunch.runtime.comm.watchdog.board import Board


@pytest.mark.parametrize("use_libuv", [False, True])
def test_the_second_connection_uses_libuv_where_the_first_does(use_libuv: bool) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=use_libuv)
    board = Board(store, rank=0)
    assert board._store.libuvBackend is use_libuv
    board.close()
