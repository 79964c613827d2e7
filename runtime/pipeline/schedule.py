"""Orders in which a rank runs forwards and backwards of its stages: tables, and their costs.

A table has a list of actions for each rank of the pipeline. An action begins as soon as the previous one has
ended and its inputs have arrived; so tables contain no times.

The tables of 1f1b and gpipe are made here. The others are torch's, so that their authors maintain them.

Source: Narayanan et al. 2021, arXiv:2104.04473 (1F1B, interleaved); Qi et al. 2024, arXiv:2401.10241 (zero
        bubble, V); DeepSeek-V3, arXiv:2412.19437 (DualPipe)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from ..errors import ConfigError

ONE_FORWARD_ONE_BACKWARD, GPIPE = "1f1b", "gpipe"


class Kind(Enum):
    """Kind of work on one micro batch in one stage."""

    FORWARD = "F"
    BACKWARD = "B"  # the next two together
    INPUTS = "I"  # the gradients of the inputs, which came from the previous stage
    WEIGHTS = "W"  # the gradients of the parameters


class Action(NamedTuple):
    """One step of a rank."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.micro_batch}"


Table = tuple[tuple[Action, ...], ...]  # actions by rank of the pipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedSchedule:
    """A schedule by its name."""

    name: str
    per_rank: int | None = None  # the only number of stages on a rank; None: any
    usual_per_rank: int = 1
    is_v: bool = False  # a rank's second stage is as far from the end as its first is from the beginning
    torchs: str | None = None  # torch's class that makes the table
    in_rounds: bool = False  # micro batches come in rounds of equal length
    splits_backward: bool = False


_SCHEDULES = {
    one.name: one
    for one in (
        NamedSchedule(name=ONE_FORWARD_ONE_BACKWARD, per_rank=1),
        NamedSchedule(name=GPIPE, per_rank=1),
        NamedSchedule(name="interleaved", usual_per_rank=2, torchs="ScheduleInterleaved1F1B", in_rounds=True),
        NamedSchedule(
            name="zero_bubble",
            usual_per_rank=2,
            torchs="ScheduleInterleavedZeroBubble",
            in_rounds=True,
            splits_backward=True,
        ),
        NamedSchedule(
            name="zbv",
            per_rank=2,
            usual_per_rank=2,
            is_v=True,
            torchs="ScheduleZBVZeroBubble",
            splits_backward=True,
        ),
        NamedSchedule(
            name="dualpipev",
            per_rank=2,
            usual_per_rank=2,
            is_v=True,
            torchs="ScheduleDualPipeV",
            splits_backward=True,
        ),
    )
}
NAMES = tuple(_SCHEDULES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A schedule, and which stages lie on which ranks."""

    schedule: str
    num_ranks: int
    per_rank: int

    @property
    def num_stages(self) -> int:
        """Return into how many stages the model is cut."""
        return self.num_ranks * self.per_rank

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of parameters are computed apart from those of inputs."""
        return _SCHEDULES[self.schedule].splits_backward

    def owner(self, stage: int) -> int:
        """Return the rank of the pipeline that has a stage."""
        turn, place = divmod(stage, self.num_ranks)
        is_back = _SCHEDULES[self.schedule].is_v and turn % 2 == 1
        return self.num_ranks - 1 - place if is_back else place


def shape_of(schedule: str, *, num_ranks: int, per_rank: int | None) -> Shape:
    """Return the shape of a schedule; `per_rank` None means its usual number of stages on a rank.

    Errors: ConfigError for an unknown schedule, or a number of stages that it cannot have
    """
    kept = _SCHEDULES.get(schedule)
    if kept is None:
        raise ConfigError(f"pipeline schedule {schedule!r} is not known; there are {', '.join(NAMES)}")
    wanted = kept.usual_per_rank if per_rank is None else per_rank
    if wanted < 1 or kept.per_rank not in (None, wanted):
        raise ConfigError(
            f"stages_per_rank {wanted} with the schedule {schedule}: it has "
            f"{'1 or more' if kept.per_rank is None else kept.per_rank} on each rank"
        )
    return Shape(schedule=schedule, num_ranks=num_ranks, per_rank=wanted)


def chunks_of(shape: Shape, rank: int) -> tuple[int, ...]:
    """Return the stages of a rank, in order."""
    return tuple(stage for stage in range(shape.num_stages) if shape.owner(stage) == rank)


def make_table(shape: Shape, num_micro_batches: int) -> Table:
    """Return the table of one batch.

    Errors: ConfigError for a number of micro batches that the schedule cannot have
    """
    kept = _SCHEDULES[shape.schedule]
    ranks = range(shape.num_ranks)
    if shape.num_stages == 1:
        return (tuple(_one_by_one(0, 1, num_micro_batches)),)
    if kept.name == ONE_FORWARD_ONE_BACKWARD:
        return tuple(tuple(_one_by_one(rank, shape.num_ranks, num_micro_batches)) for rank in ranks)
    if kept.name == GPIPE:
        return tuple(tuple(_all_at_once(rank, num_micro_batches)) for rank in ranks)
    return _torchs_table(kept, shape, num_micro_batches)


def forward_table(shape: Shape, num_micro_batches: int) -> Table:
    """Return the table of an evaluation: every stage takes all micro batches."""
    return tuple(
        tuple(
            Action(Kind.FORWARD, stage, number)
            for stage in chunks_of(shape, rank)
            for number in range(num_micro_batches)
        )
        for rank in range(shape.num_ranks)
    )


def _one_by_one(stage: int, num_stages: int, num_micro_batches: int) -> Iterable[Action]:
    """Yield the actions of 1F1B: as many forwards first as are needed until the first gradient comes back."""
    ahead = min(num_micro_batches, num_stages - stage)
    for number in range(ahead):
        yield Action(Kind.FORWARD, stage, number)
    for number in range(num_micro_batches):
        yield Action(Kind.BACKWARD, stage, number)
        if number + ahead < num_micro_batches:
            yield Action(Kind.FORWARD, stage, number + ahead)


def _all_at_once(stage: int, num_micro_batches: int) -> Iterable[Action]:
    """Yield the actions of GPipe: all forwards, then all backwards."""
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        for number in range(num_micro_batches):
            yield Action(kind, stage, number)


# ---- torch's tables

_KIND_OF = {
    "FORWARD": Kind.FORWARD,
    "FULL_BACKWARD": Kind.BACKWARD,
    "BACKWARD_INPUT": Kind.INPUTS,
    "BACKWARD_WEIGHT": Kind.WEIGHTS,
}


def _torchs_table(kept: NamedSchedule, shape: Shape, num_micro_batches: int) -> Table:
    """Return torch's table. Its classes want real stages, but the tables need only numbers: use stand-ins."""
    from torch.distributed.pipelining import schedules as torchs

    kind: Any = getattr(torchs, str(kept.torchs), None)
    if kind is None:
        raise ConfigError(
            f"pipeline schedule {kept.name}: torch {torch.__version__} has no table of it; take another one, "
            "or a newer torch"
        )
    rounds = max(1, num_micro_batches // shape.num_ranks)
    if kept.in_rounds and num_micro_batches % rounds:
        raise ConfigError(
            f"pipeline schedule {kept.name}: {num_micro_batches} micro batches on {shape.num_ranks} ranks do "
            f"not make {rounds} rounds of equal length; set gradient_accumulation_steps to a multiple of "
            f"{shape.num_ranks}"
        )
    if kept.name == "dualpipev" and num_micro_batches < shape.num_stages:
        raise ConfigError(
            f"pipeline schedule dualpipev: {num_micro_batches} micro batches are fewer than the "
            f"{shape.num_stages} stages; set gradient_accumulation_steps to {shape.num_stages} or more"
        )
    numbers = SimpleNamespace(
        pp_group_size=shape.num_ranks,
        n_local_stages=shape.per_rank,
        num_stages=shape.num_stages,
        _num_stages=shape.num_stages,
        _n_microbatches=num_micro_batches,
        number_of_rounds=rounds,
        microbatches_per_round=num_micro_batches // rounds,
    )
    return tuple(
        tuple(_plain(kind._calculate_single_rank_operations(numbers, rank)))
        for rank in range(shape.num_ranks)
    )


def _plain(actions: Iterable[Any]) -> Iterable[Action]:
    for action in actions:
        # the table marks an idle turn, which is not needed here: the rank waits for its inputs anyway
        if action is None:
            continue
        if getattr(action, "sub_actions", None):
            yield from _plain(action.sub_actions)
        else:
            kind = _KIND_OF[action.computation_type.name]
            yield Action(kind, action.stage_index, action.microbatch_index)


# ---- what a table costs


class Cost(NamedTuple):
    """Cost of one batch."""

    bubble: float  # the share of the ranks' time in which they wait
    # by rank: largest number of micro batches whose activations it holds at once, over stages
    held: tuple[int, ...]


def simulate(table: Table, num_stages: int, durations: Mapping[Kind, float] | None = None) -> Cost:
    """Return the cost of a table if actions take these times, and messages none.

    `durations` default to 1 for a forward, and 1 each for the gradients of inputs and of parameters.
    Errors: AssertionError for a table that cannot be completed
    """
    taken = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.INPUTS: 1.0, Kind.WEIGHTS: 1.0, **(durations or {})}
    ended: dict[Action, float] = {}
    clocks, busy = [0.0] * len(table), 0.0
    held, most = [0] * len(table), [0] * len(table)
    places = [0] * len(table)
    while any(place < len(actions) for place, actions in zip(places, table, strict=True)):
        progress = False
        for rank, actions in enumerate(table):
            while places[rank] < len(actions):
                action = actions[places[rank]]
                needed = needs(action, num_stages, ended)
                if needed is None:
                    break
                clocks[rank] = max(clocks[rank], *needed, 0.0) + taken[action.kind]
                ended[action] = clocks[rank]
                busy += taken[action.kind]
                held[rank] += {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.WEIGHTS: -1}.get(action.kind, 0)
                most[rank] = max(most[rank], held[rank])
                places[rank] += 1
                progress = True
        if not progress:
            waiting = [str(one[place]) for place, one in zip(places, table, strict=True) if place < len(one)]
            raise AssertionError(f"no rank can go on: they wait at {', '.join(waiting)}")
    return Cost(bubble=1.0 - busy / (max(clocks) * len(table)), held=tuple(most))


def needs(action: Action, num_stages: int, ended: Mapping[Action, float]) -> Sequence[float] | None:
    """Return when the actions that this one needs had ended; None if one of them has not ended."""
    kind, stage, number = action
    wanted: list[tuple[Kind, ...]] = []
    stages = [stage]
    if kind is Kind.FORWARD:
        wanted, stages = [(kind,)] if stage else [], [stage - 1]
    elif kind is Kind.WEIGHTS:
        wanted = [(Kind.INPUTS,)]
    else:
        wanted, stages = [(Kind.FORWARD,)], [stage]
        if stage + 1 < num_stages:
            wanted, stages = [*wanted, (Kind.INPUTS, Kind.BACKWARD)], [stage, stage + 1]
    ends = []
    for kinds, of in zip(wanted, stages, strict=False):
        times = [ended[one] for kind in kinds if (one := Action(kind, of, number)) in ended]
        if not times:
            return None
        ends.append(min(times))
    return ends
