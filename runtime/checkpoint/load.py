"""Loading: every rank reads the boxes that its shards need anything of.

Only parameters that are whole here are gathered.

All or nothing
--------------
A failed load leaves the engine as it was, on all ranks. Before the first value is written every rank has read
all that it needs once and compared it with its digests, has taken over all values but the model's tensors
(these can be taken back), and knows that all others have. Then it reads again and writes in place: no second
copy of a shard is in memory, and what is read again comes from the page cache. A read that fails then is
tried again. If it goes on failing, no copy of the values from before is left: the engine is barred on all
ranks, so whatever would use or save its values says so by name, until another load has succeeded.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..comm.pending import Pending
from ..errors import CheckpointError
from ..step.flat_optimizer import FlatOptimizer
from ..strided import is_strided
from ..zero.parameters.sub_buffer_plan import Member
from ..zero.units.sub_buffer import SubBuffer
from . import client_state
from .files.tensor_runs import (
    MASTER,
    MODEL,
    PARAMETERS,
    STATE,
    SubBufferRuns,
    TensorRuns,
    model_name,
    runs_of_tensors,
    state_name,
)
from .opened import OpenCheckpoint, latest_tag, open_checkpoint
from .small_state import take_rest
from .storage.store import LATEST, Store, is_tag
from .training_state import Training

_LISTED = 5  # names in one message
_PAUSES_S = (0.1, 1.0)  # pauses before a failed read is tried again

T = TypeVar("T")
_log = logging.getLogger("dslaunch")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """Parts of a checkpoint to take."""

    strict: bool
    with_optimizer: bool
    with_scheduler: bool
    with_progress: bool
    with_module: bool = True  # False: the program loads the weights
    strict_argument: str = "load_module_strict"
    may_be_missing: bool = False  # a job that is started again after a failure finds nothing the first time
    is_lenient: bool = False  # a folder without `latest` is no error, as in DeepSpeed

    def asked(self, tag: str | None) -> dict[str, Any]:
        """Return what the user said, by the names of load_checkpoint()'s arguments."""
        return {
            "tag": tag,
            "load_module_only": not self.with_progress,
            self.strict_argument: self.strict,
            "load_optimizer_states": self.with_optimizer,
            "load_lr_scheduler_states": self.with_scheduler,
            "custom_load_fn": not self.with_module,
        }


def load_checkpoint(
    training: Training,
    store: Store,
    tag: str | None,
    plan: LoadPlan,
    *,
    take_module: Callable[[dict[str, Any]], object] | None = None,
) -> tuple[str, dict[str, Any]] | None:
    """Take the state of the checkpoint `tag`; return where it is, and this rank's client_state; None if
    there is none and may be.

    Without a tag it is the one that `latest` names, and if that is damaged, the newest one that is not,
    with a warning. See "All or nothing". `take_module` gets the module's whole state_dict, where the
    plan leaves that out.
    Order:  every rank must call this
    Errors: CheckpointError, on every rank, if they ask for different things, one of them cannot read it,
            or it does not fit
    """
    candidates = [(store, one) for one in _candidates(training, store, tag, plan)]
    if not candidates:
        return None
    _, place, own_state = load_first_good(training, candidates, plan, take_module=take_module)
    return place, own_state


def load_first_good(
    training: Training,
    candidates: Sequence[tuple[Store, str]],
    plan: LoadPlan,
    *,
    take_module: Callable[[dict[str, Any]], object] | None = None,
) -> tuple[int, str, dict[str, Any]]:
    """Take the state of the first of these checkpoints that is not damaged; return its index, where it is,
    and this rank's client_state.

    Order:  every rank must call this, with the same checkpoints
    Errors: as `load_checkpoint`
    """
    names = names_of_all(training)
    for number, (store, candidate) in enumerate(candidates):
        load = Load(
            training,
            partial(_open, store, candidate, training),
            f"{store.where}/{candidate}",
            plan,
            names,
            take_module,
        )
        problem = load.run()
        if problem is None:
            return number, load.reader.place, load.client_state
        text, is_damage = problem
        if not is_damage or number + 1 == len(candidates):
            raise CheckpointError(text) from load.cause
        if training.job.is_first:
            _log.warning("%s; trying %s, the one before", text, candidates[number + 1][1])
    raise AssertionError("there is always a candidate")


def _candidates(training: Training, store: Store, tag: str | None, plan: LoadPlan) -> list[str]:
    """Return what may be loaded, best first. Without a tag rank 0 looks, so that all try the same."""
    found: list[str] | str = [] if tag is None else [tag]
    if tag is None and training.job.is_first:
        try:
            found = look(store, plan)
        except CheckpointError as error:
            found = str(error)
        except OSError as error:
            found = f"{store.where} cannot be read: {error}"
    answers = training.job.all_gather_objects((plan.asked(tag), found), what="which checkpoint to load")
    _check_asked([asked for asked, _ in answers])
    found = answers[0][1]
    if isinstance(found, str):
        raise CheckpointError(found)
    return found


def _check_asked(asked: list[dict[str, Any]]) -> None:
    """Check that all ranks want the same, since each reads a part of it."""
    for rank, other in enumerate(asked):
        for name, value in asked[0].items():
            if other[name] != value:
                raise CheckpointError(
                    f"load_checkpoint() was given {name}={value!r} on rank 0 and {name}={other[name]!r} on "
                    f"rank {rank}; give all ranks the same"
                )


def look(store: Store, plan: LoadPlan) -> list[str]:
    """Return what may be loaded without a tag, best first. Errors: CheckpointError, OSError"""
    latest, tags = latest_tag(store), store.tags()
    if latest is None and plan.is_lenient:
        held = ", ".join(tags) or "no checkpoint"
        _log.warning(
            "%s/%s does not exist: nothing is loaded; the folder holds %s", store.where, LATEST, held
        )
        return []
    if latest is None and not tags and plan.may_be_missing:
        _log.info("%s holds no checkpoint yet: training begins", store.where)
        return []
    if latest is None:
        raise CheckpointError(
            f"{store.where}/{LATEST} does not exist; give the folder that save_checkpoint() wrote to, or a "
            f"tag: the folder holds {', '.join(tags) or 'no checkpoint'}"
        )
    if not is_tag(latest):  # damaged, too
        text = f"{store.where}/{LATEST} holds {latest!r}, which is no name of a checkpoint"
        if not tags:
            raise CheckpointError(f"{text}; {store.where} holds no other")
        _log.warning("%s; trying %s, the newest", text, tags[-1])
        return tags[::-1]
    older = tags[: tags.index(latest)] if latest in tags else tags
    return [latest, *reversed(older)]


def _open(store: Store, tag: str, training: Training) -> OpenCheckpoint:
    if not tag:
        raise _Unfit(
            f"tag {tag!r} is no name of a checkpoint; give one, or None for the one that {LATEST} names"
        )
    return open_checkpoint(store, tag, groups=_group_names(training))


_Problem = tuple[str, bool]  # the problem, and whether another checkpoint may be better


class Load:
    """Load of one checkpoint, in the steps of "All or nothing"."""

    reader: OpenCheckpoint
    saved: dict[str, Any]
    client_state: dict[str, Any]

    def __init__(
        self,
        training: Training,
        open_reader: Callable[[], OpenCheckpoint],
        where: str,
        plan: LoadPlan,
        names: Names,
        take_module: Callable[[dict[str, Any]], object] | None = None,
    ) -> None:
        self._training, self._open, self._where, self._plan = training, open_reader, where, plan
        self._names = names
        self._take_module = take_module
        self._module_state: dict[str, Any] = {}
        self.cause: Exception | None = None  # set on the rank where it was raised

    def run(self) -> _Problem | None:
        """Return what went wrong on any rank; None if all have loaded it.

        Order: a collective
        """
        with ExitStack() as undo:
            problem = self._together("what a checkpoint holds", lambda: self._prepare(undo))
            if problem is not None:
                return problem
            with self._barred():
                problem = self._together("the success of reading", self._read)
                problem = problem or self._together("the success of loading", self._share)
            if problem is not None:
                return f"{problem[0]}; until another one is loaded the engine cannot be used", problem[1]
            undo.pop_all()
        self._training.model.parked_states.note_load()
        self._training.model.zero_gradients()
        return None

    def _together(self, what: str, do: Callable[[], object]) -> _Problem | None:
        """Call `do` on all ranks, and return the first one's problem."""
        own: _Problem | None = None
        try:
            do()
        except Exception as error:
            self.cause = error
            own = self._describe(error)
        problems = self._training.job.all_gather_objects(own, what=what)
        rank, problem = next(((rank, one) for rank, one in enumerate(problems) if one is not None), (0, None))
        if problem is None or rank == 0:
            return problem
        return f"on rank {rank}: {problem[0]}", problem[1]

    def _describe(self, error: Exception) -> _Problem:
        if isinstance(error, CheckpointError):
            return str(error), not isinstance(error, _Unfit)
        if isinstance(error, OSError):
            return f"{self._where} cannot be read: {error}", True
        return f"{self._where} cannot be taken over: {type(error).__name__}: {error}", False

    def _prepare(self, undo: ExitStack) -> None:
        """Check that all that will be read is good and fits, and take over all but the model's tensors."""
        training, plan = self._training, self._plan
        self.reader = self._open()
        self.saved = self.reader.training()
        job = training.job
        self.client_state = client_state.of_rank(self.saved, rank=job.index, num_ranks=job.size)
        _check(training, self.reader, self.saved, plan, self._names)
        _verify(training, self.reader, self.saved, plan)
        take_rest(
            training,
            self.saved,
            undo,
            with_module=plan.with_module,
            with_optimizer=plan.with_optimizer,
            with_scheduler=plan.with_scheduler,
            with_progress=plan.with_progress,
        )

    def _read(self) -> None:
        _read(self._training, self.reader, self.saved, self._plan)
        if self._take_module is not None:
            self._module_state = _patiently(self.reader.state_dict)

    def _share(self) -> None:
        _share(self._training)
        if self._take_module is not None:
            self._take_module(self._module_state)

    @contextmanager
    def _barred(self) -> Iterator[None]:
        """From the first value that is written to the knowledge that all ranks have all of them."""
        offloaded = self._training.model.parked_states
        was = offloaded.barred
        offloaded.barred = None  # bar of an earlier load, whose remains this one replaces
        why = (
            f"a load of {self._where} has failed in the middle, so parameters and optimizer states are of no "
            "one state; load a checkpoint, or make a new engine"
        )
        try:
            yield
        except BaseException:
            offloaded.barred = was or why
            raise
        offloaded.barred = why  # barred until `run` succeeds


class _Unfit(CheckpointError):
    """The checkpoint does not fit this run: another checkpoint of the same training will not fit, either."""


def _members(training: Training) -> Iterator[tuple[SubBuffer, int, Member]]:
    for unit in training.model.units:
        for sub_buffer in unit.sub_buffers:
            for index, member in enumerate(sub_buffer.members):
                yield sub_buffer, index, member


class Names(NamedTuple):
    """Names of a whole model, whatever stages it is in."""

    parameters: set[str]
    buffers: set[str]
    trained: set[str]


def _own_names(training: Training) -> Names:
    members = [
        (sub_buffer.is_trained, name)
        for sub_buffer, index, _ in _members(training)
        for name in sub_buffer.true_names(index)
    ]
    return Names(
        parameters={name for _, name in members},
        buffers=set(training.beside_units()),
        trained={name for is_trained, name in members if is_trained},
    )


def names_of_all(training: Training) -> Names:
    """Order: a collective where ranks hold other layers"""
    own = _own_names(training)
    if len(training.domains.stage_leaders) == 1:
        return own
    answers = training.job.all_gather_objects(own if training.leads else None, what="names of parameters")
    stages = [one for one in answers if one is not None]
    return Names(*(set().union(*parts) for parts in zip(*stages, strict=True)))


def _group_names(training: Training) -> list[list[str]]:
    """Return the parameters in each group of the optimizer, by name."""
    if training.optimizer is None:
        return []
    names = {id(param): name for name, param in training.module.named_parameters()}
    groups: list[dict[str, Any]] = training.optimizer.param_groups
    return [[names[id(param)] for param in group["params"] if id(param) in names] for group in groups]


# ---- does it fit?


def _check(
    training: Training, reader: OpenCheckpoint, saved: dict[str, Any], plan: LoadPlan, names: Names
) -> None:
    shapes = {name: tuple(found.size) for name, found in reader.tensors().items()}
    weights = {name[len(MODEL) :]: shape for name, shape in shapes.items() if name.startswith(MODEL)}
    if plan.with_module:
        params = {
            name: sub_buffer.whole_shape(index)
            for sub_buffer, index, _ in _members(training)
            for name in sub_buffer.true_names(index)
        }
        buffers = {
            name: tuple(getattr(value, "shape", ())) for name, value in training.beside_units().items()
        }
        theirs, left_out = set(saved["buffers"]), set(saved["left_out"])
        _check_names("parameters", names.parameters - left_out, set(weights) - theirs, plan)
        _check_names("buffers", names.buffers - left_out, theirs, plan)
        valueless = training.model.parked_states.valueless - set(weights)
        if valueless:
            raise _Unfit(
                f"the checkpoint does not have {_listed(set(valueless))}, which have no values: the model "
                "was made on the meta device; make the model inside dslaunch.zero.Init(), or on a device"
            )
        for name, here in (params | buffers).items():
            there = weights.get(name, here)
            if here != there:
                what = "parameter" if name in params else "buffer"
                raise _Unfit(
                    f"{what} '{name}' has shape {there} in the checkpoint and {here} in the model; build the "
                    "model with the shapes that were saved"
                )
    if plan.with_scheduler:
        _check_scheduler(training.scheduler, saved["scheduler"])
    if plan.with_optimizer and training.optimizer is not None:
        _check_optimizer(training.optimizer, saved["optimizer"], names.trained, shapes, plan)


def _check_scheduler(scheduler: Any, saved: dict[str, Any] | None) -> None:
    if not saved or not hasattr(scheduler, "state_dict"):
        return
    ours = set(scheduler.state_dict())
    if ours and ours.isdisjoint(saved):
        raise _Unfit(
            f"the checkpoint's scheduler remembers {_listed(set(saved))}, this run's "
            f"{type(scheduler).__name__} {_listed(ours)}; load with load_lr_scheduler_states=False"
        )


def _check_optimizer(
    optimizer: FlatOptimizer,
    saved: dict[str, Any] | None,
    trained: set[str],
    shapes: Mapping[str, tuple[int, ...]],
    plan: LoadPlan,
) -> None:
    advice = "load with load_optimizer_states=False to take the weights alone"
    if saved is None:
        raise _Unfit(f"the checkpoint has no optimizer; {advice}")
    if optimizer.rule.name not in saved.get("names", (saved["name"],)):
        raise _Unfit(
            f"the checkpoint's optimizer is {saved['name']}, this run's is {optimizer.rule.name}; {advice}"
        )
    if len(saved["groups"]) != len(optimizer.param_groups):
        raise _Unfit(
            f"the checkpoint has {len(saved['groups'])} optimizer groups, this run "
            f"{len(optimizer.param_groups)}; {advice}"
        )
    kinds = [name[len(STATE) :].rpartition(".") for name in shapes if name.startswith(STATE)]
    remembered = {name for name, _, kind in kinds if kind != MASTER} | set(saved["beside"])
    if remembered:
        remembered |= {name for name in trained if 0 in shapes.get(model_name(name), ())}
        _check_names("optimizer states", trained, remembered, plan)


def _check_names(what: str, ours: set[str], theirs: set[str], plan: LoadPlan) -> None:
    if plan.strict and ours != theirs:
        raise _Unfit(
            f"{what} differ: only in the model: {_listed(ours - theirs)}; only in the checkpoint: "
            f"{_listed(theirs - ours)}; {plan.strict_argument}=False takes what both have"
        )


def _listed(names: set[str]) -> str:
    shown = ", ".join(sorted(names)[:_LISTED])
    return (shown or "none") + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")


# ---- reading, each rank on its own


def _verify(training: Training, reader: OpenCheckpoint, saved: dict[str, Any], plan: LoadPlan) -> None:
    """Read once all that `_read` will read."""
    names: list[str] = []
    kept: set[str] = set()
    if plan.with_optimizer and training.optimizer is not None:
        kept = set(saved["optimizer"]["state_names"])
        job = training.job
        # The optimizer decides which of these each rank reads: together they read all.
        beside = [full for full, _, kind in _states_of(reader) if kind != MASTER and kind not in kept]
        names += beside[job.index :: job.size]
    if not plan.with_module:
        names += [name for name in reader.tensors() if name.startswith(MODEL)]
    all_runs = [*_all_runs(training, reader, plan, kept)]
    if plan.with_module:
        names += _beside_units(training, reader)
    reader.check(all_runs, names)


@torch.no_grad()
def _read(training: Training, reader: OpenCheckpoint, saved: dict[str, Any], plan: LoadPlan) -> None:
    optimizer = training.optimizer if plan.with_optimizer else None
    if optimizer is not None:
        optimizer.rule.reset_states(saved["optimizer"]["state_names"])
    for tensor_runs in _all_runs(training, reader, plan, ()):
        _patiently(partial(reader.read, [tensor_runs]))
    if plan.with_module:
        others = _beside_units(training, reader)
        tensor_runs = runs_of_tensors(others)
        _patiently(partial(reader.read, [tensor_runs]))
        for name, flat in tensor_runs.flats().items():
            others[name].copy_(flat.view(others[name].shape))
    if optimizer is not None:
        optimizer.num_steps = saved["optimizer"]["num_steps"]
        optimizer.rule.load_beside(
            _Beside(reader, saved["optimizer"]["beside"], set(saved["optimizer"]["state_names"]))
        )


def _all_runs(
    training: Training, reader: OpenCheckpoint, plan: LoadPlan, more_kinds: Iterable[str]
) -> Iterator[TensorRuns]:
    """Return the runs that this rank's sub-buffers take; `more_kinds`: states that will be made."""
    source_of = _Sources(reader)
    sources = source_of if plan.with_module else source_of.states_only
    for unit in training.model.units:
        for sub_buffer in unit.sub_buffers:
            kinds = (
                {*sub_buffer.optimizer_shard.state_names, *more_kinds}
                if plan.with_optimizer and sub_buffer.is_trained
                else ()
            )
            yield SubBufferRuns(sub_buffer).to_read(sources, sorted(kinds))


def _beside_units(training: Training, reader: OpenCheckpoint) -> dict[str, Tensor]:
    return {
        model_name(name): value
        for name, value in training.beside_units().items()
        if is_strided(value) and model_name(name) in reader.tensors()
    }


def _patiently(do: Callable[[], T]) -> T:
    """Do it again where it fails: what is read has been read before, so that may pass."""
    for pause_s in _PAUSES_S:
        try:
            return do()
        except (CheckpointError, OSError) as error:
            _log.warning("%s; it is read once more", error)
            time.sleep(pause_s)
    return do()


def _states_of(reader: OpenCheckpoint) -> Iterator[tuple[str, str, str]]:
    """The names of states: whole, the parameter's, the kind."""
    for full in reader.tensors():
        if full.startswith(STATE):
            name, _, kind = full[len(STATE) :].rpartition(".")
            yield full, name, kind


class _Sources:
    """Under which name a checkpoint has a kind of value of a parameter."""

    def __init__(self, reader: OpenCheckpoint) -> None:
        self._tensors = reader.tensors()

    def __call__(self, name: str, kind: str, dtype: torch.dtype) -> str | None:
        """Return the one that is rounded least; None if there is nothing to read."""
        if kind not in (PARAMETERS, MASTER):
            return self.states_only(name, kind, dtype)
        master, model = state_name(name, MASTER), model_name(name)
        if master in self._tensors and self._tensors[model].properties.dtype != dtype:
            return master
        return model if model in self._tensors else None

    def states_only(self, name: str, kind: str, dtype: torch.dtype) -> str | None:
        """Return that of an optimizer's state; None for parameters and masters."""
        state = state_name(name, kind)
        return state if kind not in (PARAMETERS, MASTER) and state in self._tensors else None


class _Beside(dict[str, dict[str, Any]]):
    """States of an optimizer that are not per element, whose tensors are read when the
    parameter is asked for.
    """

    def __init__(self, reader: OpenCheckpoint, plain: Mapping[str, dict[str, Any]], kept: set[str]) -> None:
        super().__init__(plain)
        self._reader = reader
        self._tensors: dict[str, list[str]] = {}
        for _, name, kind in _states_of(reader):
            if kind != MASTER and kind not in kept:
                self._tensors.setdefault(name, []).append(kind)

    def get(self, name: str, default: Any = None) -> Any:
        read = {
            kind: _patiently(partial(self._reader.tensor, state_name(name, kind)))
            for kind in self._tensors.get(name, ())
        }
        values = dict(super().get(name, {})) | read
        return values or default


# ---- what all have read


def _share(training: Training) -> None:
    """Let parameters that are whole here have the shards that the other ranks have read."""
    gathers: list[Pending] = []
    for unit in training.model.units:
        for sub_buffer in unit.sub_buffers:
            sub_buffer.param_shard.note_change()
            if not sub_buffer.is_sharded:
                gathers.append(
                    sub_buffer.comm.all_gather_(sub_buffer.param_shard.values.flat, what=sub_buffer.label)
                )
    for gather in gathers:
        gather.wait()
