"""What a program may do with a name of DeepSpeed's that is not here, and what it is told when it uses it."""

from __future__ import annotations

import argparse
import os
import pickle
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import pytest
from torch import nn

from dslaunch import drop_in
from dslaunch.runtime.config.load import load_config

TEXT = (
    "deepspeed.linear.optimized_linear.OptimizedLinear is not in dslaunch: has layers with quantized or "
    'sharded bases; see "Compression and quantization" in docs/reference/compatibility.md'
)


@pytest.fixture(autouse=True)
def _deepspeed_is_dslaunch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = set(sys.modules)
    monkeypatch.syspath_prepend(drop_in.FOLDER)
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == "deepspeed":
            del sys.modules[name]


@pytest.fixture
def absent() -> Any:
    from deepspeed.linear.optimized_linear import OptimizedLinear

    return OptimizedLinear


def test_nothing_is_an_instance_of_it(absent: Any) -> None:
    assert not isinstance(nn.Linear(1, 1), absent)
    assert not isinstance(absent, absent)
    assert not isinstance(3, (nn.Module, absent))


def test_it_is_the_same_each_time(absent: Any) -> None:
    import deepspeed.linear.optimized_linear

    assert deepspeed.linear.optimized_linear.OptimizedLinear is absent
    assert issubclass(type("Mine", (absent,), {}), absent)


def test_no_instance_is_made_past_the_call(absent: Any) -> None:
    with pytest.raises(
        NotImplementedError, match=r"^deepspeed\.linear\.optimized_linear\.OptimizedLinear is not in dslaunch"
    ):
        absent.__new__(absent)


def test_it_can_be_sent_to_another_process(absent: Any) -> None:
    from deepspeed.moe.sharded_moe import TOPK_GATE_TIMER

    for one in (absent, TOPK_GATE_TIMER):
        assert pickle.loads(pickle.dumps(one)) is one


def test_it_is_a_type_in_annotations(absent: Any) -> None:
    def forward(one: absent, other: absent | None = None, third: absent | None = None) -> dict[str, absent]:
        return {}

    assert {absent: 1}[absent] == 1
    assert forward(1) == {}
    assert absent[int] is absent


def bases_beside_it() -> list[type]:
    T = TypeVar("T")

    class Abstract(ABC):
        @abstractmethod
        def run(self) -> None: ...

    class OfT(Generic[T]):
        pass

    return [object, nn.Module, Abstract, OfT]


@pytest.mark.parametrize("other", bases_beside_it(), ids=lambda one: one.__name__)
def test_a_class_can_be_made_from_it_and_raises_when_it_is_instantiated(absent: Any, other: type) -> None:
    class Mine(absent, other):  # type: ignore[misc]
        size = 3

        def __init__(self) -> None:
            super().__init__(hidden_size=1)

    assert Mine.size == 3
    with pytest.raises(NotImplementedError) as raised:
        Mine()
    assert str(raised.value) == TEXT


def enter(one: Any) -> None:
    with one:
        pass


USES: dict[str, Callable[[Any], object]] = {
    "calling it": lambda absent: absent(hidden_size=3),
    "entering it": enter,
    "going through it": list,
    "looking into it": lambda absent: 3 in absent,
    "counting with it": lambda absent: absent + 1,
    "comparing with it": lambda absent: absent < 1,
}


@pytest.mark.parametrize("use", USES)
def test_using_it_raises_its_name_and_the_reason(absent: Any, use: str) -> None:
    with pytest.raises(NotImplementedError) as raised:
        USES[use](absent)
    assert str(raised.value) == TEXT


def test_an_attribute_of_it_is_not_there_and_the_reason_is_said(absent: Any) -> None:
    assert not hasattr(absent, "load")
    with pytest.raises(AttributeError) as raised:
        absent.load  # noqa: B018
    assert str(raised.value) == f"OptimizedLinear.load: {TEXT}"


USES_OF_A_CONSTANT: dict[str, Callable[[Any], object]] = {
    "a key": lambda one: {"train_batch_size": 8}.get(one),
    "a comparison": lambda one: one == "cpu",
    "a text": lambda one: f"{one}",
    "a condition": lambda one: 1 if one else 2,
    "a length": len,
    "an index": lambda one: [1, 2][one],
}


@pytest.mark.parametrize("use", USES_OF_A_CONSTANT)
def test_a_constant_raises_wherever_a_wrong_value_would_go_on_in_silence(use: str) -> None:
    from deepspeed.runtime.pipe.schedule import PIPE_CONSTANT_OF_NOBODY as constant

    with pytest.raises(
        NotImplementedError, match=r"PIPE_CONSTANT_OF_NOBODY is not in dslaunch: is how DeepSpeed"
    ):
        USES_OF_A_CONSTANT[use](constant)


def test_an_exception_can_stand_in_an_except_clause() -> None:
    from deepspeed.runtime.pipe.p2p import PipelineError

    def divide() -> float:
        try:
            return 1 / 0
        except PipelineError:
            return 0

    with pytest.raises(ZeroDivisionError):
        divide()


def test_kernels_are_asked_for_without_an_error_and_loading_one_names_it() -> None:
    import deepspeed
    from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder

    assert CPUAdamBuilder().is_compatible()
    assert not AsyncIOBuilder().is_compatible()
    assert deepspeed.ops.__compatible_ops__[CPUAdamBuilder.NAME]
    with pytest.raises(NotImplementedError, match=r"CPUAdamBuilder\(\)\.load\(\) is not in dslaunch"):
        CPUAdamBuilder().load()


def test_layers_are_found_and_replaced_by_dotted_names() -> None:
    from deepspeed.compression.helper import recursive_getattr, recursive_setattr

    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 3)))
    new = nn.Linear(2, 4)
    recursive_setattr(model, "1.0", new)
    recursive_setattr(model, "0", new)
    assert recursive_getattr(model, "1.0") is recursive_getattr(model, "0") is new


def test_the_options_have_their_old_names_too() -> None:
    import deepspeed

    given = deepspeed.add_config_arguments(argparse.ArgumentParser()).parse_args(
        ["--deepscale_config=ds.json"]
    )
    assert vars(given) == {
        "deepspeed": False,
        "deepspeed_config": None,
        "deepscale": False,
        "deepscale_config": "ds.json",
    }


@pytest.mark.parametrize("name", ["adagrad", "adam", "adamw", "lamb", "lion"])
def test_the_names_of_optimizers_are_types_of_a_ds_config(name: str) -> None:
    from deepspeed.runtime import config

    given = getattr(config, f"{name.upper()}_OPTIMIZER")
    assert given == name
    assert (
        load_config({"train_batch_size": 1, "optimizer": {"type": given}}, world_size=1).optimizer is not None
    )


@pytest.mark.parametrize(
    "module",
    [pytest.param("deepspeed.env_report", marks=pytest.mark.exhaustive), "deepspeed.launcher.runner"],
)
def test_a_module_that_is_a_program_can_be_started(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, *(["--help"] if module.endswith("runner") else [])],
        env={**os.environ, "PYTHONPATH": drop_in.FOLDER},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert "dslaunch" in done.stdout
