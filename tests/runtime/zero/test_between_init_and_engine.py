"""What libraries do to a model after zero.Init and before initialize(): as to a plain one, to the bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn

import dslaunch
from dslaunch import ConfigError, zero
from dslaunch.runtime.zero.parameters.freed_parameter import FreedParameter
from tests.runtime.models import assert_same_bits, make_config, snapshot
from tests.runtime.ranks import Ranks


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 7)
        self.blocks = nn.ModuleList([nn.Linear(7, 7) for _ in range(2)])
        self.head = nn.Linear(7, 9)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        result: Tensor = self.head(x)
        return result


def _pad(model: Small) -> None:
    """transformers' _adjust_bias, with and without a change of the shape."""
    for more in (0, 2):
        model.head.bias.data = nn.functional.pad(model.head.bias.data, (0, more), "constant", 0)
    model.head.weight.data = torch.cat([model.head.weight.data, torch.ones(2, 7)])


def _keep_old(model: Small) -> None:
    """An alias that was taken before the data were replaced has the old ones."""
    old, row = model.head.weight.data, model.head.weight.detach().view(-1)[:7]
    model.head.weight.data = torch.zeros(9, 7)
    model.head.weight.data[1:] = old[:-1]
    model.head.weight.data[0] = row * 2


def _write(model: Small) -> None:
    with torch.no_grad():
        nn.init.normal_(model.embed.weight)
        model.blocks[0].weight.copy_(model.blocks[1].weight)
        model.blocks[0].bias += 1
    model.blocks[1].weight.data[0] *= 2
    model.blocks[1].weight.data.view(-1)[-7:].zero_()
    model.blocks[1].bias.data.copy_(model.blocks[0].bias.data)
    model.head.weight.data.fill_(model.blocks[0].weight.norm().item())
    model.blocks[0].bias.data = model.blocks[0].bias.data


def _copy(model: Small) -> None:
    """PEFT's modules_to_save, and a copy by values."""
    model.blocks.append(copy.deepcopy(model.blocks[0]))
    model.blocks.append(nn.Linear(7, 7))
    model.blocks[-1].load_state_dict(model.blocks[1].state_dict())
    model.extra = nn.Parameter(model.embed.weight.data.clone())
    model.scale = nn.Parameter(model.embed.weight.detach()[0].double().float())


def _tie(model: Small) -> None:
    model.head.weight = model.embed.weight
    model.embed.weight.data.mul_(2)


def _read_names(model: Small) -> None:
    """Names of values follow the writes."""
    names = model.state_dict()
    model.embed.weight.data.add_(1)
    model.register_buffer("seen", names["embed.weight"].double().sum(0))
    model.register_buffer("also", names["head.bias"].numpy().sum() + torch.zeros(()))


EDITS = (_pad, _keep_old, _write, _copy, _tie, _read_names)


def _edited(rank: int, edit: Callable[[Small], None]) -> dict[str, Tensor]:
    torch.manual_seed(rank)
    with zero.Init():
        model = Small()
    torch.manual_seed(rank + 2)
    edit(model)
    engine = dslaunch.initialize(model=model, config=make_config(stage=3))[0]
    return engine.state_dict()


@pytest.mark.parametrize("edit", EDITS)
def test_a_change_before_initialize_is_what_rank_0_alone_would_have_made(
    ranks: Ranks, edit: Callable[[Small], None]
) -> None:
    torch.manual_seed(0)
    plain = Small()
    torch.manual_seed(2)
    edit(plain)
    for state in ranks(_edited, edit, world_size=2):
        assert_same_bits(state, plain.state_dict())


def _two_models(rank: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    with zero.Init():
        one = Small()
    with zero.Init():
        other = Small()
    other.load_state_dict(one.state_dict())
    with torch.no_grad():
        one.head.weight.copy_(other.embed.weight)
    return snapshot(one.named_parameters()) | {"other": snapshot(other.named_parameters())["embed.weight"]}


def test_one_model_is_read_into_another_of_another_context(ranks: Ranks) -> None:
    torch.manual_seed(0)
    plain = dict(Small().named_parameters())
    expected = {**plain, "head.weight": plain["embed.weight"], "other": plain["embed.weight"]}
    for values in ranks(_two_models, world_size=2):
        assert_same_bits(values, {name: value.detach() for name, value in expected.items()})


def _alone(rank: int) -> tuple[str, str]:
    """One rank looks at shapes; what would need the others is refused where it may be alone."""
    with zero.Init():
        model = Small()
    if rank == 0:
        assert sum(param.data.numel() for param in model.parameters()) == 247
        assert {name: value.shape for name, value in model.state_dict().items()} == {
            name: value.shape for name, value in Small().state_dict().items()
        }
    with pytest.raises(ConfigError) as pickled:
        copy.copy(model.head.weight)
    dslaunch.initialize(model=model, config=make_config(stage=3))
    with pytest.raises(ConfigError) as late:
        model.head.weight.data.fill_(1.0)
    assert all(type(param) is FreedParameter for param in model.parameters())
    return str(pickled.value), str(late.value)


def test_what_one_rank_may_do_alone_is_described_or_refused_by_name(ranks: Ranks) -> None:
    for pickled, late in ranks(_alone, world_size=2):
        assert pickled.startswith("parameter 'Linear.weight' was asked for pickling")
        assert late.startswith("parameter 'head.weight' was asked for fill_")


def _write_beside(model: Small, editor: int) -> None:
    """Change more than what was gathered, and read it; gather more."""
    model.embed.weight.data.fill_(1.0)
    model.head.bias.data.copy_(model.blocks[0].weight.sum(1).repeat(2)[:9])
    for block in model.blocks:
        nn.init.constant_(block.weight, float(model.head.weight.detach().sum()))
    with zero.GatheredParameters({model.embed.weight, model.blocks[1].bias}, modifier_rank=editor):
        model.embed.weight.data[0] = 2.0
        with zero.GatheredParameters([model.blocks[0].bias]):
            model.blocks[1].bias.data.copy_(model.blocks[0].bias)


def _beside(rank: int, editor: int, is_alone: bool) -> tuple[dict[str, Tensor], int]:
    """Rank `editor` uses parameters that were not gathered, alone or with the others; return how many of
    these are whole when it is done.
    """
    torch.manual_seed(0)
    with zero.Init():
        model = Small()
    with zero.GatheredParameters(model.embed.weight, modifier_rank=editor):
        if rank == editor or not is_alone:
            _write_beside(model, editor)
        num_whole = sum(type(param) is not FreedParameter for param in model.parameters())
    return snapshot(model.named_parameters()), num_whole


@pytest.mark.parametrize(("editor", "is_alone"), [(0, True), (1, True), (0, False), (1, False)])
def test_the_rank_whose_values_count_may_use_what_was_not_gathered(
    ranks: Ranks, editor: int, is_alone: bool
) -> None:
    torch.manual_seed(0)
    plain = Small()
    with torch.no_grad():
        _write_beside(plain, editor)
    expected = {name: param.detach() for name, param in plain.named_parameters()}
    results = ranks(_beside, editor, is_alone, world_size=2)
    for values, _ in results:
        assert_same_bits(values, expected)
    _, num_whole = results[editor]
    assert num_whole <= 3  # what was gathered, and what the last operation has used


def _beside_after_a_failure(rank: int) -> dict[str, Tensor]:
    """Rank 0 alone has failed to make another model before."""
    if rank == 0:
        with suppress(RuntimeError), zero.Init():
            nn.Linear(2, 2, bias=False)
            raise RuntimeError
    return _beside(rank, 0, True)[0]


def test_a_rank_that_has_failed_to_make_a_model_knows_the_next_ones_parameters(ranks: Ranks) -> None:
    torch.manual_seed(0)
    plain = Small()
    with torch.no_grad():
        _write_beside(plain, 0)
    for values in ranks(_beside_after_a_failure, world_size=2):
        assert_same_bits(values, {name: param.detach() for name, param in plain.named_parameters()})


def _twice(rank: int, editor: int) -> dict[str, Tensor]:
    """What the first edit has brought is whole in the second; an alias keeps what it lies in whole."""
    torch.manual_seed(rank)
    with zero.Init():
        model = Small()
        alias = model.blocks[0].weight.data
        for value in (2.0, 3.0):
            with zero.GatheredParameters(model.embed.weight, modifier_rank=editor):
                if rank == editor:
                    model.head.bias.data[0] = value
                    alias[0] = value
    with zero.GatheredParameters(model.embed.weight, modifier_rank=editor):
        if rank == editor:
            model.head.bias.data[1] = 4.0
    with zero.GatheredParameters(model.embed.weight, modifier_rank=editor):
        if rank == editor:
            model.head.bias.data[2] = 5.0
    return snapshot(model.named_parameters())


@pytest.mark.parametrize("editor", [0, 1])
def test_what_is_whole_already_may_be_written_there_too(ranks: Ranks, editor: int) -> None:
    torch.manual_seed(0)
    expected = {name: param.detach() for name, param in Small().named_parameters()}
    expected["head.bias"][:3] = torch.tensor([3.0, 4.0, 5.0])
    expected["blocks.0.weight"][0] = 3.0
    for values in ranks(_twice, editor, world_size=2):
        assert_same_bits(values, expected)


def _other_alone(rank: int) -> str:
    """The other rank uses something alone."""
    with zero.Init():
        model = Small()
    said = ""
    with zero.GatheredParameters(model.embed.weight, modifier_rank=0):
        if rank == 1:
            with pytest.raises(ConfigError) as caught:
                model.head.weight.norm()
            said = str(caught.value)
    snapshot(model.named_parameters())  # the ranks are together still
    return said


def test_what_another_rank_uses_alone_there_is_refused_by_name(ranks: Ranks) -> None:
    _, said = ranks(_other_alone, world_size=2)
    assert said.startswith("parameter 'Linear.weight' was asked for norm, but its values are sharded")


def _in_any_order(rank: int, has_engine: bool) -> dict[str, Tensor]:
    """Each rank gives the parameters in an order of its own, as in a set."""
    torch.manual_seed(0)
    with zero.Init():
        model = Small()
    if has_engine:
        dslaunch.initialize(model=model, config=make_config(stage=3))
    params = list(model.parameters())
    with zero.GatheredParameters(params if rank else reversed(params), modifier_rank=0):
        for param in params:
            param.data.add_(rank + 1.0)
    return snapshot(model.named_parameters())


@pytest.mark.parametrize("has_engine", [False, True])
def test_parameters_may_be_given_in_another_order_on_each_rank(ranks: Ranks, has_engine: bool) -> None:
    torch.manual_seed(0)
    expected = {name: param.detach() + 1.0 for name, param in Small().named_parameters()}
    for values in ranks(_in_any_order, has_engine, world_size=2):
        assert_same_bits(values, expected)
