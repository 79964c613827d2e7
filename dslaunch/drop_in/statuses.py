"""`ZeroParamStatus`, and the status of tensors that are no parameters.

In the backward of a custom function, what autograd has saved of a sharded parameter is another tensor, whose values are here. Who
asks such a tensor for its `ds_status`, as TRL does, is told so: by an attribute of the class, which is there once a program imports
this from `deepspeed`, because nothing that is given to autograd keeps attributes of its own. Parameters that are not
sharded have no status, as ever.
"""

from __future__ import annotations

from torch import Tensor, nn

from ..runtime.zero.ds_attributes import ZeroParamStatus


class _Status:
    """What a sharded parameter has itself goes before this."""

    def __get__(self, tensor: Tensor | None, owner: type) -> ZeroParamStatus:
        if tensor is None or isinstance(tensor, nn.Parameter):
            raise AttributeError("ds_status: of tensors that autograd has saved, and of sharded parameters")
        return ZeroParamStatus.AVAILABLE


Tensor.ds_status = _Status()  # type: ignore[attr-defined]

__all__ = ["ZeroParamStatus"]
