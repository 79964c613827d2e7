"""Stage 3: when parameters are here, what a freed one says, and what happens when something goes wrong."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dslaunch
from dslaunch import ConfigError
from dslaunch.runtime.zero.units.sub_buffer import SubBuffer
from dslaunch.runtime.zero.units.unit import Unit
from tests.runtime import models
from tests.runtime.models import assert_same_bits, batch, make_model, snapshot, worst_difference
from tests.runtime.ranks import Ranks
from tests.runtime.training.hard_models import WIDTH, Model
from tests.runtime.training.test_hard_cases import DRIFT, LR, check_freed, make_config


def _engine(model: nn.Module, **changes: Any) -> dslaunch.Engine:
    return dslaunch.initialize(model=model, config=make_config(3, **changes))[0]


def _part(step: int, engine: dslaunch.Engine) -> Tensor:
    return batch(step, width=WIDTH).chunk(engine.world_size)[engine.global_rank]


def _step(engine: dslaunch.Engine, step: int) -> None:
    model = engine.module
    assert isinstance(model, Model)
    engine.backward(model.loss(engine, _part(step, engine)))
    engine.step()


def _reference(
    loss: Callable[[Model, Tensor], Tensor], *, steps: int = 3, parts: int = 2
) -> dict[str, Tensor]:
    model = make_model(Model)
    assert isinstance(model, Model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(steps):
        optimizer.zero_grad()
        for part in batch(step, width=WIDTH).chunk(parts):
            (loss(model, part) / parts).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return snapshot(model.named_parameters())


def _plain(model: Model, part: Tensor) -> Tensor:
    return model.loss(model, part)


# ---- freed parameters


def _asked(rank: int) -> dict[str, str]:
    model = make_model(Model)
    engine = _engine(model)
    param = model.get_submodule("blocks.1.up").weight
    assert isinstance(param, nn.Parameter)
    weights = dict(make_model(Model).named_parameters())
    assert (param.shape, param.numel(), param.dtype, param.ndim) == ((15, WIDTH), 120, torch.float32, 2)
    assert param.nbytes == 480  # of the whole
    assert param.requires_grad
    assert param.grad is None
    assert "blocks.1.up.weight" in repr(param)
    assert sum(one.numel() for one in model.parameters()) == sum(one.numel() for one in weights.values())
    attempts: dict[str, Callable[[], object]] = {
        "read": lambda: param + 1,
        "norm": lambda: torch.linalg.vector_norm(param),
        "item": lambda: param[0, 0].item(),
        "detached": lambda: param.detach() + 1,
        "of an alias": lambda: param.detach().view(-1)[-1].item(),
        "numpy": lambda: param.detach().numpy(),
        "contiguous": lambda: param.detach().contiguous(),  # so does safetensors, before it writes
        "copy from": lambda: torch.zeros(15, WIDTH).copy_(param.detach()),
        "data": lambda: param.data.norm(),
        "replaced": lambda: setattr(param, "data", torch.zeros(15, WIDTH)),
        "write": lambda: nn.init.zeros_(param),
        "copy": lambda: param.copy_(torch.zeros(15, WIDTH)),
        "move": lambda: model.double(),
        "deepcopy": lambda: copy.deepcopy(model),
        "state_dict": lambda: torch.save(model.state_dict(), io.BytesIO()),
        "clone": lambda: {name: value.clone() for name, value in model.state_dict().items()},
        "load": lambda: make_model(Model).load_state_dict(model.state_dict(), strict=False),
        "attribute": lambda: model.get_submodule("blocks.1.up").weight.sum(),
    }
    state = model.state_dict()
    assert {name: value.shape for name, value in state.items()} == {
        name: value.shape for name, value in weights.items()
    }
    assert model.to("cpu").cpu().float() is model  # where it is, and what it is
    said = {}
    for name, attempt in attempts.items():
        # torch wraps what load_state_dict() meets
        with pytest.raises(RuntimeError if name == "load" else ConfigError) as caught:
            attempt()
        said[name] = str(caught.value)
    state = model.state_dict()
    described = [(name, value.shape, value.dtype) for name, value in state.items()]
    assert described == [
        (name, value.shape, value.dtype) for name, value in make_model(Model).state_dict().items()
    ]
    places = {value.untyped_storage().data_ptr() for value in state.values()}
    assert len(places) == len(
        {id(one) for one in model.parameters()}
    )  # who asks which are tied gets the truth
    _step(engine, 0)  # nothing was broken by it
    return said


def _copied(rank: int) -> bool:
    model = make_model(Model)
    engine = _engine(model)
    with dslaunch.zero.GatheredParameters(model.parameters()):
        average = copy.deepcopy(model)
    with torch.no_grad():
        for param in average.parameters():
            param.zero_()
    with torch.no_grad():
        assert torch.equal(average(batch(0, width=WIDTH)), batch(0, width=WIDTH))  # every block adds nothing
        assert not torch.equal(engine(batch(0, width=WIDTH)), batch(0, width=WIDTH))
    with (
        pytest.raises(ConfigError, match="cannot be pickled"),
        dslaunch.zero.GatheredParameters(model.parameters()),
    ):
        pickle.dumps(model)
    return True


def test_a_copy_is_a_plain_model_of_its_own(ranks: Ranks) -> None:
    assert ranks(_copied, world_size=2) == [True, True]


def test_a_freed_parameter_describes_itself_and_refuses_the_rest_by_name(ranks: Ranks) -> None:
    for said in ranks(_asked, world_size=2):
        for name, message in said.items():
            is_first = name in ("move", "deepcopy", "state_dict", "clone", "load")
            expected = "blocks.0.norm.weight" if is_first else "blocks.1.up.weight"
            assert f"parameter '{expected}' was asked for " in message, name
            assert "with dslaunch.zero.GatheredParameters(params):" in message


def _written_behind(rank: int) -> str:
    """Where torch does not ask us: through the class that a freed parameter hides."""
    model = make_model(Model)
    engine = _engine(model)
    param = model.get_submodule("blocks.1.up").weight
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        assert isinstance(param, Tensor)
        param.zero_()
    with pytest.raises(ConfigError) as caught:
        engine(_part(0, engine))
    return str(caught.value)


def test_a_write_that_got_through_is_found_out(ranks: Ranks) -> None:
    for message in ranks(_written_behind, world_size=2):
        assert message.startswith("parameter 'blocks.1.up.weight' was written while its values were sharded")


# ---- forwards and backwards of all kinds


def _mixed(rank: int) -> dict[str, Tensor]:
    """Evaluation between steps, a forward without a backward, and another one that is thrown away."""
    model = make_model(Model)
    engine = _engine(model)
    for step in range(3):
        engine.eval()
        with torch.no_grad():
            engine(_part(step, engine))
        check_freed(engine)
        engine.train()
        engine(_part(step + 1, engine))
        _step(engine, step)
        check_freed(engine)
    return snapshot(model.named_parameters())


def _failing(rank: int) -> dict[str, Tensor]:
    """A forward that raises in the middle, and a backward that does; both are followed by a good step."""
    model = make_model(Model)
    engine = _engine(model)
    for step in range(3):
        hook = model.get_submodule("blocks.1.down").register_forward_hook(_raise)
        with pytest.raises(ZeroDivisionError):
            _step(engine, step)
        hook.remove()
        loss = engine(_part(step, engine)).pow(2).mean()
        handle = model.get_submodule("blocks.1").register_full_backward_hook(_raise)
        loss = engine(_part(step, engine)).pow(2).mean()
        with pytest.raises(ZeroDivisionError):
            engine.backward(loss)
        handle.remove()
        engine.zero_grad()  # of what it had reached, as with plain PyTorch
        _step(engine, step)
        check_freed(engine)
    return snapshot(model.named_parameters())


def _raise(*args: object) -> None:
    raise ZeroDivisionError


def _without_engine(rank: int) -> dict[str, Tensor]:
    """The loop calls backward by itself."""
    model = make_model(Model)
    engine = _engine(model)
    for step in range(3):
        engine.scale(engine(_part(step, engine)).pow(2).mean()).backward()
        check_freed(engine)
        engine.step()
    return snapshot(model.named_parameters())


def _failing_without_engine(rank: int) -> dict[str, Tensor]:
    """A backward of the engine's fails, then one of the loop's own, and then one succeeds and
    leaves nothing here.
    """
    model = make_model(Model)
    engine = _engine(model)
    for step in range(3):
        handle = model.get_submodule("blocks.1").register_full_backward_hook(_raise)
        for run in (engine.backward, lambda loss: engine.scale(loss).backward()):
            loss = engine(_part(step, engine)).pow(2).mean()
            with pytest.raises(ZeroDivisionError):
                run(loss)
            engine.zero_grad()
        handle.remove()
        engine.scale(engine(_part(step, engine)).pow(2).mean()).backward()
        check_freed(engine)
        engine.step()
    return snapshot(model.named_parameters())


@pytest.mark.parametrize("train", [_mixed, _failing, _without_engine, _failing_without_engine])
def test_what_happens_between_leaves_no_trace(
    ranks: Ranks, train: Callable[[int], dict[str, Tensor]]
) -> None:
    for params in ranks(train, world_size=2):
        assert worst_difference(params, _reference(_plain)) <= DRIFT


def _two_losses(model: Model, part: Tensor) -> tuple[Tensor, Tensor]:
    out = model(part)
    return out.pow(2).mean(), (out[:, :4] * part[:, :4]).mean()


def _twice(rank: int, retains: bool) -> dict[str, Tensor]:
    model = make_model(Model)
    assert isinstance(model, Model)
    engine = _engine(model)
    for step in range(3):
        first, second = _two_losses(model, _part(step, engine))
        if retains:
            engine.backward(first, retain_graph=True)
            engine.backward(second)
        else:
            engine.backward(_two_losses(model, _part(step, engine))[0])
            engine.backward(_two_losses(model, _part(step, engine))[1])
        engine.step()
        check_freed(engine)
    return snapshot(model.named_parameters())


@pytest.mark.parametrize("retains", [True, False])
def test_two_backwards_add_up(ranks: Ranks, retains: bool) -> None:
    expected = _reference(lambda model, part: sum(_two_losses(model, part), torch.zeros(())))
    for params in ranks(_twice, retains, world_size=2):
        assert worst_difference(params, expected) <= DRIFT


def _left_of_forwards(rank: int) -> int:
    """Results that are still there after forwards that no backward followed."""
    engine, *_ = dslaunch.initialize(
        model=make_model(), config=models.make_config(stage=3, reduce_bucket_size=50)
    )
    results: list[weakref.ref[Tensor]] = []
    for module in engine.module.modules():
        if isinstance(module, nn.Tanh):
            module.register_forward_hook(lambda _, __, result: results.append(weakref.ref(result)))
    for step in range(2):
        engine(batch(step))
    gc.collect()
    assert len(results) == 6
    return sum(result() is not None for result in results)


def test_a_forward_without_a_backward_leaves_nothing(ranks: Ranks) -> None:
    assert ranks(_left_of_forwards, world_size=2) == [0, 0]


def _two_engines(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """One model's output is the other's input, as with a teacher or an adversary."""
    first, second = make_model(Model), make_model(Model, seed=1)
    engines = [_engine(first), _engine(second)]
    for step in range(2):
        out = engines[1](engines[0](_part(step, engines[0])))
        engines[0].backward(out.pow(2).mean())
        for engine in engines:
            engine.step()
    return snapshot(first.named_parameters()), snapshot(second.named_parameters())


def test_two_engines_in_one_graph(ranks: Ranks) -> None:
    models = [make_model(Model), make_model(Model, seed=1)]
    optimizer = torch.optim.SGD([param for model in models for param in model.parameters()], lr=LR)
    for step in range(2):
        optimizer.zero_grad()
        for part in batch(step, width=WIDTH).chunk(2):
            (models[1](models[0](part)).pow(2).mean() / 2).backward()
        optimizer.step()
    for results in ranks(_two_engines, world_size=2):
        for model, params in zip(models, results, strict=True):
            assert worst_difference(params, snapshot(model.named_parameters())) <= DRIFT


def _accumulated(rank: int) -> dict[str, Tensor]:
    model = make_model(Model)
    engine = _engine(model, gradient_accumulation_steps=2)
    for step in range(3):
        for micro in batch(step, width=WIDTH).chunk(2):
            part = micro.chunk(engine.world_size)[rank]
            engine.backward(engine(part).pow(2).mean())
            engine.step()
    return snapshot(model.named_parameters())


def test_micro_batches_add_up_on_an_odd_number_of_ranks(ranks: Ranks) -> None:
    expected = _reference(_plain, parts=6)
    for params in ranks(_accumulated, world_size=3):
        assert worst_difference(params, expected) <= DRIFT


def _compiled(rank: int, is_block: bool, is_wrapped: bool) -> str:
    model = make_model(Model)
    one = model.get_submodule("blocks.1") if is_block else model
    if is_wrapped:
        wrapped = torch.compile(one, backend="eager")
        assert isinstance(wrapped, nn.Module)
        if is_block:
            model.set_submodule("blocks.1", wrapped)
        else:
            model = wrapped
    else:
        one.compile(backend="eager")
    with pytest.raises(ConfigError) as caught:
        _engine(model)
    return str(caught.value)


@pytest.mark.parametrize("is_block", [True, False])
@pytest.mark.parametrize("is_wrapped", [True, False], ids=["torch.compile()", "compile()"])
def test_a_module_that_is_compiled_as_a_whole_is_refused_by_name(
    ranks: Ranks, is_block: bool, is_wrapped: bool
) -> None:
    for message in ranks(_compiled, is_block, is_wrapped, world_size=2):
        assert message.startswith("'blocks.1' was compiled" if is_block else "the model was compiled")
        assert "block.forward = torch.compile(block.forward)" in message


def _quietly(call: Callable[..., object], *args: object) -> None:
    with warnings.catch_warnings():
        _ignore_jit()
        call(*args)


def _ignore_jit() -> None:
    """What torch says of torch.jit, since 2.14 in another class; its first jvp imports scripts of it."""
    for category in (DeprecationWarning, FutureWarning):
        warnings.simplefilter("ignore", category)


def _misused(rank: int) -> dict[str, str]:
    """What torch does with a whole model, or with several parameters, and what is said to it."""
    model = make_model(Model)
    engine = _engine(model)
    _step(engine, 0)
    part = _part(1, engine)
    params = list(model.parameters())
    loss = engine(part).pow(2).mean()
    attempts: dict[str, Callable[[], object]] = {
        "torch.autograd.grad()": lambda: torch.autograd.grad(loss, params[:1]),
        "engine.compile()": lambda: torch.compile(model, backend="eager")(part),
        "cannot be exported": lambda: _quietly(torch.jit.trace, model, part),
        "no __code__": lambda: torch.export.export(model, (part,)),
        "torch.func.grad": lambda: torch.func.grad(lambda x: model(x).sum())(part),
        "leave GatheredParameters": engine.step,
    }
    said = {}
    for words, attempt in attempts.items():
        is_gathered = words in ("torch.func.grad", "leave GatheredParameters")
        with (
            pytest.raises((ConfigError, AttributeError)) as caught,
            dslaunch.zero.GatheredParameters(params if is_gathered else None),
        ):
            attempt()
        said[words] = str(caught.value)
    _step(engine, 1)  # nothing was broken by it
    return said


def test_what_cannot_be_done_with_a_sharded_model_is_said_in_its_own_words(ranks: Ranks) -> None:
    for said in ranks(_misused, world_size=2):
        assert [words for words, message in said.items() if words not in message] == []


# ---- in a backward the values are brought for autograd, and a parameter has them when a program asks for it


class _Own(nn.Parameter):
    """A class with a meaning of its own."""


def _model_with_hooks(seen: dict[str, list[Tensor]]) -> Model:
    """What hooks of a backward read is noted; one of them writes."""
    model = make_model(Model)
    assert isinstance(model, Model)
    for module in model.get_submodule("blocks.1").children():
        for name, param in list(module.named_parameters()):
            setattr(module, name, _Own(param.detach().clone()))
    seen.update({name: [] for name, _ in model.named_parameters()})
    for name, param in model.named_parameters():
        param.register_hook(lambda grad, name=name, param=param: seen[name].append(param.data.clone()))
        param.register_post_accumulate_grad_hook(lambda param, name=name: seen[name].append(param + 0))
    for place in (1, 2):
        model.get_submodule(f"blocks.{place}").register_full_backward_hook(
            lambda block, *grads, name=f"blocks.{place}.up.bias": seen[name].append(
                block.up.bias.detach().clone()
            )
        )

    def write(param: Tensor) -> None:
        with torch.no_grad():
            param.add_(1.0)

    model.get_parameter("blocks.0.up.weight").register_post_accumulate_grad_hook(write)
    return model


def _hooked(rank: int) -> tuple[dict[str, Tensor], dict[str, list[Tensor]], set[str]]:
    seen: dict[str, list[Tensor]] = {}
    model = _model_with_hooks(seen)
    engine = _engine(model)
    kinds: set[str] = set()
    norm = model.get_submodule("blocks.0.norm")
    model.get_parameter("blocks.1.down.bias").register_hook(
        lambda grad: kinds.update(type(param).__name__ for param in norm.parameters())
    )
    _step(engine, 0)
    check_freed(engine)
    return snapshot(model.named_parameters()), {name: list(values) for name, values in seen.items()}, kinds


def test_hooks_of_a_backward_read_and_write_the_values(ranks: Ranks) -> None:
    expected: dict[str, list[Tensor]] = {}
    model = _model_with_hooks(expected)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    _plain(model, batch(0, width=WIDTH)).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    for params, seen, kinds in ranks(_hooked, world_size=2):
        assert kinds == {"FreedParameter"}  # no code has asked for these
        assert worst_difference(params, snapshot(model.named_parameters())) <= DRIFT
        for name, values in seen.items():
            assert len(values) == len(expected[name]), name
            for value, plain in zip(values, expected[name], strict=True):
                assert torch.equal(value, plain), name


# ---- memory


def _resident(rank: int) -> list[int]:
    """The greatest number of units that are here at once, in the first and in later steps."""
    model = make_model(Model)
    model.get_submodule("blocks").extend(make_model(Model, seed=1).get_submodule("blocks"))  # type: ignore[operator]
    engine = _engine(model)
    most: list[int] = []

    def look(*args: object) -> None:
        here = [unit for unit in engine._model.units if any(has_memory(part) for part in unit.sub_buffers)]
        most[-1] = max(most[-1], len(here))

    def has_memory(part: SubBuffer) -> bool:
        return part.is_sharded and part.param_shard.values.flat.untyped_storage().nbytes() > 0

    for block in model.get_submodule("blocks").children():
        block.get_submodule("up").register_forward_hook(look)
        block.get_submodule("up").register_full_backward_hook(look)
    for step in range(3):
        most.append(0)
        _step(engine, step)
    return most


def test_few_units_are_here_at_once(ranks: Ranks) -> None:
    for first, *later in ranks(_resident, world_size=2):
        assert first <= 2
        assert max(later) <= 4  # the one that is used, the two next, and one that gloo is about to let go of


def _borrowed(rank: int) -> tuple[bool, int]:
    """Keep a view of a parameter past the forward that had it, as a program's cache may."""
    model = make_model(Model)
    engine = _engine(model)
    seen: list[Tensor] = []
    weight = model.get_submodule("blocks.0.up")
    hook = weight.register_forward_hook(lambda module, args, output: seen.append(module.weight.detach()))
    first = make_model(Model).get_parameter("blocks.0.up.weight")
    _step(engine, 0)
    hook.remove()
    _step(engine, 1)
    has_values = torch.equal(seen[0], first)
    seen.clear()
    check_freed(engine)
    return has_values, len([unit for unit in engine._model.units if unit.is_referred_to])


def test_a_view_that_a_program_keeps_has_its_values_and_the_unit_other_memory(ranks: Ranks) -> None:
    assert ranks(_borrowed, world_size=2) == [(True, 0)] * 2


def _copied_to_host(rank: int) -> bool:
    """Save a model as reward models are saved: each parameter is gathered,
    and taken to host memory by `.data.cpu()`.
    """
    model = make_model(Model)
    engine = _engine(model)
    plain = snapshot(model.named_parameters())
    saved = {}
    for name, param in model.named_parameters():
        with dslaunch.zero.GatheredParameters([param]):
            saved[name] = param.data.cpu()
    for step in range(2):  # the same memory would have other values now, or none
        _step(engine, step)
    assert_same_bits(saved, plain)
    return True


def test_what_was_taken_to_host_memory_of_gathered_parameters_stays(ranks: Ranks) -> None:
    assert ranks(_copied_to_host, world_size=2) == [True, True]


# ---- inference, and the end


def _inferred(rank: int) -> Tensor:
    model = make_model(Model)
    config = make_config(3)
    del config["optimizer"]
    engine = dslaunch.initialize(model=model, config=config)[0]
    with torch.no_grad():
        result: Tensor = engine(batch(0, width=WIDTH))
    check_freed(engine)
    return result


def test_a_model_without_an_optimizer_can_be_asked(ranks: Ranks) -> None:
    for result in ranks(_inferred, world_size=2):
        assert torch.equal(result, make_model(Model)(batch(0, width=WIDTH)))


def _inferred_between_steps(rank: int, zero: dict[str, Any]) -> dict[str, Tensor]:
    config = make_config(3)
    config["zero_optimization"] |= zero
    engine = dslaunch.initialize(model=make_model(Model), config=config)[0]
    block = engine.module.get_submodule("blocks.1.up")
    for step in range(3):
        seen: list[Tensor] = []
        hook = block.register_forward_hook(lambda one, *_, seen=seen: seen.append(one.weight.detach()))
        with torch.inference_mode():
            engine(_part(step, engine))
            hook.remove()
            engine(_part(step, engine))  # the first one's memory is still in use, so this one's is new
            seen.clear()
        _step(engine, step)
    return snapshot(engine.state_dict())


@pytest.mark.parametrize("zero", [{}, {"offload_param": {"device": "nvme"}}], ids=["memory", "nvme"])
def test_training_goes_on_after_evaluations_in_inference_mode(
    ranks: Ranks, tmp_path: Path, zero: dict[str, Any]
) -> None:
    if zero:
        zero = {"offload_param": {"device": "nvme", "nvme_path": str(tmp_path)}}
    expected = _reference(_plain)
    for result in ranks(_inferred_between_steps, zero, world_size=2):
        assert worst_difference(result, expected) <= DRIFT


def _destroyed(rank: int) -> bool:
    model = make_model(Model)
    engine = _engine(model)
    _step(engine, 0)
    weights = snapshot(model.named_parameters())
    engine.destroy()
    assert_same_bits(weights, {name: param.detach().clone() for name, param in model.named_parameters()})
    assert all(type(param) is nn.Parameter for param in model.parameters())
    plain = make_model(Model)
    plain.load_state_dict(model.state_dict())
    return torch.equal(model(batch(0, width=WIDTH)), plain(batch(0, width=WIDTH)))


def test_destroy_gives_a_whole_and_plain_model_back(ranks: Ranks) -> None:
    assert ranks(_destroyed, world_size=2) == [True, True]


class _TorchFunc(Model):
    """The slope of a block is taken with torch.func, which refuses hooks on what autograd saves."""

    is_on = True

    def forward(self, x: Tensor) -> Tensor:
        if self.is_on:
            x = x + torch.func.grad(lambda y: self.blocks[0](y).sum())(x)
        return super().forward(x)


def _with_torch_func(rank: int) -> dict[str, Tensor]:
    engine = _engine(make_model(_TorchFunc))
    with pytest.raises(ConfigError, match=r"torch\.autograd\.grad\(create_graph=True\)"):
        _step(engine, 0)
    engine.module.is_on = False
    for step in range(3):
        _step(engine, step)
    return snapshot(engine.state_dict())


def test_a_derivative_of_torch_func_in_a_forward_says_what_to_write_instead(ranks: Ranks) -> None:
    expected = _reference(lambda model, x: model.loss(model, x))
    for result in ranks(_with_torch_func, world_size=2):
        assert worst_difference(result, expected) <= DRIFT


class _Forward(Model):
    """The slope of every block is taken by torch.func.jvp, in which each block is gathered."""

    def forward(self, x: Tensor) -> Tensor:
        return _slope(super().forward, x)


def _slope(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with warnings.catch_warnings():
        _ignore_jit()
        slope: Tensor = torch.func.jvp(function, (x,), (torch.ones_like(x),))[1]
    return slope


def _with_jvp(rank: int) -> dict[str, Tensor]:
    engine = _engine(make_model(_Forward))
    for step in range(3):
        _step(engine, step)
    return snapshot(engine.state_dict())


def test_a_derivative_of_torch_func_that_goes_forward_gathers_what_it_meets(ranks: Ranks) -> None:
    expected = _reference(lambda model, x: model.loss(lambda y: _slope(model, y), x))
    for result in ranks(_with_jvp, world_size=2):
        assert worst_difference(result, expected) <= DRIFT


# ---- many units


def _looked_at(rank: int, depth: int) -> int:
    """How often a step asks whether a unit is resharded."""
    engine, *_ = dslaunch.initialize(
        model=models.Blocks(7, depth), config=models.make_config(stage=3, reduce_bucket_size=50)
    )
    count = 0
    is_resharded = Unit.is_resharded.fget  # type: ignore[attr-defined]

    def counted(unit: Unit) -> bool:
        nonlocal count
        count += 1
        return bool(is_resharded(unit))

    with pytest.MonkeyPatch.context() as patch:
        for step in range(2):
            if step == 1:
                patch.setattr(Unit, "is_resharded", property(counted))
            engine.backward(models.loss_of(engine, batch(step, size=2)))
            engine.step()
    engine.destroy()
    return count


def test_the_units_that_are_looked_at_when_one_is_unsharded_are_few_of_many(ranks: Ranks) -> None:
    few, many = (ranks(_looked_at, depth, world_size=2)[0] for depth in (4, 16))
    assert few > 0
    assert many <= 5 * few
