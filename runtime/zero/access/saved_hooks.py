"""The hooks for saved tensors that autograd would use now, innermost contexts first.

torch tells them since 2.8. Before that the contexts that set them are followed, from the import of this
file on: all of torch's own are a `saved_tensors_hooks`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

Pack = Callable[[Tensor], Any]
Unpack = Callable[[Any], Tensor]
_NAME = "_top_saved_tensors_default_hooks"


class _Followed(threading.local):
    """Hooks that the contexts of this thread have set, the innermost last."""

    def __init__(self) -> None:
        self.hooks: list[tuple[Pack, Unpack]] = []


_followed = _Followed()


def follow() -> None:
    """Have `followed_hooks` know the contexts that are entered from now on."""
    enter, leave = saved_tensors_hooks.__enter__, saved_tensors_hooks.__exit__

    @functools.wraps(enter)
    def entered(self: saved_tensors_hooks) -> Any:
        result = enter(self)  # raises where such hooks are forbidden
        _followed.hooks.append((self.pack_hook, self.unpack_hook))
        return result

    @functools.wraps(leave)
    def left(self: saved_tensors_hooks, *args: object) -> Any:
        _followed.hooks.pop()
        return leave(self, *args)

    saved_tensors_hooks.__enter__ = entered  # type: ignore[method-assign]
    saved_tensors_hooks.__exit__ = left  # type: ignore[method-assign]


def followed_hooks() -> tuple[Pack, Unpack] | None:
    """Return the hooks of the innermost context of this thread."""
    return _followed.hooks[-1] if _followed.hooks else None


# Return the hooks that autograd would use now; None if it would save tensors as they are.
top_hooks: Callable[[], tuple[Pack, Unpack] | None] = followed_hooks
if hasattr(torch._C._autograd, _NAME):
    top_hooks = functools.partial(getattr(torch._C._autograd, _NAME), True)
else:
    follow()
