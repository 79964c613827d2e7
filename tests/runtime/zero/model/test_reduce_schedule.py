"""No rank waits for a collective that another asks for only later, whatever their data reach: all cases, with
the engine's own code.

Ranks are threads with a real model, real nets, autograd and the reducer; only the wire is made here
(fake_wire.py). In a case each rank leaves out parameters of its own choice, and uses one at a place of its
own choice, after all have trained the usual way.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from dslaunch.runtime.offload.offload import Offload
from dslaunch.runtime.placement.precision import Precision
from dslaunch.runtime.placement.stage_policy import UnitSizes, policy_for_stage
from dslaunch.runtime.zero.model import reducer
from dslaunch.runtime.zero.model.sharded_model import ShardedModel
from tests.runtime.models import make_model
from tests.runtime.zero.fake_wire import FakeDomains, Stuck, Wire

WIDTH = 4
UNITS = 4
ROUNDING = 1e-6  # means of two or three numbers near 1, in two orders


class Uses(NamedTuple):
    """What a rank's data reaches."""

    scales: tuple[bool, ...]  # of the blocks
    bias_at: int | None  # the block before which the root's bias is added; None: it is not used


USUAL = Uses(scales=(True,) * UNITS, bias_at=0)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, uses_scale: bool) -> Tensor:
        y = torch.tanh(x @ self.weight)
        return x + (y * self.scale if uses_scale else y)


class Branches(nn.Module):
    """Four units, and a root whose bias is finished early or late in a backward,
    and needs no values for that.
    """

    num_blocks = UNITS

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(self.num_blocks))
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor, uses: Uses) -> Tensor:
        for index, (block, uses_scale) in enumerate(zip(self.blocks, uses.scales, strict=True)):
            x = block(x + self.bias if uses.bias_at == index else x, uses_scale)
        return (x + self.bias if uses.bias_at == self.num_blocks else x).pow(2).sum()


class Long(Branches):
    """So many units that a wait for one that was guessed comes before the last gather."""

    num_blocks = 2 * UNITS


class Twice(Branches):
    """Every unit is used twice: its gradients are finished when the backward comes to it once more."""

    def forward(self, x: Tensor, uses: Uses) -> Tensor:
        for _ in range(2):
            for block, uses_scale in zip(self.blocks, uses.scales, strict=True):
                x = block(x, uses_scale)
        return (x + self.bias).pow(2).sum()


class AsFinished(reducer.BackwardReducer):
    """The rule that there was before: what a rank has not finished waits, with all behind it,
    for the end of the backward.
    """

    def _before_gather(self, what: str) -> None:
        pass


class Rank:
    """A model on one rank, without an engine."""

    def __init__(self, wire: Wire, rank: int, stage: int, module: nn.Module) -> None:
        self.domains = FakeDomains(wire, rank)
        self.rank = rank
        self.module = module
        self.model = ShardedModel(
            self.module,
            policy=policy_for_stage(stage),
            groups=[list(self.module.parameters())],
            precision=Precision(),
            unit_sizes=UnitSizes(max_numel=1),
            is_leaf=lambda name, module: False,
            device=torch.device("cpu"),
            domains=self.domains,
            offload=Offload(),
        )

    def backward(self, uses: Uses) -> None:
        loss = self.module(_input(self.rank), uses)
        self.model.begin_backward()
        loss.backward()
        self.model.end_backward()

    def gradients(self, uses: Uses) -> list[Tensor]:
        """This rank's shards of the averages after a step's backward."""
        self.backward(uses)
        self.model.finish_gradients()
        if any(self.domains.job.all_gather_objects(self.model.is_behind, what="who is behind")):
            self.model.catch_up()
        shards = [sub_buffer.gradients.shard.clone() for sub_buffer in self.model.trained]  # type: ignore[attr-defined]
        self.model.end_step()
        return shards


class Job:
    """All ranks, after some usual steps."""

    def __init__(
        self,
        num_ranks: int,
        *,
        stage: int = 3,
        first: Sequence[Uses] = (USUAL,) * 3,
        kind: type[Branches] = Branches,
    ) -> None:
        self.wire, self._kind = Wire(num_ranks), kind
        modules = [make_model(kind) for _ in range(num_ranks)]
        made = self.wire.run(
            [partial(Rank, self.wire, rank, stage, module) for rank, module in enumerate(modules)]
        )
        for one in made:
            assert isinstance(one, Rank), one
        self.ranks: list[Rank] = made
        for uses in first:
            assert all(isinstance(found, list) for found in self.run([uses] * num_ranks))
        self._learnt = [copy.deepcopy(self._reducer(one)._schedule) for one in self.ranks]

    def run(self, uses: Sequence[Uses]) -> list[Any]:
        for one in self.ranks:
            one.domains.job.begin()
        return self.wire.run([partial(one.gradients, own) for one, own in zip(self.ranks, uses, strict=True)])

    def check(self, uses: Sequence[Uses], *, then: Uses = USUAL) -> None:
        """Run the case, and one that is usual after it; every gradient of both is right."""
        for case in (uses, (then,) * len(uses)):
            found = self.run(case)
            for error in found:
                assert isinstance(error, list), (case, error)
            for sub_buffer, shards in zip(self.ranks[0].model.trained, zip(*found, strict=True), strict=True):
                whole = torch.cat(shards)
                for member, slot in zip(sub_buffer.members, sub_buffer.layout.slots, strict=True):
                    grads = [_grads(self._kind, rank, own)[member.name] for rank, own in enumerate(case)]
                    mean = torch.stack(grads).mean(0)
                    own = whole[slot.offset : slot.offset + slot.numel].view(slot.shape)
                    assert float((own - mean).abs().max()) <= ROUNDING * max(1.0, float(mean.abs().max())), (
                        case
                    )

    def forget_case(self) -> None:
        """What the case taught is unknown to the next one."""
        for one, learnt in zip(self.ranks, self._learnt, strict=True):
            self._reducer(one)._schedule = copy.deepcopy(learnt)

    @staticmethod
    def _reducer(one: Rank) -> reducer.Reducer:
        return one.model._reducer


def _input(rank: int) -> Tensor:
    return torch.linspace(-1, 1, WIDTH).view(1, WIDTH) * (rank + 1)


_known: dict[tuple[type[Branches], int, Uses], dict[str, Tensor]] = {}


def _grads(kind: type[Branches], rank: int, uses: Uses) -> dict[str, Tensor]:
    """Plain autograd's."""
    if (kind, rank, uses) not in _known:
        model = make_model(kind)
        model(_input(rank), uses).backward()
        _known[kind, rank, uses] = {
            name: torch.zeros_like(param) if param.grad is None else param.grad
            for name, param in model.named_parameters()
        }
    return _known[kind, rank, uses]


def _check_all(job: Job, cases: Iterable[Sequence[Uses]]) -> int:
    num_cases = 0
    for case in cases:
        job.check(case)
        job.forget_case()
        num_cases += 1
    return num_cases


def _choices(num_free: int, indices: Sequence[int | None]) -> list[Uses]:
    """Every use of the scales of the last blocks, which a backward comes to first,
    with every place of the bias.
    """
    fixed = (True,) * (UNITS - num_free)
    return [
        Uses((*fixed, *free), index)
        for free in itertools.product((True, False), repeat=num_free)
        for index in indices
    ]


LEFT_OUT = Uses(scales=(True, True, True, False), bias_at=0)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_rule_that_waited_for_what_a_rank_had_not_finished_gets_stuck(
    monkeypatch: pytest.MonkeyPatch, num_ranks: int
) -> None:
    monkeypatch.setattr(reducer, "BackwardReducer", AsFinished)
    found = Job(num_ranks).run([USUAL] * (num_ranks - 1) + [LEFT_OUT])
    assert all(isinstance(one, Stuck) for one in found)


def test_no_rank_waits_for_ever_and_every_gradient_is_right() -> None:
    choices = _choices(2, (0, None))
    assert _check_all(Job(2), itertools.product(choices, repeat=2)) == 64
    few = [USUAL, LEFT_OUT, Uses((False,) * UNITS, UNITS)]
    assert _check_all(Job(3), itertools.product(few, repeat=3)) == 27


def test_it_makes_no_difference_what_the_first_backward_reached() -> None:
    """What the lists then say is wrong for later ones, until the ranks have told each other."""
    odd = Uses(scales=(True, False, False, True), bias_at=UNITS)
    job = Job(2, first=[odd])
    for case in ([USUAL] * 2, [USUAL, LEFT_OUT], [LEFT_OUT, USUAL], [odd, USUAL], [USUAL] * 2):
        job.check(case)


@pytest.mark.parametrize("stage", [2, 3])
def test_it_holds_in_a_first_backward_whose_order_is_a_guess(stage: int) -> None:
    job = Job(2, stage=stage, first=[], kind=Long)
    usual, num_free = Uses((True,) * Long.num_blocks, 0), 2
    few = [
        usual._replace(scales=(*usual.scales[num_free:], *free), bias_at=bias_at)
        for free in itertools.product((True, False), repeat=num_free)
        for bias_at in (0, None)
    ]
    for case in itertools.product(few, repeat=2):
        job.check(case, then=usual)
        job.forget_case()


def test_a_guess_that_was_too_early_is_averaged_once_more_and_forgotten() -> None:
    job = Job(2, first=[], kind=Twice)
    for case in ([USUAL, LEFT_OUT], [USUAL] * 2):
        job.check(case)
    for rank in job.ranks:
        schedule = rank.model._reducer._schedule
        assert schedule._guessed_early  # else this test tests nothing
        assert not schedule._at_end
        assert {index for due in schedule._lists.values() for index in due} == set(range(UNITS + 1))


@pytest.mark.parametrize("stage", [1, 2])
def test_it_holds_where_nothing_is_gathered_too(stage: int) -> None:
    choices = _choices(2, (0, None))
    _check_all(Job(2, stage=stage), itertools.product(choices, repeat=2))


@pytest.mark.exhaustive
@pytest.mark.parametrize("scales", list(itertools.product((True, False), repeat=UNITS)))
def test_two_ranks_in_all_cases(scales: tuple[bool, ...]) -> None:
    indices = (None, *range(UNITS + 1))
    cases = itertools.product([Uses(scales, index) for index in indices], _choices(UNITS, indices))
    assert _check_all(Job(2), cases) == 6 * 96


@pytest.mark.exhaustive
@pytest.mark.parametrize("one", _choices(2, (0, UNITS - 1, None)))
def test_three_ranks_in_all_cases_of_two_blocks_and_three_places(one: Uses) -> None:
    choices = _choices(2, (0, UNITS - 1, None))
    _check_all(Job(3), ([one, *others] for others in itertools.product(choices, repeat=2)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("one", _choices(2, (0, UNITS, None)))
def test_first_backwards_of_two_and_three_ranks_in_all_cases(one: Uses, stage: int) -> None:
    for num_others, num_free in ((1, UNITS), (2, 2)):
        choices = _choices(num_free, (0, UNITS, None))
        job = Job(1 + num_others, stage=stage, first=[])
        for others in itertools.product(choices, repeat=num_others):
            job.check([one, *others])
            job.forget_case()


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", _choices(2, (0, UNITS, None)))
def test_two_ranks_in_all_cases_after_every_first_backward(first: Uses) -> None:
    _check_all(Job(2, first=[first]), itertools.product(_choices(2, (0, UNITS, None)), repeat=2))
