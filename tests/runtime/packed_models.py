"""Small models whose base bitsandbytes or torchao has quantized, with trained adapters beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 128
Make = Callable[[int, int], nn.Module]


class Adapted(nn.Module):
    """A frozen layer, and a trained product of two thin matrices beside it, as LoRA has it."""

    def __init__(self, base: nn.Module, ins: int, outs: int) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_a, self.lora_b = nn.Linear(ins, 4, bias=False), nn.Linear(4, outs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base_layer(x) + self.lora_b(self.lora_a(x))
        return result


class Quantized(nn.Module):
    """Blocks, each of another kind of quantized layers, wide and back."""

    def __init__(self, run: Callable[[nn.Module, Tensor], Tensor] | None, kinds: Sequence[Make]) -> None:
        super().__init__()
        self.run = run
        wide = 2 * WIDTH
        self.blocks = nn.ModuleList(
            nn.Sequential(
                Adapted(make(WIDTH, wide), WIDTH, wide), nn.Tanh(), Adapted(make(wide, WIDTH), wide, WIDTH)
            )
            for make in kinds
        )
        self.head = nn.Linear(WIDTH, 8).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + (block(x) if self.run is None else self.run(block, x))
        result: Tensor = self.head(x)
        return result


def make_quantized(
    library: str,
    run: Callable[[nn.Module, Tensor], Tensor] | None = None,
    *,
    is_packed: bool = True,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Quantized:
    """Return the model; bitsandbytes quantizes it when it is moved to a device, which `is_packed` does, and
    torchao at once, for inputs of this dtype.
    """
    torch.manual_seed(seed)
    if library == "torchao":
        return Quantized(run, [partial(_by_torchao, how=how, dtype=dtype) for how in _by_weights_only()])
    model = Quantized(run, [_nested, _plain, _in_bfloat16, _int8])
    return model.to("cpu") if is_packed else model


def packed_values(state: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a state_dict that quantized layers have, as the library writes them."""
    found = {name: value for name, value in state.items() if "base_layer" in name}
    if all(type(value) is Tensor for value in found.values()):
        return found
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    flat: dict[str, Tensor] = flatten_tensor_state_dict(found)[0]
    return flat


def _nested(ins: int, outs: int) -> nn.Module:
    return _four_bits(ins, outs, compress_statistics=True, quant_type="nf4")


def _plain(ins: int, outs: int) -> nn.Module:
    return _four_bits(ins, outs, compress_statistics=False, quant_type="fp4")


def _in_bfloat16(ins: int, outs: int) -> nn.Module:
    return _four_bits(ins, outs, quant_type="nf4", quant_storage=torch.bfloat16)


def _four_bits(ins: int, outs: int, **options: Any) -> nn.Module:
    from bitsandbytes.nn import Linear4bit

    return Linear4bit(ins, outs, compute_dtype=torch.float32, **options)


def _int8(ins: int, outs: int) -> nn.Module:
    from bitsandbytes.nn import Linear8bitLt

    return Linear8bitLt(ins, outs, bias=False, has_fp16_weights=False)


def _by_weights_only() -> list[Any]:
    from torchao.quantization import (
        Float8WeightOnlyConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        PerGroup,
    )

    return [
        Int8WeightOnlyConfig(),
        Int8WeightOnlyConfig(granularity=PerGroup(32)),
        IntxWeightOnlyConfig(torch.int4, PerGroup(32)),
        Float8WeightOnlyConfig(),
    ]


def _by_torchao(ins: int, outs: int, *, how: Any, dtype: torch.dtype) -> nn.Module:
    from torchao.quantization import quantize_

    layer = nn.Linear(ins, outs, bias=False).to(dtype)
    quantize_(layer, how)
    return layer
