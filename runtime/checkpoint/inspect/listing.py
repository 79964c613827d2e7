"""Listing of a folder of checkpoints, one row for each: from manifests alone, for DeepSpeed's from the head
of one file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ....shared.table import table, terminal_columns
from ...errors import CheckpointError
from ..deepspeed.folder import DeepSpeedFolder, is_deepspeed
from ..export.output_plan import size_text
from ..files.manifest import read_manifest
from ..storage.folder_store import FolderStore
from ..storage.store import LATEST, Store

_DEEPSPEED = "DeepSpeed"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRow:
    """One checkpoint. None stands for values that a damaged one does not tell."""

    tag: str
    # good: all files with all their bytes; partial: a save that is under way, or was cut off;
    # damaged; DeepSpeed
    state: str
    is_latest: bool
    step: int | None = None
    written_at: str | None = None  # UTC, ISO 8601
    num_bytes: int | None = None
    world_size: int | None = None
    zero_stage: int | None = None
    version: str | None = None  # dslaunch's version, or DeepSpeed's
    problem: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""
        return asdict(self)


def rows(store: Store) -> list[CheckpointRow]:
    """Return all checkpoints, oldest first, then those that DeepSpeed wrote,
    then those that are not complete.

    Errors: CheckpointError if there is none
    """
    tags = store.tags()
    latest, listed = None, []
    try:
        latest = store.latest()
    except CheckpointError as error:
        if LATEST not in tags:  # a checkpoint may have that name
            listed.append(CheckpointRow(tag=LATEST, state="damaged", is_latest=False, problem=str(error)))
    listed += [_row(store, tag, latest) for tag in tags]
    listed += [
        _deepspeed_row(path, path.name == latest) for path in _deepspeed_paths(store) if path.name not in tags
    ]
    listed += [
        CheckpointRow(tag=tag, state="partial", is_latest=tag == latest) for tag in store.partial_tags()
    ]
    if latest is not None and latest not in {row.tag for row in listed}:
        problem = f"{store.where}/{latest} is not there, or neither dslaunch nor DeepSpeed wrote it"
        listed.append(CheckpointRow(tag=latest, state="missing", is_latest=True, problem=problem))
    if not listed:
        raise CheckpointError(
            f"{store.where} holds no checkpoint; give the folder that save_checkpoint() wrote to"
        )
    return listed


def _row(store: Store, tag: str, latest: str | None) -> CheckpointRow:
    try:
        manifest = read_manifest(store, tag)
    except CheckpointError as error:
        return CheckpointRow(tag=tag, state="damaged", is_latest=tag == latest, problem=str(error))
    return CheckpointRow(
        tag=tag,
        state="good",
        is_latest=tag == latest,
        step=manifest.global_steps,
        written_at=manifest.written_at,
        num_bytes=manifest.num_bytes,
        world_size=manifest.world_size,
        zero_stage=manifest.zero_stage,
        version=manifest.version,
    )


def _deepspeed_paths(store: Store) -> list[Path]:
    """Return the folders of DeepSpeed's checkpoints, oldest first."""
    if not isinstance(store, FolderStore) or not store.root.is_dir():
        return []
    return sorted(filter(is_deepspeed, store.root.iterdir()), key=lambda path: path.stat().st_mtime_ns)


def _deepspeed_row(path: Path, is_latest: bool) -> CheckpointRow:
    try:
        model = DeepSpeedFolder(path).model(0)  # the file's tensors stay on the disk
        stage = model["ds_config"].get("zero_optimization", {}).get("stage", 0)
        return CheckpointRow(
            tag=path.name,
            state=_DEEPSPEED,
            is_latest=is_latest,
            step=model["global_steps"],
            written_at=datetime.fromtimestamp(path.stat().st_mtime, timezone.utc).isoformat(
                timespec="seconds"
            ),
            num_bytes=sum(file.stat().st_size for file in path.rglob("*") if file.is_file()),
            world_size=model["dp_world_size"],
            zero_stage=stage,
            version=model["ds_version"],
        )
    except (CheckpointError, KeyError, TypeError, AttributeError) as error:
        what = (
            str(error)
            if isinstance(error, CheckpointError)
            else f"{path} is not as DeepSpeed 0.19 writes checkpoints: {error!r}"
        )
        return CheckpointRow(tag=path.name, state=_DEEPSPEED, is_latest=is_latest, problem=what)


_TITLES = ("tag", "step", "written (UTC)", "size", "ranks", "stage", "state", "")


def as_text(found: Sequence[CheckpointRow]) -> str:
    """Return the same as a table for people, with the problems below."""
    cells = [
        (
            row.tag,
            _word(row.step),
            "-" if row.written_at is None else row.written_at[:19].replace("T", " "),
            "-" if row.num_bytes is None else size_text(row.num_bytes),
            _word(row.world_size),
            _word(row.zero_stage),
            row.state,
            "latest" if row.is_latest else "",
        )
        for row in found
    ]
    lines = table(cells, head=_TITLES, numbers=(1, 3, 4, 5), columns=terminal_columns())
    return "\n".join([*lines, *(row.problem for row in found if row.problem)]) + "\n"


def _word(value: int | None) -> str:
    return "-" if value is None else str(value)
