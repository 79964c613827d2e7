"""`ZeroParamStatus`, and the status of tensors that are no parameters.

In the backward of a custom function, what autograd has saved of a sharded parameter is another tensor, whose
values are here. Who asks such a tensor for its `ds_status`, as TRL does, is told so: by an attribute of the
class, which is there once a program imports this from `deepspeed`, because nothing that is given to autograd
keeps attributes of its own. Parameters that are not sharded have no status, as ever.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..runtime.zero.parameters.param_status import ZeroParamStatus


class _Status:
    """Descriptor of a status; a tensor's own attribute goes before it.

    `__set__` is there because torch takes what can be read of Tensor for a property.
    """

    def __get__(self, tensor: Tensor | None, owner: type) -> Any:
        if tensor is None:
            return self
        own = vars(tensor).get("ds_status")
        if own is None and isinstance(tensor, nn.Parameter):
            raise AttributeError("ds_status: of tensors that autograd has saved, and of sharded parameters")
        return ZeroParamStatus.AVAILABLE if own is None else own

    def __set__(self, tensor: Tensor, value: Any) -> None:
        vars(tensor)["ds_status"] = value

    def __delete__(self, tensor: Tensor) -> None:
        vars(tensor).pop("ds_status", None)


Tensor.ds_status = _Status()  # type: ignore[attr-defined]

__all__ = ["ZeroParamStatus"]
