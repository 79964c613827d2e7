"""The folder of weights that DeepSpeed's keys `checkpoint`, `base_dir` and `checkpoint_config` name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from .config import DeepSpeedInferenceConfig

_INDEX = ".index.json"  # ends the name of a file of transformers' that says which file has which tensor


def checkpoint_folder(config: DeepSpeedInferenceConfig) -> str | None:
    """Return the folder; None if no checkpoint is named.

    `checkpoint` is a folder, or a dict or a JSON file with the names of files, which lie in one folder.
    Errors: CheckpointError for a file that cannot be read, or files that do not lie in one folder
    """
    inner = config.checkpoint_config
    given = config.checkpoint or inner.checkpoint_dir
    base = config.base_dir or inner.base_dir or ""
    if given is None:
        return None
    if isinstance(given, str):
        path = Path(base, given) if base and not Path(given).exists() else Path(given)
        if path.name.endswith(_INDEX):
            return str(path.parent)
        if path.suffix != ".json":
            return str(path)
        return _folder_of(_read(path), base=Path(base or path.parent), where=str(path))
    return _folder_of(given, base=Path(base), where="checkpoint")


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"init_inference(checkpoint={str(path)!r}): {error}; give a folder with weights, or a JSON file "
            "that names their files"
        ) from None


def _folder_of(values: Any, *, base: Path, where: str) -> str:
    files = values.get("checkpoints") if isinstance(values, Mapping) else None
    if isinstance(files, Mapping):
        raise CheckpointError(
            f"{where}: its checkpoints are files that DeepSpeed's kernels have divided over ranks, which are "
            "not read here; give the folder of the model as save_pretrained() wrote it"
        )
    root = Path((values.get("base_dir") if isinstance(values, Mapping) else None) or base)
    if files == [] and root != Path():  # programs for DeepSpeed list *.bin and *.pt only
        return str(root)
    if not isinstance(files, list) or not files or not all(isinstance(one, str) for one in files):
        raise CheckpointError(
            f'{where}: has no list of files under "checkpoints"; write one, as {{"checkpoints": '
            '["model.safetensors"]}, or give the folder with the files'
        )
    folders = sorted({str((root / file).parent) for file in files})
    if len(folders) > 1:
        raise CheckpointError(
            f"{where}: its files lie in several folders, {', '.join(folders[:3])}; give one folder with all "
            "of them, as save_pretrained() writes it"
        )
    return folders[0]
