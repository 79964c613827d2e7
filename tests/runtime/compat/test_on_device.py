"""Models that are made on another device or in another dtype."""

from __future__ import annotations

import torch
from torch import nn

from dslaunch.runtime.compat.on_device import OnDevice


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(8, 2, batch_first=True)
        self.embed = nn.Embedding(5, 8)
        self.norm = nn.BatchNorm1d(3)
        self.own = nn.Parameter(torch.ones(2) * 3)
        self.register_buffer("table", 1.0 / torch.arange(1, 4))
        self.register_buffer("mask", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("here", torch.zeros(3, device="cpu"))
        self.register_buffer("full", torch.full((2,), 7))


def test_parameters_are_made_there_and_tables_keep_their_values() -> None:
    with OnDevice(torch.bfloat16) as context:
        model = Model()
    assert context.device == "meta"
    assert {(param.device.type, param.dtype) for param in model.parameters()} == {("meta", torch.bfloat16)}
    buffers = {name: (buffer.device.type, buffer.dtype) for name, buffer in model.named_buffers()}
    assert buffers == {
        "table": ("cpu", torch.float32),
        "mask": ("meta", torch.bool),
        "here": ("cpu", torch.bfloat16),
        "full": ("meta", torch.int64),
        "norm.running_mean": ("meta", torch.bfloat16),
        "norm.running_var": ("meta", torch.bfloat16),
        "norm.num_batches_tracked": ("cpu", torch.int64),
    }
    assert torch.empty(1).device.type == "cpu"


def test_values_are_those_without_the_context() -> None:
    torch.manual_seed(3)
    plain = Model()
    torch.manual_seed(3)
    with OnDevice(dtype=torch.float64, device="cpu"):
        wide = Model()
    assert {param.dtype for param in wide.parameters()} == {torch.float64}
    assert wide.own.tolist() == [3.0, 3.0]
    assert wide.full.tolist() == [7, 7]
    assert [tuple(param.shape) for param in wide.parameters()] == [
        tuple(param.shape) for param in plain.parameters()
    ]
    torch.manual_seed(3)
    with OnDevice(dtype=torch.float64, device="meta", enabled=False):
        same = Model()
    with OnDevice(None, device="cpu"):
        assert torch.ones(1, dtype=torch.float16).dtype == torch.float16
    for left, right in zip(plain.state_dict().values(), same.state_dict().values(), strict=True):
        assert torch.equal(left, right)
