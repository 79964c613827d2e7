"""The work of `dslaunch checkpoint`, in a process of its own (`__main__.py`), because it needs torch.

The exit code is 0; 1 for damage that was found, or a difference; 2 for a mistake in the arguments.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from ...errors import CheckpointError, UserError, without_credentials
from ..export.export import FILE_NAMES, ExportOptions, export
from ..export.output_plan import shard_bytes, size_text
from ..export.progress_bar import ProgressMeter
from ..export.source import locate, open_source
from ..files.reader import CheckpointReader
from ..save import doomed
from ..storage.store import MANIFEST
from ..storage.url_store import open_store
from . import difference, listing
from .last_line import tell

_FOUND = 1  # exit code: damage, or a difference


def _list(given: dict[str, Any]) -> int:
    rows = listing.rows(open_store(given["folder"]))
    if given["json"]:
        _print_json([row.to_dict() for row in rows])
    else:
        sys.stdout.write(listing.as_text(rows))
    return 0


def _verify(given: dict[str, Any]) -> int:
    store, tag = locate(given["folder"], given["tag"])
    folder = store.folder_of(tag)
    if store.size(f"{folder}/{MANIFEST}") is None:
        CheckpointReader(store, tag)  # raises the error that names the checkpoints there
    try:
        reader = CheckpointReader(store, tag)
        with ProgressMeter(f"verified {reader.where}", reader.manifest.num_bytes) as meter:
            reader.verify(meter.advance)
        reader.training()
    except CheckpointError as error:
        tell(str(error))
        return _FOUND
    size = size_text(reader.manifest.num_bytes)
    print(
        f"{reader.where}: good; {size} in {len(reader.manifest.files)} files have the "
        "digests that were written"
    )
    return 0


def _diff(given: dict[str, Any]) -> int:
    a, b = (CheckpointReader(*locate(where, None)) for where in (given["a"], given["b"]))
    result = difference.difference(a, b, with_values=given["values"])
    if given["json"]:
        _print_json(result.to_dict())
    else:
        sys.stdout.write(difference.as_text(result))
    return 0 if result.is_empty else _FOUND


def _prune(given: dict[str, Any]) -> int:
    store = open_store(given["folder"])
    listing.rows(store)  # raises the error for a folder without checkpoints
    tags = doomed(store, keep_last=given["keep"])
    if not tags:
        count = len(store.tags())
        print(
            f"nothing to remove: {store.where} has {count} checkpoint{'' if count == 1 else 's'}, "
            f"--keep {given['keep']}"
        )
    for tag in tags:
        if not given["dry_run"]:
            store.remove(tag)
        print(f"{'would remove' if given['dry_run'] else 'removed'} {store.where}/{tag}", flush=True)
    return 0


def _export(given: dict[str, Any]) -> int:
    options = ExportOptions(
        dtype=getattr(torch, given["dtype"]),
        file_name=FILE_NAMES[given["format"]],
        max_shard_size=given["max_shard_size"],
        exclude_frozen_parameters=given["exclude_frozen_parameters"],
    )
    shard_bytes(options.max_shard_size)
    source = open_source(given["folder"], given["tag"])
    plan = export(source, given["out"], options)
    name = plan.index_name or plan.files[0].name
    print(f"{without_credentials(given['out']).rstrip('/')}/{name}: {plan.summary()}, from {source.where}")
    return 0


def _print_json(value: object) -> None:
    print(json.dumps(value, indent=2, default=str))


_ACTIONS: dict[str, Callable[[dict[str, Any]], int]] = {
    "ls": _list,
    "verify": _verify,
    "diff": _diff,
    "prune": _prune,
    "export": _export,
}


def _culprit(given: dict[str, Any]) -> str:
    """Return the name of the file that could not be read or written."""
    try:
        os.write(1, b"\n")
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return "cannot write to stdout"
    return str(given.get("folder") or given.get("a"))


def main(request: str) -> int:
    """Do what the launcher asks for, `action` and its options as JSON; return the exit code."""
    given: dict[str, Any] = json.loads(request)
    try:
        code = _ACTIONS[given["action"]](given)
        sys.stdout.flush()
    except UserError as error:
        tell(str(error))
        return error.exit_code
    except BrokenPipeError:  # the reader of our output went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 128 + 13
    except OSError as error:
        tell(f"{_culprit(given)}: {error.strerror or error}")
        return UserError.exit_code
    except KeyboardInterrupt:
        return 130
    return code
