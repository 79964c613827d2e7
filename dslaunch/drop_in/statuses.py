"""`ZeroParamStatus`, and the status of tensors that nothing is known of.

In the backward of a custom function, what autograd has saved of a sharded parameter is another tensor, whose values are here.
Whoever asks such a tensor for its `ds_status`, as TRL does, is told so, by an attribute of the class, which is there once a program
imports this from `deepspeed`.
"""

from __future__ import annotations

from torch import Tensor

from ..runtime.zero.ds_attributes import ZeroParamStatus

Tensor.ds_status = ZeroParamStatus.AVAILABLE  # type: ignore[attr-defined]

__all__ = ["ZeroParamStatus"]
