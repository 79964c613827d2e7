"""Trained parameters that no backward has given a gradient since the last step, where the ds_config asks for
an error then.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from .freezing import requiring_grad
from .sub_buffer import SubBuffer


class Unused:
    """Unused parameters of these sub-buffers. One that is frozen for a while is not missed."""

    def __init__(self, sub_buffers: Sequence[SubBuffer]) -> None:
        members = [member for sub_buffer in sub_buffers for member in sub_buffer.members]
        self._names = [member.name for member in members]
        self._params = [member.param for member in members]
        self._used: set[int] = set()  # numbers in `_params`
        self._hooks = [
            param.register_post_accumulate_grad_hook(partial(self._note, number))  # type: ignore[no-untyped-call]
            for number, param in enumerate(self._params)
        ]

    def _note(self, number: int, param: Tensor) -> None:
        self._used.add(number)

    def take(self) -> list[str]:
        """Return their names, and begin anew."""
        used, self._used = self._used, set()
        if len(used) == len(self._params):
            return []
        flags = requiring_grad(self._params)
        return [self._names[i] for i, flag in enumerate(flags) if flag and i not in used]

    def close(self) -> None:
        """Note no more."""
        for hook in self._hooks:
            hook.remove()
