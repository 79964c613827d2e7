"""Loading: every rank reads the boxes that its shards need anything of. Only parameters that are whole here are gathered."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..comm.collectives import Pending
from ..errors import CheckpointError
from ..optim.flat import FlatOptimizer
from ..zero.sub_buffer import Member, SubBuffer
from .opened import OpenCheckpoint, latest_tag, open_checkpoint
from .rng import restore_rng_state
from .shelf import MASTER, MODEL, PARAMETERS, STATE, PartShelves, model_name, shelf_of_tensors, state_name
from .store import LATEST, Store, is_tag
from .training import Training

_LISTED = 5  # names in one message
_log = logging.getLogger("dslaunch")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """What of a checkpoint to take."""

    strict: bool
    with_optimizer: bool
    with_scheduler: bool
    with_progress: bool
    with_module: bool = True  # False: somebody else loads the weights
    may_be_missing: bool = False  # a job that is started again after a failure finds nothing the first time
    is_lenient: bool = False  # a folder without `latest` is no error, as in DeepSpeed


def load_checkpoint(
    training: Training, store: Store, tag: str | None, plan: LoadPlan
) -> tuple[OpenCheckpoint, dict[str, Any]] | None:
    """Take the state of the checkpoint `tag`; return its reader, and what is in its training.pt; None if there is none and may be.

    Without a tag it is the one that `latest` names, and if that is damaged, the newest one that is not, with a warning. Nothing
    is changed unless everything fits; where it turns out to be damaged later, another one has to be loaded.
    Order:  every rank must call this
    Errors: CheckpointError, on every rank, if one of them cannot read it or it does not fit
    """
    candidates = [tag] if tag is not None else _candidates(training, store, plan)
    if not candidates:
        return None
    for number, candidate in enumerate(candidates):
        loaded, problem = _try_load(training, store, candidate, plan)
        problems = training.comm.all_gather_objects(problem, what="the success of loading")
        failed = next(((rank, one) for rank, one in enumerate(problems) if one is not None), None)
        if failed is None and loaded is not None:
            reader, saved = loaded
            _share(training)
            _apply_rest(training, saved, plan)
            return reader, saved
        rank, one = failed or (0, None)
        text, is_damage = one or ("", False)
        text = text if rank == 0 else f"on rank {rank}: {text}"
        if not is_damage or number + 1 == len(candidates):
            raise CheckpointError(text)
        if training.comm.mesh.world.index == 0:
            _log.warning("%s; trying %s, the one before", text, candidates[number + 1])
    raise AssertionError("there is always a candidate")


def _candidates(training: Training, store: Store, plan: LoadPlan) -> list[str]:
    """Return what may be loaded without a tag, best first; rank 0 looks, so that all try the same."""
    found: list[str] | str | None = None
    if training.comm.mesh.world.index == 0:
        try:
            found = _look(store, plan)
        except CheckpointError as error:
            found = str(error)
        except OSError as error:
            found = f"{store.where} cannot be read: {error}"
    found = training.comm.all_gather_objects(found, what="which checkpoint to load")[0]
    if isinstance(found, str):
        raise CheckpointError(found)
    return found or []


def _look(store: Store, plan: LoadPlan) -> list[str]:
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
            f"{store.where}/{LATEST} does not exist; give the folder that save_checkpoint() wrote to, or a tag: the "
            f"folder holds {', '.join(tags) or 'no checkpoint'}"
        )
    if not is_tag(latest):  # damaged, too
        text = f"{store.where}/{LATEST} holds {latest!r}, which is no name of a checkpoint"
        if not tags:
            raise CheckpointError(f"{text}; {store.where} holds no other")
        _log.warning("%s; trying %s, the newest", text, tags[-1])
        return tags[::-1]
    older = tags[: tags.index(latest)] if latest in tags else tags
    return [latest, *reversed(older)]


_Problem = tuple[str, bool]  # what is wrong, and whether another checkpoint may be better


def _try_load(
    training: Training, store: Store, tag: str, plan: LoadPlan
) -> tuple[tuple[OpenCheckpoint, dict[str, Any]] | None, _Problem | None]:
    try:
        reader = open_checkpoint(store, tag, groups=_group_names(training))
        saved = reader.training()
    except CheckpointError as error:
        return None, (str(error), True)
    except OSError as error:
        return None, (f"{store.where}/{tag} cannot be read: {error}", True)
    try:
        _check(training, reader, saved, plan)
    except CheckpointError as error:
        return None, (str(error), False)
    try:
        _read(training, reader, saved, plan)
    except CheckpointError as error:
        return None, (str(error), True)
    return (reader, saved), None


def _members(training: Training) -> Iterator[tuple[SubBuffer, Member]]:
    for unit in training.model.units:
        for part in unit.parts:
            for member in part.members:
                yield part, member


def _group_names(training: Training) -> list[list[str]]:
    """Return the parameters in each group of the optimizer, by name."""
    if training.optimizer is None:
        return []
    names = {id(param): name for name, param in training.module.named_parameters()}
    groups: list[dict[str, Any]] = training.optimizer.param_groups
    return [[names[id(param)] for param in group["params"] if id(param) in names] for group in groups]


# ---- does it fit?


def _check(training: Training, reader: OpenCheckpoint, saved: dict[str, Any], plan: LoadPlan) -> None:
    shapes = {name: tuple(found.size) for name, found in reader.tensors().items()}
    weights = {name[len(MODEL) :]: shape for name, shape in shapes.items() if name.startswith(MODEL)}
    if plan.with_module:
        params = {member.name: tuple(member.param.shape) for _, member in _members(training)}
        buffers = {
            name: tuple(getattr(value, "shape", ())) for name, value in training.beside_units().items()
        }
        theirs, left_out = set(saved["buffers"]), set(saved["left_out"])
        _check_names("parameters", set(params) - left_out, set(weights) - theirs, strict=plan.strict)
        _check_names("buffers", set(buffers), theirs, strict=plan.strict)
        for name, here in (params | buffers).items():
            there = weights.get(name, here)
            if here != there:
                what = "parameter" if name in params else "buffer"
                raise CheckpointError(
                    f"{what} '{name}' has shape {there} in the checkpoint and {here} in the model"
                )
    if plan.with_scheduler:
        _check_scheduler(training.scheduler, saved["scheduler"])
    if plan.with_optimizer and training.optimizer is not None:
        trained = {member.name for part, member in _members(training) if part.is_trained}
        _check_optimizer(training.optimizer, saved["optimizer"], trained, shapes, strict=plan.strict)


def _check_scheduler(scheduler: Any, saved: dict[str, Any] | None) -> None:
    if not saved or not hasattr(scheduler, "state_dict"):
        return
    ours = set(scheduler.state_dict())
    if ours and ours.isdisjoint(saved):
        raise CheckpointError(
            f"the checkpoint's scheduler remembers {_listed(set(saved))}, this run's {type(scheduler).__name__} "
            f"{_listed(ours)}; load with load_lr_scheduler_states=False"
        )


def _check_optimizer(
    optimizer: FlatOptimizer,
    saved: dict[str, Any] | None,
    trained: set[str],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    strict: bool,
) -> None:
    advice = "load with load_optimizer_states=False to take the weights alone"
    if saved is None:
        raise CheckpointError(f"the checkpoint has no optimizer; {advice}")
    if optimizer.rule.name not in saved.get("names", (saved["name"],)):
        raise CheckpointError(
            f"the checkpoint's optimizer is {saved['name']}, this run's is {optimizer.rule.name}; {advice}"
        )
    if len(saved["groups"]) != len(optimizer.param_groups):
        raise CheckpointError(
            f"the checkpoint has {len(saved['groups'])} optimizer groups, this run {len(optimizer.param_groups)}; {advice}"
        )
    kinds = [name[len(STATE) :].rpartition(".") for name in shapes if name.startswith(STATE)]
    remembered = {name for name, _, kind in kinds if kind != MASTER} | set(saved["beside"])
    if remembered:
        _check_names("optimizer states", trained, remembered, strict=strict)


def _check_names(what: str, ours: set[str], theirs: set[str], *, strict: bool) -> None:
    if strict and ours != theirs:
        raise CheckpointError(
            f"{what} differ: only in the model: {_listed(ours - theirs)}; only in the checkpoint: "
            f"{_listed(theirs - ours)}; load_module_strict=False takes what both have"
        )


def _listed(names: set[str]) -> str:
    shown = ", ".join(sorted(names)[:_LISTED])
    return (shown or "none") + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")


# ---- reading, each rank on its own


@torch.no_grad()
def _read(training: Training, reader: OpenCheckpoint, saved: dict[str, Any], plan: LoadPlan) -> None:
    optimizer = training.optimizer if plan.with_optimizer else None
    if optimizer is not None:
        optimizer.rule.reset_states(saved["optimizer"]["state_names"])
    source_of = _Sources(reader)
    for unit in training.model.units:
        for part in unit.parts:
            kinds = [*part.states] if optimizer is not None and part.is_trained else []
            sources = source_of if plan.with_module else source_of.states_only
            reader.read([PartShelves(part).to_read(sources, kinds)])
    if plan.with_module:
        others = {
            model_name(name): value
            for name, value in training.beside_units().items()
            if isinstance(value, torch.Tensor) and model_name(name) in reader.tensors()
        }
        shelf = shelf_of_tensors(others)
        reader.read([shelf])
        for name, flat in shelf.flats().items():
            others[name].copy_(flat.view(others[name].shape))
    if optimizer is not None:
        optimizer.num_steps = saved["optimizer"]["num_steps"]
        optimizer.rule.load_beside(
            _Beside(reader, saved["optimizer"]["beside"], set(saved["optimizer"]["state_names"]))
        )


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
        found = state_name(name, kind)
        return found if kind not in (PARAMETERS, MASTER) and found in self._tensors else None


class _Beside(dict[str, dict[str, Any]]):
    """What an optimizer remembers beside its states, whose tensors are read when somebody asks for the parameter."""

    def __init__(self, reader: OpenCheckpoint, plain: Mapping[str, dict[str, Any]], kept: set[str]) -> None:
        super().__init__(plain)
        self._reader = reader
        self._tensors: dict[str, list[str]] = {}
        for full in reader.tensors():
            if full.startswith(STATE):
                name, _, kind = full[len(STATE) :].rpartition(".")
                if kind != MASTER and kind not in kept:
                    self._tensors.setdefault(name, []).append(kind)

    def get(self, name: str, default: Any = None) -> Any:
        read = {kind: self._reader.tensor(state_name(name, kind)) for kind in self._tensors.get(name, ())}
        found = dict(super().get(name, {})) | read
        return found or default


# ---- what all have read


def _share(training: Training) -> None:
    """Let parameters that are whole here have the shards that the other ranks have read."""
    gathers: list[Pending] = []
    for unit in training.model.units:
        for part in unit.parts:
            if not part.is_sharded:
                gathers.append(training.comm.gather(part.values.flat, what=part.label))
    for gather in gathers:
        gather.wait()


def _apply_rest(training: Training, saved: dict[str, Any], plan: LoadPlan) -> None:
    if plan.with_module and saved["extra_state"]:
        training.module.load_state_dict(saved["extra_state"], strict=False)
    if plan.with_optimizer and training.optimizer is not None:
        for group, hyper in zip(training.optimizer.param_groups, saved["optimizer"]["groups"], strict=True):
            group.update(hyper)
        if saved["loss_scale"] is not None:  # other precisions have none
            training.scaler.load_state_dict(saved["loss_scale"])
    if (
        plan.with_scheduler
        and saved["scheduler"] is not None
        and hasattr(training.scheduler, "load_state_dict")
    ):
        training.scheduler.load_state_dict(saved["scheduler"])
    if plan.with_progress:
        steps = training.config.gradient_accumulation_steps
        training.progress.restore(saved["progress"], gradient_accumulation_steps=steps)
        if training.loader is not None and saved["data"] is not None:
            training.loader.load_state_dict(saved["data"])
        _apply_rng(training, saved["rng"])
    training.model.zero_gradients()


def _apply_rng(training: Training, states: Sequence[dict[str, Any]]) -> None:
    world = training.comm.mesh.world
    if len(states) == world.size:
        restore_rng_state(states[world.index])
    elif states and world.index == 0:  # DeepSpeed's have none
        _log.warning(
            "the checkpoint was written by %d ranks and is read by %d: random numbers do not continue where they were",
            len(states),
            world.size,
        )
