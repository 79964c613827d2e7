"""What a folder of checkpoints holds, one row for each: read from manifests alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import CheckpointError
from .manifest import read_manifest
from .output_plan import size_text
from .store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One checkpoint. What is not known of one that is no good is None."""

    tag: str
    state: str  # good: all files with all their bytes; partial: a save that is under way, or was cut off; damaged
    is_latest: bool
    step: int | None = None
    written_at: str | None = None  # UTC, ISO 8601
    num_bytes: int | None = None
    world_size: int | None = None
    zero_stage: int | None = None
    version: str | None = None  # of dslaunch
    problem: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        return asdict(self)


def rows(store: Store) -> list[Row]:
    """Return all checkpoints, oldest first, then those that are not complete.

    Errors: CheckpointError if there is none
    """
    latest, tags = store.latest(), store.tags()
    found = [_row(store, tag, latest) for tag in tags]
    found += [Row(tag=tag, state="partial", is_latest=tag == latest) for tag in store.partial_tags()]
    if latest is not None and latest not in {row.tag for row in found}:
        problem = f"{store.where}/{latest} is not there, or another program wrote it"
        found.append(Row(tag=latest, state="missing", is_latest=True, problem=problem))
    if not found:
        raise CheckpointError(
            f"{store.where} holds no checkpoint; give the folder that save_checkpoint() wrote to"
        )
    return found


def _row(store: Store, tag: str, latest: str | None) -> Row:
    try:
        manifest = read_manifest(store, tag)
    except CheckpointError as error:
        return Row(tag=tag, state="damaged", is_latest=tag == latest, problem=str(error))
    return Row(
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


_TITLES = ("tag", "step", "written (UTC)", "size", "ranks", "stage", "state", "")


def as_text(found: Sequence[Row]) -> str:
    """Return the same as a table for people, with the problems below."""
    cells = [_TITLES]
    for row in found:
        cells.append(
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
        )
    widths = [max(len(line[column]) for line in cells) for column in range(len(_TITLES))]
    is_number = (False, True, False, True, True, True, False, False)
    lines = [
        "  ".join(
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(line, widths, is_number, strict=True)
        ).rstrip()
        for line in cells
    ]
    return "\n".join([*lines, *(row.problem for row in found if row.problem)]) + "\n"


def _word(value: int | None) -> str:
    return "-" if value is None else str(value)
