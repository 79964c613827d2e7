"""A DeepSpeed checkpoint, as if it were one of ours: the same names, true shapes,
and only what is asked for is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

from ...errors import CheckpointError
from ...strided import is_strided
from ..files.tensor_runs import MODEL, TensorRun, TensorRuns, model_name, state_name
from .folder import DeepSpeedFolder
from .pieces import (
    MASTER,
    Found,
    TensorPieces,
    base_optimizer,
    flat_partitions,
    frozen_fragments,
    sharded_parameters,
    universal_parameters,
    whole_parameters,
    whole_tensor,
)
from .training import ClientStates, describe_training, optimizer_of

_SHARDED_STAGE = 3


class DeepSpeedReader:
    """One checkpoint that DeepSpeed wrote; its weights are the float32 masters where it has them.

    Errors: CheckpointError for files that are missing or damaged, or that say something which cannot be
            read here, by name
    """

    def __init__(self, path: Path, *, groups: Sequence[Sequence[str]] = ()) -> None:
        self.tag = path.name
        self.place = self.where = str(path)
        self._folder = DeepSpeedFolder(path)
        self._model = self._folder.model(0)
        for key in ("ds_autoep_layers", "autoep_layers"):
            if self._model.get(key):
                raise CheckpointError(
                    f"{path}: experts of AutoEP cannot be read here; load it with DeepSpeed"
                )
        self._optimizer = optimizer_of(self._folder, self._model)
        self._aliases = self._find_aliases()
        self._frozen: frozenset[str] = frozenset()
        trained = self._find_trained(groups)
        weights = self._find_weights(trained)
        self._extra = {name: value for name, value in self._model["module"].items() if not is_strided(value)}
        self._tensors = {model_name(name): pieces for name, pieces in weights.items()}
        for name, kinds in trained.items():
            self._tensors |= {
                state_name(name, kind): pieces for kind, pieces in kinds.items() if kind != MASTER
            }
        self._metadata = {name: _metadata(pieces) for name, pieces in self._tensors.items()}
        self._saved = describe_training(
            self._model,
            self._optimizer,
            steps=self._steps(),
            buffers=[*(name for name, one in weights.items() if self._is_beside(name, one)), *self._extra],
            aliases=self._aliases,
            frozen=self._frozen,
            extra_state=self._extra,
            state_names=sorted({kind for kinds in trained.values() for kind in kinds if kind != MASTER}),
        )
        if self._folder.is_sharded:
            self._saved["client_states"] = ClientStates(self._folder)

    def training(self) -> dict[str, Any]:
        """Return all but the tensors of the model and the optimizer. See "One checkpoint" in format.py."""
        return self._saved

    def tensors(self) -> Mapping[str, TensorStorageMetadata]:
        """Return the name, shape (`size`) and dtype (`properties.dtype`) of every tensor."""
        return self._metadata

    def check(self, all_runs: Iterable[TensorRuns], names: Iterable[str] = ()) -> None:
        """Open all files that `read` of these, and `tensor` of these names, take from;
        DeepSpeed writes no digests.

        Errors: CheckpointError that names the file, or what is missing in it
        """
        wanted = [
            (run.name, run.start, run.numel) if run.cut is None else (run.name, 0, prod(run.shape))
            for tensor_runs in all_runs
            for run in tensor_runs.runs
        ]
        wanted += [(name, 0, prod(self._tensors[name].shape)) for name in names]
        try:
            for name, start, numel in wanted:
                self._tensors[name].check(start, numel)
        except (
            KeyError,
            IndexError,
            TypeError,
            AttributeError,
        ) as error:  # a file of another version than 0.19.8
            raise CheckpointError(
                f"{self.where} is not as DeepSpeed 0.19 writes checkpoints: {type(error).__name__}: {error}; "
                "load it with the DeepSpeed that wrote it, and save it with that of today"
            ) from error

    @torch.no_grad()
    def read(self, all_runs: Iterable[TensorRuns]) -> None:
        """Fill the runs of these; of a tensor of another dtype, with rounded values."""
        for tensor_runs in all_runs:
            if tensor_runs.runs:
                with tensor_runs.here(True):
                    flats = tensor_runs.flats()
                    for run in tensor_runs.runs:
                        out = flats[run.flat][run.offset : run.offset + run.numel]
                        fill(out, run, self._tensors[run.name])

    @torch.no_grad()
    def tensor(self, name: str) -> Tensor:
        """Return one whole tensor, in host memory."""
        return self._tensors[name].whole()

    def state_dict(self) -> dict[str, Any]:
        """Return the module's state_dict, whole and in host memory."""
        state: dict[str, Any] = {
            name[len(MODEL) :]: self.tensor(name) for name in self._tensors if name.startswith(MODEL)
        }
        state |= {other: state[name] for other, name in self._aliases.items() if name in state}
        return state | self._extra

    def _steps(self) -> list[int]:
        """Return how often the parameters of each group have been updated,
        where that is written down with them.
        """
        optimizer = self._optimizer
        if optimizer is None:
            return []
        steps = [own["step"] for own in base_optimizer(optimizer)["state"].values() if "step" in own]
        if not steps and self._folder.is_universal:
            firsts = [next(iter(group)) for group in self._shapes if group]
            steps = [step for name in firsts if (step := self._folder.universal(name, "step")) is not None]
        return [int(step) for step in steps]

    # ---- what is where

    @property
    def _shapes(self) -> list[Mapping[str, Sequence[int]]]:
        shapes: list[Mapping[str, Sequence[int]]] = self._model["param_shapes"] or []
        return shapes

    def _find_trained(self, groups: Sequence[Sequence[str]]) -> Found:
        """Return masters and states."""
        optimizer = self._optimizer
        if optimizer is None:
            if self._folder.is_sharded:
                raise CheckpointError(
                    f"{self.where} has no *_optim_states.pt, where ZeRO stage 3 keeps all weights that it "
                    "trains; copy all ranks' files here, or load another checkpoint"
                )
            return {}
        if self._folder.is_universal:
            return universal_parameters(self._folder, self._shapes)
        if not self._shapes:
            return whole_parameters(self._model, optimizer, groups, self._aliases, where=self.where)
        counted: int | list[int] = optimizer["partition_count"]
        counts = sorted(set(counted)) if isinstance(counted, list) else [counted]
        if len(counts) != 1:
            raise CheckpointError(
                f"{self.where}: groups of the optimizer are spread over {counts} ranks (MoE), which cannot "
                "be read here; load it with DeepSpeed"
            )
        is_sharded = optimizer.get("zero_stage") == _SHARDED_STAGE
        self._folder.check_ranks(counts[0], of_model=is_sharded)
        return (sharded_parameters if is_sharded else flat_partitions)(self._folder, self._shapes)

    def _find_weights(self, trained: Found) -> dict[str, TensorPieces]:
        """Return parameters and buffers: masters, fragments of what is frozen, and what the module's
        state_dict has whole.
        """
        weights = {name: kinds[MASTER] for name, kinds in trained.items() if MASTER in kinds}
        frozen: Mapping[str, Sequence[int]] = self._model.get("frozen_param_shapes") or {}
        if frozen and self._is_in_fragments(frozen):
            weights |= frozen_fragments(self._folder, frozen)
        for name, value in self._model["module"].items():
            if is_strided(value) and name not in self._aliases and name not in weights:
                weights[name] = whole_tensor(value)
        buffers = set(self._model["buffer_names"])
        self._frozen = (
            frozenset(name for name in weights if name not in buffers and name not in trained)
            if trained
            else frozenset()
        )
        # Keep the module's own order, as far as it is known.
        order = {name: number for number, name in enumerate(self._model["module"])}
        return dict(sorted(weights.items(), key=lambda one: order.get(one[0], len(order))))

    def _is_in_fragments(self, frozen: Mapping[str, Sequence[int]]) -> bool:
        module = self._model["module"]
        return any(
            name not in module or tuple(module[name].shape) != tuple(shape) for name, shape in frozen.items()
        )

    def _is_beside(self, name: str, pieces: TensorPieces) -> bool:
        return name in self._model["buffer_names"] or not pieces.dtype.is_floating_point

    def _find_aliases(self) -> dict[str, str]:
        """Return the other names of tied parameters; where DeepSpeed did not write them down, by the
        storage that they share.
        """
        written: dict[str, str] | None = self._model.get("shared_params")
        if written is not None:
            return dict(written)
        first: dict[tuple[Any, ...], str] = {}
        aliases: dict[str, str] = {}
        for name, value in self._model["module"].items():
            if is_strided(value) and value.numel():
                known = first.setdefault((value.data_ptr(), value.shape, value.stride()), name)
                if known != name:
                    aliases[name] = known
        return aliases


def _metadata(pieces: TensorPieces) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=pieces.dtype), size=torch.Size(pieces.shape), chunks=[]
    )


def fill(out: Tensor, run: TensorRun, source: TensorPieces) -> None:
    """Fill `out`, [run.numel], with what the run has of a tensor, or of this rank's part of it."""
    if run.cut is None:
        source.copy_to(run.start, out)
    else:
        part = run.cut.take(source.whole()).reshape(-1)
        out.copy_(part[run.start : run.start + run.numel])
