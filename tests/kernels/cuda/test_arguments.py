"""What a step on a device refuses: all that the CPU's refuses, in the same words."""

from __future__ import annotations

import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dslaunch.kernels import ADAM, SGD, SgdSegment, SgdShard, sgd_step
from dslaunch.kernels.cuda import arrays, squared_norm, step
from dslaunch.kernels.cuda.arrays import CPU, read_array
from dslaunch.kernels.cuda.shards import Rule, read_shards
from tests.kernels.test_bindings import (
    BAD_ARRAYS,
    BAD_OPTIONS,
    BAD_PIECES,
    BAD_SEGMENTS,
    Bad,
    shard_with,
)

# What can be said of host memory only, and what only its kernels can.
OTHER_WORDS = {
    "pass a CPU torch.Tensor (detached, if it requires grad) or a numpy array": (
        "pass a CUDA torch.Tensor (detached, if it requires grad) or a cupy array"
    ),
    "must be float32, bfloat16 or uint8": "must be float32 or bfloat16",
    **{
        f"shards[0].param: dtype {dtype}; must be float32 or bfloat16": (
            f"shards[0].param: dtype {dtype}; must be float32"
        )
        for dtype in ("float64", "float16")
    },
}


@pytest.mark.parametrize("bad", BAD_ARRAYS + BAD_PIECES + BAD_SEGMENTS, ids=lambda bad: bad.message[:60])
def test_a_bad_argument_is_refused_in_the_words_of_the_cpus_binding(bad: Bad) -> None:
    message = bad.message
    for words, others in OTHER_WORDS.items():
        message = message.replace(words, others)
    rule = Rule(kernel=ADAM, mode=1)
    with pytest.raises(bad.error) as caught:
        read_shards([shard_with(bad)], rule, device_types=(CPU,))
    assert str(caught.value) == message


def test_random_bits_are_refused() -> None:
    shard = shard_with(Bad(name="", value=None, error=ValueError, message=""))
    seeded = replace(shard, segments=tuple(replace(one, seed=7) for one in shard.segments))
    with pytest.raises(ValueError, match=r"segments\[0\].seed: 7; must be None: kernels on a device round"):
        read_shards([seeded], Rule(kernel=ADAM, mode=1), device_types=(CPU,))


@pytest.mark.parametrize("bad", BAD_OPTIONS, ids=lambda bad: bad.message)
def test_a_bad_number_is_refused(bad: Bad) -> None:
    with pytest.raises(bad.error) as caught:
        step(ADAM, [], stream=0, **{bad.name: bad.value})
    assert str(caught.value) == bad.message


def test_an_array_in_host_memory_is_refused() -> None:
    message = (
        r"^shards\[0\].param: the array is in host memory \(DLPack device type 1\); it must "
        r"be on a CUDA device$"
    )
    with pytest.raises(ValueError, match=message):
        step(ADAM, [shard_with(Bad(name="", value=None, error=ValueError, message=""))], stream=0)
    with pytest.raises(ValueError, match=r"^grads\[0\]: the array is in host memory"):
        squared_norm([torch.zeros(3)], out=torch.zeros(3), stream=0)


@pytest.mark.parametrize("shards", [[SimpleNamespace(param=torch.zeros(8))], [3]])
def test_what_is_no_shard_is_refused(shards: Any) -> None:
    rule = Rule(kernel=ADAM, mode=1)
    with pytest.raises(TypeError, match=r"^shards\[0\]: a \w+ without '\w+'; must be an AdamShard"):
        read_shards(shards, rule, device_types=(CPU,))


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (torch.zeros(2), "device_scale: 2 elements; must be 1"),
        (torch.zeros(()), "device_scale: 0 dimensions; must have 1: pass a flat view"),
    ],
)
def test_a_bad_factor_is_refused(scale: torch.Tensor, message: str) -> None:
    rule = Rule(kernel=ADAM, mode=1)
    with pytest.raises(ValueError, match=f"^{message}$"):
        read_shards([], rule, device_scale=scale, device_types=(CPU,))


def sgd_shard(**changes: Any) -> SgdShard:
    hyper: dict[str, Any] = {"momentum": 0.9, "dampening": 0.0, "nesterov": False} | changes
    segment = SgdSegment(offset=0, numel=4, lr=0.1, weight_decay=0.0, step=1, **hyper)
    return SgdShard(
        param=torch.zeros(4), grads=[(0, torch.zeros(4))], momentum_buffer=None, segments=(segment,)
    )


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({}, ValueError,
         ("shards[0].momentum_buffer: None, but shards[0].segments[0] has momentum 0.9; pass an array, of "
          "zeros before step 1")),
        ({"nesterov": True, "dampening": 0.5}, ValueError,
         ("shards[0].segments[0].nesterov: True, with momentum 0.9 and dampening 0.5; needs momentum "
          "above 0 and dampening 0")),
        ({"nesterov": 1}, TypeError, "shards[0].segments[0].nesterov: 1; must be True or False"),
        ({"dampening": float("inf")}, ValueError, "shards[0].segments[0].dampening: inf; must be finite"),
    ],
)  # fmt: skip
def test_bad_hyper_parameters_of_sgd_are_refused(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    for call in (
        lambda shards: read_shards(shards, Rule(kernel=SGD), device_types=(CPU,)),
        sgd_step,  # the CPU's says the same
    ):
        with pytest.raises(error) as caught:
            call([sgd_shard(**changes)])
        assert str(caught.value) == message


# ---- memory that arrives through DLPack ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_tensors_memory_is_found(dtype: torch.dtype) -> None:
    tensor = torch.zeros(20, dtype=dtype)[3:]
    read = read_array("x", tensor, dtypes=tuple(arrays.ITEM_BYTES), is_written=True, device_types=(CPU,))
    assert (read.address, read.numel, f"torch.{read.dtype}") == (tensor.data_ptr(), 17, str(dtype))
    assert read.end == tensor.data_ptr() + 17 * tensor.element_size()
    assert read.at(2) == tensor[2:].data_ptr()


def test_an_array_that_may_only_be_read_can_be_read() -> None:
    array = np.zeros(3, np.float32)
    array.setflags(write=False)
    read = read_array("x", array, dtypes=("float32",), is_written=False, device_types=(CPU,))
    assert read.address == array.ctypes.data


def test_an_exporter_from_before_dlpack_1_is_understood() -> None:
    class Old:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

        def __dlpack_device__(self) -> tuple[int, int]:
            return self.tensor.__dlpack_device__()

        def __dlpack__(self, stream: Any = None) -> object:
            return self.tensor.__dlpack__()

    tensor = torch.ones(5)
    read = read_array("x", Old(tensor), dtypes=("float32",), is_written=True, device_types=(CPU,))
    assert (read.address, read.numel) == (tensor.data_ptr(), 5)


def test_the_memory_lives_as_long_as_what_was_read() -> None:
    array = np.zeros(5, np.float32)
    alive = weakref.ref(array)
    read = read_array("x", array, dtypes=("float32",), is_written=True, device_types=(CPU,))
    del array
    assert alive() is not None
    del read
    assert alive() is None
