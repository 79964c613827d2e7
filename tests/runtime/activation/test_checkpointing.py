"""Activation checkpointing: the same gradients from less memory, with DeepSpeed's names and settings."""

from __future__ import annotations

import gc
import logging
import re
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import dslaunch
from dslaunch import ConfigError
from dslaunch.runtime.activation.host_inputs import HostCopy
from tests.runtime.models import (
    Uneven,
    assert_same_bits,
    batch,
    loss_of,
    make_config,
    make_model,
    snapshot,
    train_engine,
)
from tests.runtime.ranks import Ranks

checkpointing = dslaunch.checkpointing


@contextmanager
def fresh_process() -> Iterator[None]:
    """As in a process where nothing was configured yet; rank processes serve many tests."""
    was, checkpointing._PROCESS = checkpointing._PROCESS, checkpointing._Process()
    try:
        yield
    finally:
        checkpointing._PROCESS = was


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    with fresh_process():
        yield


def host_copies() -> int:
    gc.collect()
    return sum(type(one) is HostCopy for one in gc.get_objects())


# ---- one function


@dataclass
class Parts:
    """What a function may return: torch looks into containers, not into this."""

    whole: Tensor
    by_name: dict[str, tuple[Tensor, ...]]


class Block(nn.Module):
    """Dropout, a mask without a gradient, a keyword, and outputs in an object."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(7, 15), nn.Linear(15, 7)

    def forward(self, x: Tensor, mask: Tensor, pair: tuple[Tensor, float], *, bias: Tensor) -> Parts:
        inner = torch.dropout(torch.tanh(self.up(x)), 0.5, True)
        y = self.down(inner) * mask + pair[0] * pair[1] + bias
        return Parts(whole=y, by_name={"halves": (y[:2].sin(), y[2:].exp())})


Call = Callable[..., Any]


def plain_call(function: Call, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def gradients(call: Call) -> dict[str, Tensor]:
    """Of two blocks, one after the other, called through `call`; the input needs no gradient."""
    torch.manual_seed(3)
    blocks = nn.ModuleList([Block(), Block()])
    scale, bias = torch.randn(7, requires_grad=True), torch.randn(7, requires_grad=True)
    mask = torch.rand(4, 7) > 0.3
    x = torch.randn(4, 7)
    for block in blocks:
        parts = call(block, x, mask, (scale, 0.5), bias=bias)
        first, second = parts.by_name["halves"]
        x = parts.whole + torch.cat([first, second])
    x.pow(2).sum().backward()
    own = {"scale": scale.grad, "bias": bias.grad, "drawn after": torch.rand(3)}
    return own | {name: param.grad for name, param in blocks.named_parameters()}  # type: ignore[return-value]


@pytest.mark.slow  # torch loads its compiler at the first checkpoint
@pytest.mark.parametrize("name", ["checkpoint", "non_reentrant_checkpoint"])
@pytest.mark.parametrize("options", [{}, {"checkpoint_in_cpu": True}, {"profile": True}], ids=str)
def test_gradients_and_random_numbers_are_those_of_a_plain_call(name: str, options: dict[str, bool]) -> None:
    expected = gradients(plain_call)
    checkpointing.configure(None, **options)
    assert_same_bits(gradients(getattr(checkpointing, name)), expected)


def test_the_backward_calls_the_function_again_and_nothing_of_it_was_kept() -> None:
    kept: list[weakref.ref[Tensor]] = []

    def function(x: Tensor) -> Tensor:
        inner = x.exp()
        kept.append(weakref.ref(inner))
        return inner.sin()

    x = torch.ones(3, requires_grad=True)
    y = checkpointing.checkpoint(function, x)
    assert len(kept) == 1
    assert kept[0]() is None
    y.sum().backward()
    assert len(kept) == 2
    assert torch.equal(x.grad, torch.ones(3).exp().cos() * torch.ones(3).exp())  # type: ignore[arg-type]


def test_a_backward_may_go_through_the_same_function_twice() -> None:
    checkpointing.configure(None, checkpoint_in_cpu=True, profile=True)
    x = torch.ones(3, requires_grad=True)
    y = checkpointing.checkpoint(torch.sin, x).sum()
    y.backward(retain_graph=True)
    y.backward()
    assert torch.equal(x.grad, 2 * torch.ones(3).cos())  # type: ignore[arg-type]


@pytest.mark.slow
def test_without_gradients_it_is_the_function() -> None:
    checkpointing.configure(None, checkpoint_in_cpu=True)
    with torch.no_grad():
        y = checkpointing.checkpoint(torch.exp, torch.ones(2, requires_grad=True))
    assert not y.requires_grad
    assert host_copies() == 0


def test_an_error_of_the_function_is_the_callers() -> None:
    with pytest.raises(ZeroDivisionError):
        checkpointing.checkpoint(lambda x: x / (1 // 0), torch.ones(1, requires_grad=True))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's, where a graph goes on after a break
def test_compiled_code_may_call_it() -> None:
    def function(x: Tensor) -> Any:
        return checkpointing.checkpoint(torch.sin, x.exp()) * 2

    plain, compiled = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    function(plain).sum().backward()
    torch.compile(function, backend="aot_eager")(compiled).sum().backward()
    assert torch.allclose(plain.grad, compiled.grad)  # type: ignore[arg-type]


# ---- inputs in host memory


@pytest.mark.slow
def test_cpu_checkpointing_keeps_copies_of_the_inputs_until_the_backward_and_nothing_else() -> None:
    checkpointing.configure(None, checkpoint_in_cpu=True)
    layers = [nn.Linear(7, 7) for _ in range(3)]
    x = torch.randn(4, 7)
    mask = torch.ones(7, dtype=torch.int64)
    seen = []
    for layer in layers:
        x = checkpointing.checkpoint(lambda x, mask, layer=layer: layer(x).tanh() * mask, x, mask)
        seen.append(weakref.ref(x))
    loss = x.sum()
    assert host_copies() == 2  # the newest input stays, for the backward begins with it
    assert [one() is None for one in seen] == [True, True, False]  # the loop's own variable has the last
    loss.backward()
    del loss, x
    assert host_copies() == 0


@pytest.mark.slow
def test_without_cpu_checkpointing_the_inputs_stay_as_they_are() -> None:
    x = torch.randn(4, 7, requires_grad=True)
    y = checkpointing.checkpoint(torch.exp, x)
    assert host_copies() == 0
    y.sum().backward()


def test_a_checkpoint_inside_a_checkpoint_with_inputs_in_host_memory() -> None:
    def outer(call: Call, x: Tensor) -> Any:
        return call(lambda y: call(torch.sin, y.exp()).cos(), x)

    plain, nested = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    outer(plain_call, plain).sum().backward()
    checkpointing.configure(None, checkpoint_in_cpu=True)
    outer(checkpointing.checkpoint, nested).sum().backward()
    assert torch.equal(plain.grad, nested.grad)  # type: ignore[arg-type]


# ---- random states of a model-parallel group


class Group:
    """What Megatron hands over: two ranks of a model-parallel group."""

    def __init__(self, rank: int, size: int = 2) -> None:
        self.rank, self.size = rank, size

    def get_model_parallel_rank(self) -> int:
        return self.rank

    def get_model_parallel_world_size(self) -> int:
        return self.size


def drawn(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    checkpointing.configure(Group(rank))
    checkpointing.model_parallel_cuda_manual_seed(1234)
    tracker = checkpointing.get_cuda_rng_tracker()
    with tracker.fork():
        own = torch.rand(3)
    with tracker.fork():
        more = torch.rand(3)
    return torch.rand(3), own, more


def test_ranks_of_a_group_share_one_sequence_and_have_one_of_their_own() -> None:
    (shared, own, more), (other_shared, other_own, _) = drawn(0), drawn(1)
    assert torch.equal(shared, other_shared)
    assert torch.equal(shared, torch.rand(3, generator=torch.Generator().manual_seed(1234)))
    seeds = [torch.Generator().manual_seed(1234 + 2718 + rank) for rank in (0, 1)]
    assert torch.equal(own, torch.rand(3, generator=seeds[0]))
    assert torch.equal(more, torch.rand(3, generator=seeds[0]))
    assert torch.equal(other_own, torch.rand(3, generator=seeds[1]))


def test_the_recomputation_draws_from_the_tracker_what_the_forward_drew() -> None:
    def function(x: Tensor) -> Tensor:
        with checkpointing.get_cuda_rng_tracker().fork():
            return torch.dropout(x.exp(), 0.5, True).sin()

    def run(call: Call) -> tuple[Tensor | None, Tensor]:
        checkpointing.model_parallel_cuda_manual_seed(5)
        x = torch.ones(50, requires_grad=True)
        y = call(function, call(function, x))
        y.sum().backward()
        with checkpointing.get_cuda_rng_tracker().fork():
            return x.grad, torch.rand(3)

    for plain, again in zip(run(plain_call), run(checkpointing.checkpoint), strict=True):
        assert torch.equal(plain, again)  # type: ignore[arg-type]


def test_the_tracker_of_the_process_has_deepspeed_s_name() -> None:
    script = (
        "from dslaunch import checkpointing as one\n"
        "assert one._CUDA_RNG_STATE_TRACKER is one.get_cuda_rng_tracker()\n"
        "one.model_parallel_cuda_manual_seed(5)\n"
        "assert list(one._CUDA_RNG_STATE_TRACKER.get_states()) == [one._MODEL_PARALLEL_RNG_TRACKER_NAME]\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_random_states_go_by_their_names() -> None:
    tracker = checkpointing.get_cuda_rng_tracker()
    tracker.add("one", 1)
    with pytest.raises(ConfigError, match="random state 'one' is there already"):
        tracker.add("one", 2)
    with (
        pytest.raises(ConfigError, match="random state 'two' was not added; there are: 'one'"),
        tracker.fork("two"),
    ):
        pass
    states = tracker.get_states()
    tracker.reset()
    with (
        pytest.raises(ConfigError, match="there are: none"),
        tracker.fork("one"),
    ):
        pass
    tracker.set_states(states)
    with tracker.fork("one"):
        assert torch.equal(torch.rand(2), torch.rand(2, generator=torch.Generator().manual_seed(1)))


# ---- settings


def test_configure_reads_a_ds_config_and_what_is_named_goes_before_it() -> None:
    assert not checkpointing.is_configured()
    section = {"cpu_checkpointing": True, "profile": True}
    checkpointing.configure(
        None, {"train_batch_size": 1, "activation_checkpointing": section}, profile=False, synchronize=True
    )
    assert checkpointing.is_configured()
    config = checkpointing._PROCESS.config
    assert (config.cpu_checkpointing, config.profile) == (True, False)
    assert config.synchronize_checkpoint_boundary
    checkpointing.reset()
    assert checkpointing.is_configured()
    checkpointing.configure(None)
    assert not checkpointing._PROCESS.config.asks_for_something


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"profile": "yes"},
            'checkpointing.configure(): activation_checkpointing.profile "yes" is not true or false',
        ),
        (
            {"mpu_": Group(1), "partition_activations": True},
            "checkpointing.configure(partition_activations=True) in a model-parallel group of 2 ranks is not "
            "available; leave it out, or use checkpoint_in_cpu=True",
        ),
    ],
)
def test_what_cannot_be_configured_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        checkpointing.configure(**{"mpu_": None, **options})
    assert str(caught.value) == message
    assert not checkpointing.is_configured()


def test_what_has_no_effect_is_named(caplog: pytest.LogCaptureFixture) -> None:
    checkpointing.configure(
        Group(0, size=1), partition_activations=True, contiguous_checkpointing=True, num_checkpoints=4
    )
    assert caplog.messages == [
        "activation_checkpointing: partition_activations has nothing to divide without model parallelism; "
        "contiguous_memory_optimization and number_checkpoints have no effect: inputs stay in the memory "
        "that they have"
    ]


# ---- with the engine


class Checkpointed(Uneven):
    """Every block through checkpoint(), with dropout; and an argument that is a parameter,
    which stage 3 frees.
    """

    call = staticmethod(plain_call)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + self.call(self.run, block, x, weight=self.weight())
        result: Tensor = self.last(self.norm(x))
        return result

    @staticmethod
    def run(block: nn.Module, x: Tensor, *, weight: Tensor) -> Tensor:
        return torch.dropout(block(x * weight), 0.2, True)

    def weight(self) -> Tensor:
        return self.norm.weight


class ThroughOurs(Checkpointed):
    call = staticmethod(checkpointing.checkpoint)


class ThroughTorchs(Checkpointed):
    call = staticmethod(partial(torch_checkpoint, use_reentrant=False))


class WithView(ThroughOurs):
    def weight(self) -> Tensor:
        return self.norm.weight[None]


def _train(rank: int, kind: type[nn.Module], stage: int, section: dict[str, Any]) -> dict[str, Tensor]:
    with fresh_process():
        model = make_model(kind)
        config = make_config(stage=stage, reduce_bucket_size=1, activation_checkpointing=section)
        engine, *_ = dslaunch.initialize(model=model, config=config)
        torch.manual_seed(rank)
        losses = train_engine(engine, steps=3)
        return {**snapshot(engine.state_dict()), "losses": torch.tensor(losses)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "stage"),
    [(ThroughOurs, 0), (ThroughOurs, 1), (ThroughOurs, 2), (ThroughOurs, 3), (WithView, 3)],
)
def test_training_is_the_same_to_the_bit_at_every_stage(
    ranks: Ranks, kind: type[nn.Module], stage: int
) -> None:
    expected = ranks(_train, Checkpointed, stage, {}, world_size=2)
    for section in ({}, {"cpu_checkpointing": True}):
        found = ranks(_train, kind, stage, section, world_size=2)
        for ours, theirs in zip(found, expected, strict=True):
            assert_same_bits(ours, theirs)


def _messages(rank: int, kinds: tuple[type[nn.Module], ...], section: dict[str, Any]) -> list[str]:
    """What is logged as a warning in three steps of each model."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dslaunch").addHandler(handler)
    try:
        for kind in kinds:
            _train_in_this_process(kind, section)
    finally:
        logging.getLogger("dslaunch").removeHandler(handler)
    return lines


def _train_in_this_process(kind: type[nn.Module], section: dict[str, Any]) -> None:
    engine, *_ = dslaunch.initialize(
        model=make_model(kind), config=make_config(activation_checkpointing=section)
    )
    train_engine(engine, steps=3)


def _messages_of_a_fresh_process(rank: int, *args: Any) -> list[str]:
    with fresh_process():
        return _messages(rank, *args)


UNUSED = re.compile("activation_checkpointing is configured, but a whole step has passed without dslaunch.")


@pytest.mark.parametrize(
    ("kinds", "section", "is_warned"),
    [
        ((Uneven, Uneven), {"cpu_checkpointing": True}, True),
        ((Uneven,), {"number_checkpoints": 3}, True),
        ((Uneven,), {"cpu_checkpointing": False}, False),
        ((Uneven,), {}, False),
        ((ThroughOurs,), {"cpu_checkpointing": True}, False),
        ((ThroughTorchs,), {"cpu_checkpointing": True}, False),
        ((ThroughTorchs,), {"cpu_checkpointing": True, "profile": True}, True),
    ],
)
def test_settings_that_no_model_uses_are_warned_of_once(
    ranks: Ranks, kinds: tuple[type[nn.Module], ...], section: dict[str, Any], is_warned: bool
) -> None:
    first, second = ranks(_messages_of_a_fresh_process, kinds, section, world_size=2)
    assert [bool(UNUSED.match(line)) for line in first].count(True) == is_warned
    assert second == []


def _precedence(rank: int) -> list[bool]:
    seen = []
    on, off = {"cpu_checkpointing": True}, {"cpu_checkpointing": False}

    def initialize(**changes: Any) -> None:
        dslaunch.initialize(model=make_model(), config=make_config(**changes))
        seen.append(checkpointing._PROCESS.config.cpu_checkpointing)

    with fresh_process():
        initialize()
        assert not checkpointing.is_configured()
        initialize(activation_checkpointing=on)
        assert checkpointing.is_configured()
        initialize()  # says nothing about it
        initialize(activation_checkpointing=off)
        checkpointing.configure(None, checkpoint_in_cpu=True)
        initialize(activation_checkpointing=off)
    return seen


def test_a_ds_config_configures_it_unless_the_program_did(ranks: Ranks) -> None:
    assert ranks(_precedence, world_size=1)[0] == [False, True, True, False, True]


def _profile(rank: int) -> str:
    from contextlib import redirect_stdout
    from io import StringIO

    with fresh_process(), redirect_stdout(StringIO()) as out:
        engine, *_ = dslaunch.initialize(
            model=make_model(ThroughOurs), config=make_config(activation_checkpointing={"profile": True})
        )
        for step in range(2):
            engine.backward(loss_of(engine, batch(step).chunk(2)[rank]))
            engine.step()
    return out.getvalue()


def test_profile_prints_the_times_of_each_step_on_rank_0(ranks: Ranks) -> None:
    first, second = ranks(_profile, world_size=2)
    times = r"checkpoint forward \d+\.\d ms, checkpoint recompute \d+\.\d ms"
    assert re.fullmatch(rf"step=1, {times}\nstep=2, {times}\n", first)
    assert second == ""
