from __future__ import annotations

import torch
from torch import nn

from dslaunch.drop_in.statuses import ZeroParamStatus


def test_tensors_have_a_status_and_parameters_only_their_own() -> None:
    param = nn.Parameter(torch.ones(2))
    assert not hasattr(param, "ds_status")
    assert param.detach().ds_status is ZeroParamStatus.AVAILABLE  # type: ignore[attr-defined]
    param.ds_status = ZeroParamStatus.NOT_AVAILABLE  # type: ignore[attr-defined]
    assert param.ds_status is ZeroParamStatus.NOT_AVAILABLE  # type: ignore[attr-defined]


def test_what_is_compiled_does_not_mind() -> None:
    layer = nn.Linear(3, 3)
    compiled = torch.compile(layer, backend="eager")
    assert torch.equal(compiled(torch.ones(2, 3)), layer(torch.ones(2, 3)))
