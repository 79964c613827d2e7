"""A base that bitsandbytes or torchao has quantized lies in units like any other: adapters train beside it
as on one process that has all of it, and each rank keeps its share of the packed bytes.
"""

from __future__ import annotations

import gc
from copy import copy, deepcopy
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dslaunch
from dslaunch import ConfigError, zero
from dslaunch.runtime.checkpoint.export.export import ExportOptions, export
from dslaunch.runtime.checkpoint.export.source import open_source
from tests.runtime.packed_models import WIDTH, Adapted, make_quantized, packed_values
from tests.runtime.ranks import Ranks

NEEDS_BITSANDBYTES = pytest.mark.skipif(
    find_spec("bitsandbytes") is None, reason="needs bitsandbytes: pip install --group drop-in"
)
LIBRARIES = ["bitsandbytes", "torchao"]
PACKED = (torch.uint8, torch.int8, torch.float8_e4m3fn)
NUM_RANKS, STEPS = 2, 4
SAVED = "stage 3"
RELATIVE = 1e-6  # sums of gradients go in another order; seen: 1.6e-7
LR = 1e-2
SMALL_UNITS = {
    "stage3_prefetch_bucket_size": 1000,
    "reduce_bucket_size": 1000,
    "stage3_param_persistence_threshold": 0,
}
HOST = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # zero_optimization, more of the ds_config
    "stage 1": ({"stage": 1}, {}),
    "stage 2": ({"stage": 2}, {}),
    "host": ({"stage": 3, **SMALL_UNITS, **HOST}, {}),
    "disk": ({"stage": 3, **SMALL_UNITS}, {}),
    "checkpoint": ({"stage": 3, **SMALL_UNITS}, {}),
    "reentrant": ({"stage": 3, **SMALL_UNITS}, {}),
    "renewed": ({"stage": 3, **SMALL_UNITS}, {}),
    SAVED: ({"stage": 3, **SMALL_UNITS}, {}),
    "bf16": ({"stage": 3, **SMALL_UNITS}, {"bf16": {"enabled": True}}),
}


class Result(NamedTuple):
    losses: list[float]
    changed: list[str]  # tensors of the base that are not what they were
    between_bytes: (
        int  # bytes of packed integers and of scales that lie in memory between forward and backward
    )
    after_bytes: int  # the same after a step


def _batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, WIDTH, generator=generator), torch.randn(8, 8, generator=generator)


def _integer_bytes() -> int:
    gc.collect()
    with torch._C.DisableTorchFunctionSubclass():
        storages = {
            one.untyped_storage()._cdata: one.untyped_storage().nbytes()
            for one in gc.get_objects()
            if issubclass(type(one), Tensor) and one.dtype in PACKED
        }
    return sum(storages.values())


def _run_of(case: str) -> Any:
    if case not in ("checkpoint", "reentrant"):
        return None
    return lambda block, x: checkpoint(block, x, use_reentrant=case == "reentrant", preserve_rng_state=False)


def _config(zero: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    optimizer = {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.0}}
    return {"train_batch_size": 8, "optimizer": optimizer, "zero_optimization": zero, **more}


def _renew(layer: Any, args: Any) -> None:
    """Register another object for the same weight, as PEFT's DoRA does in each forward on a CPU."""
    weight = layer.weight.to("cpu")
    layer.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, requires_grad=False)


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def _train(rank: int, folder: str, library: str) -> dict[str, Result]:
    return {case: _train_as(case, rank, folder, library) for case in CASES}


def _train_as(case: str, rank: int, folder: str, library: str) -> Result:
    zero, more = CASES[case]
    if case == "disk":
        zero = {**zero, "offload_param": {"device": "nvme", "nvme_path": folder}}
    begun = _integer_bytes()
    # Each rank has weights of its own: all have those of rank 0.
    dtype = torch.bfloat16 if case == "bf16" else torch.float32
    model = make_quantized(library, _run_of(case), seed=rank, is_packed=case != "stage 1", dtype=dtype)
    if case == "renewed":
        for layer in (one.base_layer for one in model.modules() if isinstance(one, Adapted)):
            layer.register_forward_pre_hook(_renew)
    whole = packed_values(make_quantized(library, dtype=dtype).state_dict())
    reference = {name: value.clone() for name, value in whole.items()}
    del whole
    held = sum(one.nbytes for one in reference.values() if one.dtype in PACKED)
    engine, *_ = dslaunch.initialize(
        model=model, model_parameters=_trained(model), config=_config(zero, more)
    )
    losses, between = [], 0
    for step in range(STEPS):
        x, y = (one.chunk(NUM_RANKS)[rank] for one in _batch(step))
        loss = (engine(x.to(dtype).requires_grad_(case == "reentrant")) - y).pow(2).mean()
        if step == STEPS - 1:
            between = _integer_bytes() - begun - held
        engine.backward(loss)
        engine.step()
        total = loss.detach().float()
        torch.distributed.all_reduce(total)
        losses.append(total.item() / NUM_RANKS)
    after = _integer_bytes() - begun - held
    if case == SAVED and library == "torchao":
        with pytest.raises(ConfigError, match=r"base_layer\._weight_qdata.*sharded over the ranks"):
            packed_values(model.state_dict())
    if case == SAVED:
        engine.save_checkpoint(folder, tag="two", client_state={})
        engine.save_16bit_model(folder, "weights.safetensors")
        engine.save_16bit_model(folder, "weights.bin")
        # Another engine takes the model over.
        engine, *_ = dslaunch.initialize(
            model=model, model_parameters=_trained(model), config=_config(zero, more)
        )
    engine.eval()
    if case != "reentrant":  # torch's warns that nothing in it has a gradient
        with torch.no_grad():
            engine(_batch(STEPS)[0].to(dtype))
    state = packed_values(engine.state_dict())
    changed = [
        name
        for name, value in reference.items()
        if state[name].dtype != value.dtype or not torch.equal(_bits(state[name]), _bits(value))
    ]
    engine.destroy()
    return Result(losses, changed, between, after)


def _resume(
    rank: int, folder: str, library: str, zero: dict[str, Any]
) -> tuple[list[float], dict[str, Tensor]]:
    """Go on from the checkpoint with a model whose base is another one until then."""
    model = make_quantized(library, seed=7)
    engine, *_ = dslaunch.initialize(model=model, model_parameters=_trained(model), config=_config(zero, {}))
    engine.load_checkpoint(folder, tag="two")
    losses = []
    for step in range(STEPS, STEPS + 2):
        x, y = _batch(step)
        loss = (engine(x) - y).pow(2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    state = {name: value.clone() for name, value in packed_values(engine.state_dict()).items()}
    engine.destroy()
    return losses, state


def _bits(value: Tensor) -> Tensor:
    return value.reshape(-1).view(torch.uint8)


def _losses_of_one_process(library: str, dtype: torch.dtype, steps: int = STEPS) -> list[float]:
    """Judge: the library and torch alone."""
    model = make_quantized(library)
    for param in model.parameters():
        if param.requires_grad:
            param.data = param.data.to(dtype).float()
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=0.0)
    losses = []
    for step in range(steps):
        x, y = _batch(step)
        loss = (model(x) - y).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _use_outside(rank: int) -> None:
    """Ask for values that are sharded by every way that a program, PEFT and bitsandbytes have."""
    model = make_quantized("bitsandbytes")
    engine, *_ = dslaunch.initialize(
        model=model, model_parameters=_trained(model), config=_config({"stage": 3, **SMALL_UNITS}, {})
    )
    named = {name: one for name, one in model.named_parameters() if name.endswith("0.base_layer.weight")}
    assert {type(one).__name__ for one in named.values()} == {"Params4bit", "Int8Params"}
    for name, weight in named.items():
        for use in (
            lambda one: one.data.float(),
            lambda one: one.data.sum(),
            lambda one: one.data.to(torch.float64),
            lambda one: one.detach().clone(),
            lambda one: torch.chunk(one, 2),
            lambda one: one == 0,
            copy,
            deepcopy,
        ):
            with pytest.raises(ConfigError, match=rf"'{name}' was asked for .*GatheredParameters"):
                use(weight)
        assert weight.data.shape == weight.shape
        assert weight.to("cpu") is weight
    assert model.to("cpu") is model
    with zero.GatheredParameters(list(named.values())):
        values = [one.data.clone() for one in named.values()]
    right = [one.clone() for name, one in make_quantized("bitsandbytes").named_parameters() if name in named]
    for value, expected in zip(values, right, strict=True):
        assert torch.equal(_bits(value), _bits(expected))
    engine.destroy()


@NEEDS_BITSANDBYTES
def test_values_that_are_sharded_are_refused_by_name_outside_of_their_layers(ranks: Ranks) -> None:
    ranks(_use_outside, world_size=NUM_RANKS)


def _merge(rank: int) -> str:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(make_quantized("bitsandbytes"), LoraConfig(r=2, target_modules=["base_layer"]))
    engine, *_ = dslaunch.initialize(
        model=model, model_parameters=_trained(model), config=_config({"stage": 3}, {})
    )
    with pytest.raises(ConfigError) as caught:
        engine.weights(merge_lora=True)
    engine.destroy()
    return str(caught.value)


@NEEDS_BITSANDBYTES
@pytest.mark.skipif(find_spec("peft") is None, reason="needs peft: pip install --group drop-in")
def test_adapters_of_packed_layers_are_merged_by_peft_alone(ranks: Ranks) -> None:
    for said in ranks(_merge, world_size=NUM_RANKS):
        assert said.endswith(
            "base_layer.base_layer.weight' is Params4bit of torch.uint8, which PEFT merges in place only; "
            "give merge_lora=False, which leaves adapters apart; save them, and merge in one process with "
            "the base, by PEFT's merge_and_unload()"
        )


@pytest.fixture(scope="module", params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if find_spec(name) is None:
        pytest.skip(f"needs {name}: pip install --group drop-in")
    return name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, library: str) -> Path:
    return tmp_path_factory.mktemp(library)


@pytest.fixture(scope="module")
def found(ranks: Ranks, folder: Path, library: str) -> list[dict[str, Result]]:
    return ranks(_train, str(folder), library, world_size=NUM_RANKS)


@pytest.mark.parametrize("case", [case for case in CASES if case != "bf16"])
def test_adapters_train_as_beside_the_whole_base(
    found: list[dict[str, Result]], library: str, case: str
) -> None:
    expected = _losses_of_one_process(library, torch.float32)
    for of_rank in found:
        assert of_rank[case].losses == pytest.approx(expected, rel=RELATIVE)
        assert of_rank[case].changed == []


def test_bits_of_the_base_are_no_numbers_that_16_bits_round(
    found: list[dict[str, Result]], library: str
) -> None:
    expected = _losses_of_one_process(library, torch.bfloat16)
    for of_rank in found:
        assert of_rank["bf16"].losses == pytest.approx(expected, rel=2e-2)
        assert of_rank["bf16"].changed == []


@pytest.mark.parametrize("case", ["stage 3", "checkpoint", "reentrant", "host", "renewed"])
def test_a_rank_keeps_its_share_of_the_packed_bytes_and_a_graph_keeps_none(
    found: list[dict[str, Result]], case: str
) -> None:
    whole, block = 4 * WIDTH * WIDTH * 3 // 2, 4 * WIDTH * WIDTH
    for of_rank in found:
        assert of_rank["stage 2"].after_bytes >= whole
        assert of_rank[case].after_bytes <= 1.05 * of_rank["stage 2"].after_bytes / NUM_RANKS
        assert of_rank[case].between_bytes <= of_rank[case].after_bytes + 1.05 * block


@pytest.mark.parametrize("zero", [{"stage": 2}, {"stage": 3, **SMALL_UNITS}], ids=["stage 2", "stage 3"])
def test_a_checkpoint_brings_the_base_and_goes_on_on_another_number_of_ranks(
    ranks: Ranks, found: list[dict[str, Result]], folder: Path, library: str, zero: dict[str, Any]
) -> None:
    (losses, state), *_ = ranks(_resume, str(folder), library, zero, world_size=1)
    expected = _losses_of_one_process(library, torch.float32, STEPS + 2)[STEPS:]
    assert losses == pytest.approx(expected, rel=RELATIVE)
    for name, value in packed_values(make_quantized(library).state_dict()).items():
        assert torch.equal(_bits(state[name]), _bits(value)), name


def test_exported_weights_are_those_of_the_library_bit_by_bit(
    found: list[dict[str, Result]], folder: Path, library: str
) -> None:
    expected = packed_values(make_quantized(library).state_dict())
    source = open_source(folder, "two")
    export(source, folder / "exported", ExportOptions(dtype=torch.bfloat16))
    for path in ("weights.safetensors", "exported/model.safetensors", "weights.bin"):
        read = torch.load if path.endswith(".bin") else load_file
        written = packed_values(read(folder / path))
        assert written.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(_bits(written[name]), _bits(value)), name
