"""The files of one DeepSpeed checkpoint.

    mp_rank_00_model_states.pt                              ZeRO stages 0, 1 and 2
    zero_pp_rank_<rank>_mp_rank_00_model_states.pt          stage 3
    [bf16_|fp16_]zero_pp_rank_<rank>_mp_rank_00_optim_states.pt     stages 1, 2 and 3
    zero/<parameter>/{fp32,exp_avg,...}.pt                  universal, in place of the files before
    zero/optimizer_state.pt

Source: DeepSpeed 0.19.8 runtime/engine.py, `_get_ckpt_name`, `_get_zero_ckpt_name`;
        checkpoint/ds_to_universal.py
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from .pickle_file import load_file

_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_UNIVERSAL = "zero"
_COMMON = "optimizer_state.pt"

# Files and folders in other kinds of checkpoints.
_REFUSED = (
    (re.compile(r".*expert_\d+.*_model_states\.pt|expp_rank_.*"), "experts in files of their own (MoE)"),
    (re.compile(r"layer_\d+.*"), "layers in files of their own (pipeline parallelism)"),
    (
        re.compile(r"offloaded_tensors"),
        "optimizer states that NVMe offload left outside of the files that others read",
    ),
)
_ADVICE = "load it with DeepSpeed, and save the weights with save_16bit_model()"


def is_deepspeed(folder: Path) -> bool:
    """Whether DeepSpeed wrote this."""
    return folder.is_dir() and any(_MODEL.fullmatch(path.name) for path in folder.iterdir())


class DeepSpeedFolder:
    """A folder with a DeepSpeed checkpoint of one tensor-parallel and pipeline rank.

    Files are opened when they are asked for.

    Errors: CheckpointError if ranks' files are missing, or for what cannot be read here, by name
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._models: dict[int, Path] = {}
        self._optimizers: dict[int, Path] = {}
        for entry in sorted(path.iterdir()):
            self._sort(entry)
        self.is_universal = (path / _UNIVERSAL).is_dir()
        for files, what in ((self._models, "model_states"), (self._optimizers, "optim_states")):
            if sorted(files) != list(range(len(files))):
                missing = min(set(range(max(files) + 1)) - set(files))
                raise CheckpointError(
                    f"{path} has no *_{what}.pt of rank {missing}: the checkpoint is "
                    "damaged; load another one"
                )
        self.model = cache(self._model)  # rank -> content of its file
        self.optimizer = cache(self._optimizer)

    @property
    def is_sharded(self) -> bool:
        """Whether it is of stage 3, where each rank has a file of the model."""
        return self._models[0].name.startswith("zero_pp_rank_")

    @property
    def num_model_files(self) -> int:
        return len(self._models)

    @property
    def num_optimizer_files(self) -> int:
        return len(self._optimizers)

    def check_ranks(self, num_ranks: int, *, of_model: bool) -> None:
        """Refuse a folder where ranks' files are missing.

        Errors: CheckpointError
        """
        for count, wanted, what in (
            (self.num_optimizer_files, num_ranks, "optim_states"),
            (self.num_model_files, num_ranks if of_model else 1, "model_states"),
        ):
            if count != wanted:
                raise CheckpointError(
                    f"{self.path} has {count} files *_{what}.pt and was written by {num_ranks} ranks, of "
                    f"which each partition is on one: {wanted} would be right; copy all ranks' files here, "
                    "or load another checkpoint"
                )

    def universal(self, name: str, kind: str) -> Any:
        """Return the content of a parameter's file, None if there is none."""
        path = self.path / _UNIVERSAL / name / f"{kind}.pt"
        return load_file(path) if path.is_file() else None

    def universal_kinds(self, name: str) -> tuple[str, ...]:
        """Return which files a parameter has."""
        return tuple(sorted(path.stem for path in (self.path / _UNIVERSAL / name).glob("*.pt")))

    def universal_common(self) -> Mapping[str, Any]:
        """Return the optimizer's values that belong to no parameter."""
        common: dict[str, Any] = load_file(self.path / _UNIVERSAL / _COMMON)
        return common

    def _sort(self, entry: Path) -> None:
        for pattern, files in ((_MODEL, self._models), (_OPTIMIZER, self._optimizers)):
            matched = pattern.fullmatch(entry.name)
            if matched is not None:
                if int(matched[2]) != 0:
                    raise CheckpointError(
                        f"{entry} is of a tensor or pipeline parallel run, whose parameters are in parts "
                        f"that only its program knows; {_ADVICE}"
                    )
                files[int(matched[1] or 0)] = entry
                return
        for refused, what in _REFUSED:
            if refused.fullmatch(entry.name):
                raise CheckpointError(f"{entry}: {what} cannot be read here; {_ADVICE}")

    def _model(self, rank: int) -> Mapping[str, Any]:
        model: dict[str, Any] = load_file(self._models[rank])
        return model

    def _optimizer(self, rank: int) -> Mapping[str, Any]:
        content = load_file(self._optimizers[rank])
        state: dict[str, Any] = content["optimizer_state_dict"]
        return state
