"""transformers' Trainer and snapshots in memory: a program goes on from them without a changed line.

Trainer goes on from a folder, `checkpoint-N`, with files of its own beside the engine's checkpoint. So its
state is taken along with each snapshot, at the end of a step as Trainer counts it; and where a job has
started again, `train()` is given a folder with those files, whose checkpoint is the snapshot.

Source: transformers 5.23.0 trainer.py, `train`, `_maybe_log_save_evaluate`, `_init_training_state`,
        `_save_checkpoint`, `_load_optimizer_and_scheduler`, `_load_rng_state`
"""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from ..checkpoint.snapshots import Snapshots, name_of_folder, newest_state
from ..checkpoint.stand_in_folder import make_stand_in
from ..environment import SnapshotSettings, read_environment

_TRAINER = "transformers.trainer"
_STATE, _SCHEDULER = "trainer_state.json", "scheduler.pt"
_log = logging.getLogger("dslaunch")


def watch() -> None:
    """Have Trainer take part, when a program imports it."""
    module = sys.modules.get(_TRAINER)
    if module is not None and hasattr(module, "Trainer"):
        _join(module)
    elif not any(isinstance(one, _Finder) for one in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds the module of Trainer as Python would, and sees it when it has been made."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _TRAINER:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    def __init__(self, plain: Loader) -> None:
        self._plain = plain

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._plain.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._plain
        module.__loader__ = self._plain
        self._plain.exec_module(module)
        _join(module)


def _join(module: ModuleType) -> None:
    """Let `Trainer.train` go on from a snapshot, and have the trainer take its own."""
    kind: Any = module.Trainer
    plain, plain_end = kind.train, kind._maybe_log_save_evaluate

    @wraps(plain)
    def train(self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        settings = read_environment().snapshots
        if settings is None or not self.is_deepspeed_enabled:
            return plain(self, resume_from_checkpoint, *args, **kwargs)
        if not any(isinstance(one, TrainerSnapshots) for one in self.callback_handler.callbacks):
            self.add_callback(_callback_of(module, self))
        folder = _folder_of_snapshot(module, self, settings, resume_from_checkpoint)
        try:
            return plain(self, folder or resume_from_checkpoint, *args, **kwargs)
        finally:
            if folder is not None:
                shutil.rmtree(Path(folder).parent, ignore_errors=True)

    @wraps(plain_end)
    def end_step(self: Any, *args: Any, **kwargs: Any) -> None:
        plain_end(self, *args, **kwargs)
        for one in self.callback_handler.callbacks:
            if isinstance(one, TrainerSnapshots):
                one.end_step()

    kind.train, kind._maybe_log_save_evaluate = train, end_step


class TrainerSnapshots:
    """Takes the snapshots of one trainer: at the end of a step, when it would save by itself."""

    trainer: Any
    is_state: type[Any]
    last_step = -1

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Have the engine wait for this trainer."""
        self.last_step = state.global_step
        snapshots = self._snapshots()
        if snapshots is not None:
            snapshots.is_held_back = True
            snapshots.state = self._own_state
            snapshots.folders = {name_of_folder(args.output_dir)}

    def end_step(self) -> None:
        """Take a snapshot, if one is due. Trainer calls this once more at the end of an epoch.

        Order: a collective if one is due
        """
        step = self.trainer.state.global_step
        if self._snapshots() is not None and step != self.last_step:
            self.trainer.deepspeed._checkpoints.snapshot_if_due(is_asked=True)
        self.last_step = step

    def _snapshots(self) -> Snapshots | None:
        engine = self.trainer.deepspeed
        saver = None if engine is None else getattr(engine, "_saver", None)
        return None if saver is None else saver.snapshots

    def _own_state(self) -> Mapping[str, Any]:
        """Return what Trainer would write beside its checkpoint, on the rank that would."""
        trainer = self.trainer
        if not trainer.is_world_process_zero():
            return {}
        state = dataclasses.asdict(trainer.state)
        kept = copy.deepcopy(state["stateful_callbacks"])
        for one in [*trainer.callback_handler.callbacks, trainer.control]:
            if isinstance(one, self.is_state):
                name = one.__class__.__name__
                if isinstance(kept.get(name), list):
                    kept[name].append(one.state())
                else:
                    kept[name] = one.state()
        state["stateful_callbacks"] = kept
        own: dict[str, Any] = {_STATE: json.dumps(state, indent=2, sort_keys=True)}
        if hasattr(trainer.lr_scheduler, "state_dict"):
            own[_SCHEDULER] = trainer.lr_scheduler.state_dict()
        return own


def _callback_of(module: ModuleType, trainer: Any) -> Any:
    kind = type("TrainerSnapshots", (TrainerSnapshots, module.TrainerCallback), {})
    callback = kind()
    callback.trainer, callback.is_state = trainer, module.ExportableState
    return callback


def _folder_of_snapshot(
    module: ModuleType, trainer: Any, settings: SnapshotSettings, asked: Any
) -> str | None:
    """Return a folder from which Trainer goes on with the newest snapshot; None if its own folder is newer,
    or there is none.

    Order: a collective of all ranks
    """
    if not settings.attempt or not dist.is_initialized():
        return None
    found: list[Any] = [None]
    if dist.get_rank() == 0:
        found = [_find(module, trainer, settings, asked)]
    dist.broadcast_object_list(found, src=0)
    if found[0] is None:
        return None
    tag, step, own = found[0]
    folder = Path(tempfile.mkdtemp(prefix="dslaunch-snapshot-")) / f"checkpoint-{step}"
    make_stand_in(folder, tag, step)
    (folder / _STATE).write_text(own[_STATE])
    if _SCHEDULER in own:
        torch.save(own[_SCHEDULER], folder / _SCHEDULER)
    return str(folder)


def _find(
    module: ModuleType, trainer: Any, settings: SnapshotSettings, asked: Any
) -> tuple[str, int, Mapping[str, Any]] | None:
    try:
        newest = newest_state(settings, trainer.args.output_dir)
    except Exception as error:  # whatever it is, the ranks go on from the disk, together
        _log.warning("the snapshots in memory cannot be read: %s", error)
        return None
    if newest is None or _STATE not in newest[1]:
        return None
    tag, own = newest
    step = int(json.loads(own[_STATE])["global_step"])
    folder = asked
    if isinstance(asked, bool):
        output = trainer.args.output_dir
        folder = module.get_last_checkpoint(output) if asked and os.path.isdir(output) else None
    if folder is not None:
        try:
            on_disk = int(json.loads((Path(folder) / _STATE).read_text())["global_step"])
        except (OSError, ValueError, KeyError):
            on_disk = -1
        if on_disk >= step:
            return None
    return tag, step, own
