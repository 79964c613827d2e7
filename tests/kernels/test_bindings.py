"""What a step refuses, and the words it uses; and that the stub file says what the compiled module has."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dslaunch.kernels import _C, AdamSegment, AdamShard, adamw_step, adamw_step_reference

GOOD = AdamSegment(offset=0, numel=8, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=1)
SHARED = torch.zeros(8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bad:
    """One argument that replaces a good one, and what is said about it."""

    name: str
    value: Any
    error: type[Exception]
    message: str


def read_only(numel: int) -> np.ndarray:
    array = np.zeros(numel, np.float32)
    array.setflags(write=False)
    return array


def odd_address(numel: int) -> np.ndarray:
    return np.zeros(4 * numel + 1, np.uint8)[1:].view(np.float32)


BAD_ARRAYS = [
    Bad(
        name="param",
        value=[0.0] * 8,
        error=TypeError,
        message=("shards[0].param: a list gives no access to its memory through DLPack; pass a CPU "
                 "torch.Tensor (detached, if it requires grad) or a numpy array"),
    ),
    Bad(
        name="param",
        value=torch.zeros(8, device="meta"),
        error=TypeError,
        message=("shards[0].param: a torch.Tensor gives no access to its memory through DLPack; pass a CPU "
                 "torch.Tensor (detached, if it requires grad) or a numpy array"),
    ),
    Bad(name="param", value=torch.zeros(8).double(), error=TypeError,
        message="shards[0].param: dtype float64; must be float32 or bfloat16"),
    Bad(name="param", value=torch.zeros(8).half(), error=TypeError,
        message="shards[0].param: dtype float16; must be float32 or bfloat16"),
    Bad(name="exp_avg", value=torch.zeros(8).half(), error=TypeError,
        message="shards[0].exp_avg: dtype float16; must be float32, bfloat16 or uint8"),
    Bad(name="exp_avg_sq", value=torch.zeros(8).int(), error=TypeError,
        message="shards[0].exp_avg_sq: dtype int32; must be float32, bfloat16 or uint8"),
    Bad(name="exp_avg_sq", value=torch.zeros(8).bfloat16(), error=TypeError,
        message=("shards[0].exp_avg_sq: dtype bfloat16, but shards[0].exp_avg has float32; all states of "
                 "one shard must have the same dtype")),
    Bad(name="grad", value=torch.zeros(8).double(), error=TypeError,
        message="shards[0].grads[0]: dtype float64; must be float32, bfloat16 or float16"),
    Bad(name="param_out", value=torch.zeros(8).int(), error=TypeError,
        message="shards[0].param_out: dtype int32; must be float32, bfloat16 or float16"),
    Bad(name="grad", value=torch.zeros(9), error=ValueError,
        message=("shards[0].grads[0]: 9 elements from 0 on; must lie in [0, 8), behind the piece before "
                 "and inside the shard")),
    Bad(name="exp_avg", value=torch.zeros(9), error=ValueError,
        message=("shards[0].exp_avg: 9 elements, but shards[0].param has 8; all arrays of one shard must "
                 "have the same length")),
    Bad(name="param_out", value=torch.zeros(0).bfloat16(), error=ValueError,
        message=("shards[0].param_out: 0 elements, but shards[0].param has 8; all arrays of one shard "
                 "must have the same length")),
    Bad(name="param", value=torch.zeros(2, 4), error=ValueError,
        message="shards[0].param: 2 dimensions; must have 1: pass a flat view"),
    Bad(name="param", value=torch.zeros(()), error=ValueError,
        message="shards[0].param: 0 dimensions; must have 1: pass a flat view"),
    Bad(name="grad", value=torch.zeros(16)[::2], error=ValueError,
        message="shards[0].grads[0]: stride 2; must be 1: pass a contiguous array"),
    Bad(name="grad", value=torch.zeros(1).expand(8), error=ValueError,
        message="shards[0].grads[0]: stride 0; must be 1: pass a contiguous array"),
    Bad(name="exp_avg", value=read_only(8), error=ValueError,
        message="shards[0].exp_avg: the array is read-only, but it is written; pass a writable one"),
    Bad(name="grad", value=odd_address(8), error=ValueError,
        message="shards[0].grads[0]: the address is not a multiple of the element size"),
    Bad(name="param", value=torch.nn.Parameter(torch.zeros(8)), error=ValueError,
        message=("shards[0].param: the tensor requires grad; pass shards[0].param.detach(), "
                 "which has the same memory")),
    Bad(name="grad", value=SHARED, error=ValueError,
        message=("shards[0].grads[0]: shares memory with shards[0].exp_avg; every array "
                 "needs memory of its own")),
]  # fmt: skip

BAD_SEGMENTS = [
    Bad(name="segments", value=(3,), error=TypeError,
        message="shards[0].segments[0]: a int without 'offset'; must be an AdamSegment"),
    Bad(name="segments", value=(GOOD, SimpleNamespace(offset=0, numel=0)), error=TypeError,
        message="shards[0].segments[1]: a SimpleNamespace without 'step'; must be an AdamSegment"),
    Bad(name="segments", value=(replace(GOOD, offset=-1),), error=ValueError,
        message="shards[0].segments[0]: offset -1 and numel 8 do not fit in the shard of 8 elements"),
    Bad(name="segments", value=(replace(GOOD, numel=-1),), error=ValueError,
        message="shards[0].segments[0]: offset 0 and numel -1 do not fit in the shard of 8 elements"),
    Bad(name="segments", value=(replace(GOOD, offset=1),), error=ValueError,
        message="shards[0].segments[0]: offset 1 and numel 8 do not fit in the shard of 8 elements"),
    Bad(name="segments", value=(replace(GOOD, offset=9, numel=0),), error=ValueError,
        message="shards[0].segments[0]: offset 9 and numel 0 do not fit in the shard of 8 elements"),
    Bad(name="segments", value=(replace(GOOD, numel=2**63 - 1),), error=ValueError,
        message=(f"shards[0].segments[0]: offset 0 and numel {2**63 - 1} do not fit in "
                 "the shard of 8 elements")),
    Bad(name="segments", value=(replace(GOOD, offset=4, numel=4), replace(GOOD, numel=5)), error=ValueError,
        message="shards[0].segments[0]: elements [4, 8) overlap shards[0].segments[1], elements [0, 5)"),
    Bad(name="segments", value=(GOOD, GOOD), error=ValueError,
        message="shards[0].segments[1]: elements [0, 8) overlap shards[0].segments[0], elements [0, 8)"),
    Bad(name="segments", value=(replace(GOOD, numel=2**64),), error=TypeError,
        message=f"shards[0].segments[0].numel: {2**64}; must be an int that fits in 64 bits"),
    Bad(name="segments", value=(replace(GOOD, step=1.5),), error=TypeError,
        message="shards[0].segments[0].step: 1.5; must be an int that fits in 64 bits"),
    Bad(name="segments", value=(replace(GOOD, step=0),), error=ValueError,
        message="shards[0].segments[0].step: 0; must be >= 1: the first step is step 1"),
    Bad(name="segments", value=(replace(GOOD, lr="fast"),), error=TypeError,
        message="shards[0].segments[0].lr: 'fast'; must be a float"),
    Bad(name="segments", value=(replace(GOOD, lr=-1e-3),), error=ValueError,
        message="shards[0].segments[0].lr: -0.001; must be finite and >= 0"),
    Bad(name="segments", value=(replace(GOOD, lr=float("inf")),), error=ValueError,
        message="shards[0].segments[0].lr: inf; must be finite and >= 0"),
    Bad(name="segments", value=(replace(GOOD, eps=float("nan")),), error=ValueError,
        message="shards[0].segments[0].eps: nan; must be finite and >= 0"),
    Bad(name="segments", value=(replace(GOOD, weight_decay=-0.5),), error=ValueError,
        message="shards[0].segments[0].weight_decay: -0.5; must be finite and >= 0"),
    Bad(name="segments", value=(replace(GOOD, beta1=1.0),), error=ValueError,
        message="shards[0].segments[0].beta1: 1; must be in [0, 1)"),
    Bad(name="segments", value=(replace(GOOD, beta2=-0.1),), error=ValueError,
        message="shards[0].segments[0].beta2: -0.1; must be in [0, 1)"),
]  # fmt: skip

BAD_OPTIONS = [
    Bad(name="grad_scale", value=float("nan"), error=ValueError, message="grad_scale: nan; must be finite"),
    Bad(name="grad_scale", value=float("inf"), error=ValueError, message="grad_scale: inf; must be finite"),
]


BAD_PIECES = [
    Bad(name="grads", value=[torch.zeros(8)], error=TypeError,
        message="shards[0].grads[0]: a torch.Tensor; must be a pair of an offset and an array"),
    Bad(name="grads", value=[(0.5, torch.zeros(8))], error=TypeError,
        message="shards[0].grads[0]: a tuple; must be a pair of an offset and an array"),
    Bad(name="grads", value=[(-1, torch.zeros(8))], error=ValueError,
        message=("shards[0].grads[0]: 8 elements from -1 on; must lie in [0, 8), behind the piece before "
                 "and inside the shard")),
    Bad(name="grads", value=[(0, torch.zeros(3)), (2, torch.zeros(5))], error=ValueError,
        message=("shards[0].grads[1]: 5 elements from 2 on; must lie in [3, 8), behind the piece before "
                 "and inside the shard")),
    Bad(name="grads", value=[(2**62, torch.zeros(2))], error=ValueError,
        message=(f"shards[0].grads[0]: 2 elements from {2**62} on; must lie in [0, 8), behind the piece "
                 "before and inside the shard")),
]  # fmt: skip


def arguments(bad: Bad) -> dict[str, Any]:
    options: dict[str, Any] = {bad.name: bad.value} if bad in BAD_OPTIONS else {}
    return {"shards": [shard_with(bad)], **options}


def shard_with(bad: Bad) -> Any:
    """A good shard, but for that."""
    good: dict[str, Any] = {
        "param": torch.zeros(8),
        "grads": [(0, bad.value if bad.name == "grad" else torch.zeros(8))],
        "exp_avg": SHARED,
        "exp_avg_sq": torch.zeros(8),
        "segments": (GOOD,),
        "param_out": torch.zeros(8, dtype=torch.bfloat16),
    }
    return AdamShard(**good | ({bad.name: bad.value} if bad.name in good else {}))


@pytest.mark.parametrize("step", [adamw_step, adamw_step_reference])
@pytest.mark.parametrize(
    "bad", BAD_ARRAYS + BAD_PIECES + BAD_SEGMENTS + BAD_OPTIONS, ids=lambda bad: bad.message[:60]
)
def test_a_bad_argument_is_refused_by_name(bad: Bad, step: Any) -> None:
    with pytest.raises(bad.error) as caught:
        step(**arguments(bad))
    assert str(caught.value) == bad.message


def test_a_negative_number_of_threads_is_refused() -> None:
    bad = Bad(
        name="num_threads",
        value=-1,
        error=ValueError,
        message="num_threads: -1; must be >= 0 (0: OpenMP's default)",
    )
    with pytest.raises(bad.error) as caught:
        adamw_step([], num_threads=bad.value)
    assert str(caught.value) == bad.message


@pytest.mark.parametrize("shards", [[SimpleNamespace(param=torch.zeros(8))], [3]])
def test_what_is_no_shard_is_refused(shards: Any) -> None:
    with pytest.raises(TypeError, match=r"^shards\[0\]: a \w+ without '\w+'; must be an AdamShard"):
        adamw_step(shards)


def test_two_shards_must_not_share_memory() -> None:
    def shard(param: torch.Tensor) -> AdamShard:
        grads = [(0, torch.zeros(8))]
        states = {"exp_avg": torch.zeros(8), "exp_avg_sq": torch.zeros(8)}
        return AdamShard(param=param, grads=grads, segments=(), **states)

    whole = torch.zeros(12)
    with pytest.raises(ValueError, match=r"^shards\[1\].param: shares memory with shards\[0\].param"):
        adamw_step([shard(whole[4:]), shard(whole[:8])])


def test_nothing_is_written_when_an_argument_is_refused() -> None:
    param = torch.ones(8)
    with pytest.raises(ValueError, match="overlap"):
        adamw_step(
            AdamShard(
                param=param if i == 0 else torch.ones(8),
                grads=[(0, torch.ones(8))],
                exp_avg=torch.ones(8),
                exp_avg_sq=torch.ones(8),
                segments=(replace(GOOD, numel=4), replace(GOOD, offset=4 - i, numel=4)),
            )
            for i in range(2)
        )
    assert torch.equal(param, torch.ones(8))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs one CUDA device")
def test_a_tensor_on_a_device_is_refused() -> None:
    bad = Bad(name="grad", value=torch.zeros(8, device="cuda"), error=ValueError, message="")
    with pytest.raises(
        bad.error, match=r"^shards\[0\].grads\[0\]: the array is on a device \(DLPack device type 2\)"
    ):
        adamw_step(**arguments(bad))


def test_the_stub_file_has_the_signatures_of_the_compiled_module() -> None:
    stubgen = pytest.importorskip("nanobind.stubgen")
    generator = stubgen.StubGen(_C)
    generator.put(_C)
    written = Path(__file__).parents[2] / "kernels" / "_C.pyi"
    assert ast.dump(ast.parse(generator.get())) == ast.dump(ast.parse(written.read_text()))


def test_what_a_program_still_holds_at_its_end_is_no_news() -> None:
    program = (
        "import ctypes\n"
        "from dslaunch.kernels import _C\n"
        "ctypes.pythonapi.Py_IncRef(ctypes.py_object(_C.DiskPool(num_threads=1, block_bytes=65536)))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stderr == ""
