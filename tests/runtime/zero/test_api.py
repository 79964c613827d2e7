"""dslaunch.zero: parameters that are gathered to be read or written, and modules that are gathered as one."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dslaunch
from dslaunch import ConfigError, zero
from tests.runtime.models import assert_same_bits, batch, make_model, snapshot
from tests.runtime.ranks import RankFailed, Ranks
from tests.runtime.training.hard_models import WIDTH, MixtureOfExperts, Model
from tests.runtime.training.test_hard_cases import check_freed, make_config

STAGES = (0, 1, 2, 3)


class LenientInit(zero.Init):
    """As `import deepspeed` has it."""

    loses_writes = True


@contextmanager
def kept_warnings() -> Iterator[list[str]]:
    """The lines that are warned of meanwhile."""
    said: list[str] = []
    keeper = logging.Handler(logging.WARNING)
    keeper.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dslaunch").addHandler(keeper)
    try:
        yield said
    finally:
        logging.getLogger("dslaunch").removeHandler(keeper)


def _engine(model: nn.Module, stage: int, **changes: Any) -> dslaunch.Engine:
    return dslaunch.initialize(model=model, config=make_config(stage, **changes))[0]


def _read(rank: int, stage: int) -> bool:
    model = make_model(Model)
    engine = _engine(model, stage)
    plain = nn.Parameter(torch.zeros(1))
    with zero.GatheredParameters([*model.parameters(), plain, None, "bias"]):
        assert_same_bits(dict(model.named_parameters()), dict(make_model(Model).named_parameters()))
        with zero.GatheredParameters(model.get_submodule("blocks.0").parameters()):
            engine(batch(0, width=WIDTH))  # a forward in between changes nothing
        assert_same_bits(dict(model.named_parameters()), dict(make_model(Model).named_parameters()))
    with zero.GatheredParameters(model.parameters(), enabled=False):
        check_freed(engine)
    with zero.GatheredParameters(None):  # a linear layer without a bias
        check_freed(engine)
    check_freed(engine)
    return True


@pytest.mark.parametrize("stage", STAGES)
def test_gathered_parameters_can_be_read(ranks: Ranks, stage: int) -> None:
    assert ranks(_read, stage, world_size=2) == [True, True]


def _written(rank: int, stage: int, bf16: bool) -> dict[str, Tensor]:
    """Rank 1's values count, and the optimizer goes on from them."""
    model = make_model(Model)
    engine = _engine(model, stage, bf16={"enabled": bf16})
    with zero.GatheredParameters(model.parameters(), modifier_rank=1), torch.no_grad():
        for param in model.parameters():
            param.fill_(rank + 0.5)
    engine.backward(engine(torch.zeros(1, WIDTH).to(torch.bfloat16 if bf16 else torch.float32)).sum() * 0)
    engine.step()  # with gradients of zero: what the masters hold comes out
    return snapshot(model.named_parameters())


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_what_the_modifier_writes_all_get_and_the_masters_too(ranks: Ranks, stage: int, bf16: bool) -> None:
    for params in ranks(_written, stage, bf16, world_size=3):
        for name, param in params.items():
            assert torch.equal(param, torch.full_like(param, 1.5)), name


def _write(model: nn.Module, *, through_data: bool, is_writer: bool) -> None:
    with zero.GatheredParameters(model.parameters()), torch.no_grad():
        for param in model.parameters() if is_writer else ():
            (param.data if through_data else param).fill_(7.0)


def _written_by_nobody(rank: int, through_data: bool, writers: tuple[int, ...]) -> str:
    model = make_model(Model)
    _engine(model, 3)  # the module keeps what it needs of it
    with pytest.raises(ConfigError) as caught:
        _write(model, through_data=through_data, is_writer=rank in writers)
    return str(caught.value)


@pytest.mark.parametrize("writers", [(0, 1), (1,)])
@pytest.mark.parametrize("through_data", [False, True])
def test_an_edit_without_a_modifier_is_an_error_on_all_ranks(
    ranks: Ranks, through_data: bool, writers: tuple[int, ...]
) -> None:
    for rank, message in enumerate(ranks(_written_by_nobody, through_data, writers, world_size=2)):
        assert message.startswith("parameter 'blocks." if rank in writers else "parameters were written")
        assert "written inside GatheredParameters without modifier_rank" in message
        assert "GatheredParameters(params, modifier_rank=0)" in message


def _read(rank: int, is_early: bool) -> bool:
    """Read parameters that hold NaN, as those of a model whose training has diverged."""
    with zero.Init(enabled=is_early):
        model = make_model(Model)
    if not is_early:
        _engine(model, 3)
    with zero.GatheredParameters(model.parameters(), modifier_rank=0), torch.no_grad():
        for param in model.parameters():
            param.fill_(torch.nan)
    with zero.GatheredParameters(model.parameters()):
        return all(bool(param.isnan().all()) for param in model.parameters())


@pytest.mark.parametrize("is_early", [False, True])
def test_to_read_what_is_no_number_is_no_edit(ranks: Ranks, is_early: bool) -> None:
    assert all(ranks(_read, is_early, world_size=2))


def _written_and_lost(rank: int, is_early: bool, checks: bool) -> tuple[list[str], bool]:
    """As of a program written for DeepSpeed; each rank writes numbers of its own.

    Returns the warnings, and whether all is as before.
    """
    config = make_config(3)
    config["zero_optimization"]["enable_sanity_checks"] = checks
    with LenientInit(enabled=is_early, config_dict_or_path=config):
        model = make_model(Model)
    if not is_early:
        dslaunch.initialize(model=model, config=config, is_lenient=True)
    with kept_warnings() as said:
        for _ in range(2):
            _write(model, through_data=True, is_writer=rank == 1)
            _write(model, through_data=False, is_writer=rank == 1)
    after = snapshot(model.named_parameters())
    before = dict(make_model(Model).named_parameters())
    return said, all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("is_early", [False, True])
def test_a_program_for_deepspeed_loses_such_an_edit_and_is_told_once(ranks: Ranks, is_early: bool) -> None:
    (first, is_as_before), (second, is_as_before_too) = ranks(
        _written_and_lost, is_early, False, world_size=2
    )
    assert is_as_before
    assert is_as_before_too
    assert first == []  # this rank has written nothing
    (line,) = second
    assert "was written inside GatheredParameters without modifier_rank, so what was written is lost" in line
    assert line.endswith("GatheredParameters(params, modifier_rank=0)")


@pytest.mark.parametrize("is_early", [False, True])
def test_enable_sanity_checks_stops_a_program_for_deepspeed(ranks: Ranks, is_early: bool) -> None:
    with pytest.raises(RankFailed, match=r"ConfigError: parameter '.*written inside GatheredParameters"):
        ranks(_written_and_lost, is_early, True, world_size=2)


def _pickled(rank: int, is_early: bool, checks: bool) -> tuple[list[str], list[str]]:
    """DeepSpeed-Chat's save_hf_format and the like: rank 0 alone saves what it has.

    Returns the warnings and errors.
    """
    config = make_config(3)
    config["zero_optimization"]["enable_sanity_checks"] = checks
    with LenientInit(enabled=is_early, config_dict_or_path=config):
        model = make_model(Model)
    if not is_early:
        dslaunch.initialize(model=model, config=config, is_lenient=True)
    errors = []
    with kept_warnings() as said:
        for what in (
            (model.state_dict(), next(model.parameters()), [next(model.parameters()).data])
            if rank == 0
            else ()
        ):
            buffer = io.BytesIO()
            try:
                torch.save(what, buffer)
            except ConfigError as error:
                errors.append(str(error))
                continue
            buffer.seek(0)
            read = torch.load(buffer)
            values = (
                [*read.values()] if isinstance(read, dict) else [*read] if isinstance(read, list) else [read]
            )
            assert all(value.shape == (0,) and value.dtype == torch.float32 for value in values)
            assert isinstance(read, nn.Parameter) == isinstance(what, nn.Parameter)
    with zero.GatheredParameters(model.parameters()):
        buffer = io.BytesIO()
        torch.save({name: param.data for name, param in model.named_parameters()}, buffer)
    buffer.seek(0)
    assert_same_bits(torch.load(buffer), dict(make_model(Model).named_parameters()))
    return said, errors


@pytest.mark.parametrize("is_early", [False, True])
def test_what_a_program_for_deepspeed_pickles_of_shards_is_empty_and_it_is_told_once(
    ranks: Ranks, is_early: bool
) -> None:
    (first, errors), (second, _) = ranks(_pickled, is_early, False, world_size=2)
    assert (errors, second) == ([], [])
    (line,) = first
    assert line.startswith(
        "a pickle, of torch.save() for example, has an empty tensor in the place of parameter"
    )


def test_enable_sanity_checks_refuses_such_a_pickle(ranks: Ranks) -> None:
    (said, errors), _ = ranks(_pickled, False, True, world_size=2)
    assert said == []
    assert ["was asked for pickling, but its values are sharded" in error for error in errors] == [True] * 3


def _raising(rank: int) -> bool:
    model = make_model(Model)
    engine = _engine(model, 3)
    with pytest.raises(ZeroDivisionError), zero.GatheredParameters(model.parameters(), modifier_rank=0):
        raise ZeroDivisionError
    check_freed(engine)
    return True


def test_an_exception_inside_frees_and_goes_on(ranks: Ranks) -> None:
    assert ranks(_raising, world_size=2) == [True, True]


class Borrower(Model):
    """It uses a block's weight through a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.borrowed = [self.blocks[0].up.weight]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) @ self.borrowed[0].t()


def _borrowed(rank: int) -> list[Tensor]:
    """Once as it is, and once when it is registered, too."""
    model = make_model(Borrower)
    assert isinstance(model, Borrower)
    engine = _engine(model, 3)
    outputs = []
    for _ in range(2):
        out = engine(batch(0, width=WIDTH))
        engine.backward(out.pow(2).mean() * 0)
        engine.step()
        check_freed(engine)
        outputs.append(out.detach())
        zero.register_external_parameter(model, model.borrowed[0])
    return outputs


def test_a_parameter_is_there_however_a_forward_comes_to_it(ranks: Ranks) -> None:
    for outputs in ranks(_borrowed, world_size=2):
        for out in outputs:
            assert torch.equal(out, make_model(Borrower)(batch(0, width=WIDTH)))


class EarlyBorrower(Borrower):
    """It says so while it is made."""

    def __init__(self) -> None:
        super().__init__()
        zero.register_external_parameter(self, self.borrowed[0])


def _borrowed_early(rank: int) -> Tensor:
    engine = _engine(make_model(EarlyBorrower), 3)
    out: Tensor = engine(batch(0, width=WIDTH))
    engine.backward(out.pow(2).mean())
    engine.step()
    check_freed(engine)
    return out.detach()


def test_an_external_parameter_may_be_registered_before_there_is_an_engine(ranks: Ranks) -> None:
    for out in ranks(_borrowed_early, world_size=2):
        assert torch.equal(out, make_model(Borrower)(batch(0, width=WIDTH)))


def test_only_a_parameter_can_be_registered() -> None:
    with pytest.raises(ConfigError, match="a Tensor was given; give a parameter of a module"):
        zero.register_external_parameter(nn.Linear(1, 1), torch.zeros(1))  # type: ignore[arg-type]


class Bare(nn.Module):
    """A mixture of experts that is no block of a list: by itself each expert is a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = MixtureOfExperts().make_block()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.moe(x)
        return result


def _leaves(rank: int, how: str) -> list[str]:
    model = make_model(Bare)
    config = make_config(3)
    if how == "call":
        assert zero.set_z3_leaf_modules(model, [type(model.get_submodule("moe"))]) == [
            model.get_submodule("moe")
        ]
        assert zero.get_z3_leaf_modules(model) == [model.get_submodule("moe")]
    elif how != "nothing":
        value = {"classes": "Experts", "names": "moe", "name_suffixes": "oe"}[how]
        config["zero_optimization"]["leaf_module"] = {how: [value]}
    engine = dslaunch.initialize(model=model, config=config)[0]
    assert zero.z3_leaf_module(model.get_submodule("moe")) is (how != "nothing")
    names = [unit.name for unit in engine._model.units]
    if how != "nothing":
        engine.backward(engine(batch(rank, width=WIDTH)).pow(2).mean())  # each rank its own experts
        engine.step()
    return names


@pytest.mark.parametrize("how", ["call", "classes", "names", "name_suffixes"])
def test_a_leaf_module_is_one_unit(ranks: Ranks, how: str) -> None:
    assert ranks(_leaves, how, world_size=2) == [["moe", "root"]] * 2


def test_without_that_each_expert_is_a_unit(ranks: Ranks) -> None:
    assert ranks(_leaves, "nothing", world_size=1)[0][:2] == ["moe.experts.0", "moe.experts.1"]


def test_leaf_modules_are_unset_and_none_found_is_an_error() -> None:
    model = make_model(Bare)
    found = zero.set_z3_leaf_modules(model, ["Experts"])
    assert zero.unset_z3_leaf_modules(model, ["Experts"]) == found
    assert zero.get_z3_leaf_modules(model) == []
    with pytest.raises(ValueError, match="no module of Conv2d"):
        zero.set_z3_leaf_modules(model, ["Conv2d"])
