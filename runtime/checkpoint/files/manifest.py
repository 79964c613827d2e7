"""The manifest of a checkpoint: every file with its bytes and digests. It is written last."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import xxhash

from ...errors import CheckpointError, NoCheckpointError
from ..storage.store import MANIFEST, Store

FORMAT = 2
_DIGEST = "digest"  # digest of the manifest without this key
_ADVICE = "load another one (`dslaunch checkpoint ls` shows which are good), or copy this one here once more"


def digest(data: bytes | memoryview) -> str:
    """Return the 64-bit xxh3 of it, in hexadecimal: it finds damage, not forgery."""
    return xxhash.xxh3_64_hexdigest(data)


class FileSpan(NamedTuple):
    """A part of a file."""

    offset: int
    num_bytes: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Manifest of one checkpoint. The spans of a file cover it from its beginning to its end."""

    tag: str
    version: str  # dslaunch's version
    torch_version: str
    written_at: str  # UTC, ISO 8601
    world_size: int
    zero_stage: int
    global_steps: int
    files: Mapping[str, tuple[FileSpan, ...]]
    format: int = FORMAT

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all files but the manifest itself."""
        return sum(span.num_bytes for spans in self.files.values() for span in spans)

    def with_files(self, files: Mapping[str, tuple[FileSpan, ...]]) -> Manifest:
        """Return the complete manifest."""
        return replace(self, files=dict(sorted(files.items())))

    def to_json(self) -> bytes:
        """Return the bytes of the file, with its own digest at the end."""
        return _dump({**asdict(self), _DIGEST: digest(_dump(asdict(self)))})


def read_manifest(store: Store, tag: str) -> Manifest:
    """Return that of a checkpoint, every file being there with all of its bytes.

    Errors: CheckpointError that names the file which is missing, cut off or unreadable
    """
    folder = store.folder_of(tag)
    where = f"{store.where}/{folder}"
    if store.size(f"{folder}/{MANIFEST}") is None:
        tags = ", ".join(store.tags()) or "no checkpoint"
        raise NoCheckpointError(
            f"{where} is no checkpoint: {MANIFEST} is not there; {store.where} holds {tags}"
        )
    try:
        manifest = _from_json(json.loads(store.get(f"{folder}/{MANIFEST}")))
    except OSError as error:
        raise CheckpointError(
            f"{where}/{MANIFEST} cannot be read: {error.strerror or error}; {_ADVICE}"
        ) from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{where}/{MANIFEST} cannot be read: {type(error).__name__}: {error}; the checkpoint "
            f"is damaged: {_ADVICE}"
        ) from error
    if manifest.format != FORMAT:
        raise CheckpointError(
            f"{where} has format {manifest.format}; this version of dslaunch reads {FORMAT}: load it with "
            f"dslaunch {manifest.version}, which wrote it"
        )
    for name, spans in manifest.files.items():
        size, expected = store.size(f"{folder}/{name}"), sum(span.num_bytes for span in spans)
        if size != expected:
            has = "is missing" if size is None else f"has {size} bytes instead of {expected}"
            raise CheckpointError(f"{where}/{name} {has}: the checkpoint is damaged; load another one")
    return manifest


def check_bytes(data: bytes | memoryview, span: FileSpan, *, where: str) -> None:
    """Check that `data` are the bytes that were written.

    Errors: CheckpointError
    """
    if len(data) != span.num_bytes or digest(data) != span.digest:
        raise CheckpointError(
            f"{where} is damaged between bytes {span.offset} and {span.offset + span.num_bytes}: "
            "load another checkpoint"
        )


def _dump(found: Mapping[str, Any]) -> bytes:
    return json.dumps(found, separators=(",", ":")).encode()


def _from_json(found: Any) -> Manifest:
    if not isinstance(found, dict) or _DIGEST not in found:
        raise ValueError("it is no manifest of dslaunch's, which is an object with a digest")
    if found.pop(_DIGEST) != digest(_dump(found)):
        raise ValueError("it is not what was written")
    files = {name: tuple(FileSpan(*span) for span in spans) for name, spans in found["files"].items()}
    return Manifest(**{**found, "files": files})
