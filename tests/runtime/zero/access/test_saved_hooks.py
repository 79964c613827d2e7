"""What is followed of the hooks for saved tensors is what this torch tells of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from dslaunch.runtime.zero.access import saved_hooks

told = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


@pytest.mark.skipif(told is None, reason="this torch does not tell")
def test_the_followed_hooks_are_those_of_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("__enter__", "__exit__"):  # as they are, to be put back
        monkeypatch.setattr(saved_tensors_hooks, name, getattr(saved_tensors_hooks, name))
    saved_hooks.follow()
    seen: list[bool] = []

    def look() -> None:
        assert told is not None
        followed = saved_hooks.followed_hooks()
        assert followed == told(True)
        seen.append(followed is not None)

    def layer(x: Tensor) -> Tensor:
        look()
        with save_on_cpu():
            look()
            x = x.sin()
        return x.cos()

    def in_thread() -> None:
        look()
        with saved_tensors_hooks(lambda x: x, lambda x: x):
            look()

    look()
    x = torch.ones(3, requires_grad=True)
    with saved_tensors_hooks(lambda x: x, lambda x: x):
        look()
        y: Any = checkpoint(layer, x, use_reentrant=False)
        thread = threading.Thread(target=in_thread)
        thread.start()
        thread.join()
        look()
    y.sum().backward()  # computes the layer again
    with pytest.raises(ZeroDivisionError):
        _fail_inside(look)
    look()
    assert seen == [False, True, True, True, False, True, True, True, True, True, False]


def _fail_inside(look: Callable[[], None]) -> None:
    with save_on_cpu():
        look()
        raise ZeroDivisionError
