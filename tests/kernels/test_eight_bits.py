"""Adam's states in 8 bits: the kernel has the codes of torch's operations, and what they lose is known."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dslaunch.kernels import AdamShard
from dslaunch.runtime.optimizers.eight_bits import BLOCK_NUMEL, decode, encode, num_scales
from dslaunch.runtime.optimizers.random_bits import bits_of_states, seed_of
from tests.exhaustive import few
from tests.kernels.optimizers import ADAM, LION, Optimizer, make_arrays
from tests.kernels.test_random_rounding import arrays_of, expected

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NAMES = ("exp_avg", "exp_avg_sq")
SEED = 0x9ABCDEF0
ROUNDED = 1 + 2.0**-20  # of a bound in float32
DTYPES = [
    (param, grad, out)
    for param, grad in itertools.product((FP32, BF16), (FP32, BF16, FP16))
    for out in ((None, BF16) if param is BF16 else (None, FP32, BF16, FP16))
]


def coded(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return codes and scales of random moments, whose elements differ by ten powers of ten."""
    found = {}
    for name in NAMES:
        found[name], found[name + ".scales"] = encode(values[name], name, None)
    return found


def moments(numel: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = 10.0 ** -(10 * torch.rand(numel, generator=generator))
    values = torch.randn(numel, generator=generator) * sizes
    return {"exp_avg": values, "exp_avg_sq": values.square() + sizes.square()}


def shard_of(
    arrays: dict[str, Tensor], states: dict[str, Tensor], segments: Any, **changes: Any
) -> AdamShard:
    return AdamShard(
        param=arrays["param"],
        grads=((0, arrays["grad"]),),
        param_out=arrays.get("param_out"),
        exp_avg=states["exp_avg"],
        exp_avg_sq=states["exp_avg_sq"],
        scales=(states["exp_avg.scales"], states["exp_avg_sq.scales"]),
        segments=segments,
        **changes,
    )


@pytest.mark.parametrize("adam", ADAM, ids=str)
@pytest.mark.parametrize(
    ("param", "grad", "out"), few(DTYPES, lambda param, grad, out: grad is BF16), ids=str
)
def test_a_step_has_the_codes_of_torchs_operations(
    adam: Optimizer, param: torch.dtype, grad: torch.dtype, out: torch.dtype | None
) -> None:
    for offset, numel, first in ((0, 1, 0), (256, 300, 512), (512, 2**14 + 513, 2**32 - 1024)):
        arrays = arrays_of(adam, offset + numel + 7, (param, grad, FP32, out), seed=numel).tensors
        states = coded(moments(offset + numel + 7, numel))
        segment = replace(adam.segment, offset=offset, numel=numel, seed=SEED, first=first)
        span, blocks = slice(offset, offset + numel), slice(offset // 256, num_scales(offset + numel))
        wide = {name: tensor.clone() for name, tensor in arrays.items()}
        for name in NAMES:
            wide[name] = decode(states[name], states[name + ".scales"], name)
        after = expected(adam, type(make_arrays(adam, 1))(adam, wide), segment, grad_scale=1 / 3).tensors
        bits = bits_of_states(SEED, first, numel, torch.device("cpu"))
        right = {name: tensor.clone() for name, tensor in states.items()}
        for place, name in enumerate(NAMES):
            codes, scales = encode(after[name][span], name, bits >> 16 * place)
            right[name][span], right[name + ".scales"][blocks] = codes, scales
        for step in (adam.kernel.step, adam.kernel.step_reference):
            stepped = {name: tensor.clone() for name, tensor in arrays.items()}
            found = {name: tensor.clone() for name, tensor in states.items()}
            step([shard_of(stepped, found, (segment,))], mode=adam.mode, grad_scale=1 / 3)
            for name, tensor in found.items():
                assert torch.equal(tensor, right[name]), name
            for name in ("param", *(() if out is None else ("param_out",))):
                assert torch.equal(stepped[name], after[name]), name


@pytest.mark.parametrize("name", NAMES)
def test_values_that_were_decoded_have_the_same_codes_again(name: str) -> None:
    values = moments(100_003)[name]
    values[256:512] = 0
    bits = bits_of_states(seed_of("a", 1), 0, len(values), values.device)
    codes, scales = encode(values, name, bits)
    again, scales_again = encode(decode(codes, scales, name), name, None)
    assert torch.equal(codes, again)
    assert torch.equal(scales, scales_again)


@pytest.mark.parametrize("name", NAMES)
def test_an_element_is_at_most_an_eighth_away_and_the_mean_is_exact(name: str) -> None:
    numel, times = 4 * BLOCK_NUMEL, 400
    values = moments(numel)[name]
    largest = values.abs().view(-1, BLOCK_NUMEL).amax(1).repeat_interleave(BLOCK_NUMEL)
    smallest = largest * (1.125 / 1.875) * 2.0 ** (-15 if name == "exp_avg" else -31)
    total = torch.zeros(numel, dtype=torch.float64)
    for step in range(times):
        bits = bits_of_states(seed_of("a", step), 0, numel, values.device)
        found = decode(*encode(values, name, bits), name)
        error = (found - values).abs()
        is_small = values.abs() < smallest
        assert (error[~is_small] <= values.abs()[~is_small] / 8).all()
        assert (error[is_small] <= smallest[is_small] * ROUNDED).all()
        assert torch.equal(found[values.abs() == largest], values[values.abs() == largest])
        if name == "exp_avg_sq":
            assert (found[values > 0] > 0).all()
        total += found
    deviation = torch.maximum(values.abs() / 8, smallest).double() / 2 / times**0.5
    is_even = torch.ones(numel, dtype=torch.bool) if name == "exp_avg" else values >= smallest
    assert ((total / times - values).abs() <= 5 * deviation)[is_even].all()


def test_blocks_that_hold_no_number_or_nothing_but_zeros() -> None:
    values = torch.zeros(4, BLOCK_NUMEL)
    values[1, 3] = float("nan")
    values[2, 3] = float("inf")
    values[3] = 1e-42
    for name in NAMES:
        codes, scales = encode(values.view(-1), name, None)
        found = decode(codes, scales, name).view(4, BLOCK_NUMEL)
        assert torch.equal(found[0], values[0])
        assert found[1].isnan().all()
        assert found[2][3] == float("inf")
        assert torch.equal(found[3], values[3])


def test_arguments_that_would_cut_a_block_are_refused() -> None:
    adam = ADAM[0]
    arrays = make_arrays(adam, 1000).tensors
    states = coded(moments(1000))

    def step(*segments: Any, **changes: Any) -> None:
        adam.kernel.step([replace(shard_of(arrays, states, segments), **changes)])

    usual = replace(adam.segment, offset=0, numel=1000, seed=1)
    with pytest.raises(ValueError, match=r"segments\[0\]: offset 8 and first 0; must be multiples of 256"):
        step(replace(usual, offset=8, numel=10))
    with pytest.raises(ValueError, match=r"must begin and end at multiples of 256"):
        step(usual, grads=((0, arrays["grad"][:300]), (300, arrays["grad"][300:])))
    with pytest.raises(ValueError, match=r"seed: None, but shards\[0\].exp_avg is uint8"):
        step(replace(usual, seed=None))
    with pytest.raises(ValueError, match=r"scales: 0 arrays; must be 2"):
        step(usual, scales=())
    with pytest.raises(ValueError, match=r"scales\[0\]: 3 elements; must be 2 arrays of 4"):
        step(usual, scales=(torch.zeros(3), torch.zeros(4)))
    lion = make_arrays(LION, 256).tensors
    with pytest.raises(TypeError, match="exp_avg: dtype uint8; must be float32 or bfloat16"):
        LION.kernel.step(
            [
                LION.kernel.shard(
                    param=lion["param"],
                    grads=((0, lion["grad"]),),
                    exp_avg=torch.zeros(256, dtype=torch.uint8),
                    segments=LION.whole(256, seed=1),
                )
            ]
        )
