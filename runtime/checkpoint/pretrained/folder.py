"""A folder that save_pretrained() wrote, or a hub's client downloaded: which files have the weights."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from ...errors import CheckpointError
from ..files.manifest import digest
from ..storage.regular_file import open_regular
from .lazy import Values
from .weight_file import AGAIN, OpenFiles, SafetensorsFile, TorchFile

_MAX_JSON_BYTES = 1 << 30
_INDEX = ".index.json"
# in transformers' order
_NAMES = (
    "model.safetensors",
    f"model.safetensors{_INDEX}",
    "pytorch_model.bin",
    f"pytorch_model.bin{_INDEX}",
)
_ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
_CONFIG = "config.json"


def is_pretrained(path: Path) -> bool:
    """Whether a folder holds weights, or an adapter, in transformers' format."""
    return any((path / name).is_file() for name in (*_NAMES, *_ADAPTERS))


class PretrainedFolder:
    """The weights of one folder, by their names in its files.

    Errors: CheckpointError that names the file if one is missing or damaged, or if weights are of a kind that
            cannot be read
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open = OpenFiles()
        self._files: dict[str, SafetensorsFile | TorchFile] = {}
        try:
            self._check_not_quantized()
            self.values: Mapping[str, Values] = dict(self._find())
        finally:
            self.close()

    @property
    def fingerprint(self) -> str:
        """A short text that is the same for the same files, by their names, sizes and headers."""
        files = [(name, file.num_bytes) for name, file in self._files.items()]
        tensors = sorted((name, str(one.dtype), one.shape) for name, one in self.values.items())
        return digest(repr((files, tensors)).encode())

    def close(self) -> None:
        """Close all files, until they are read again."""
        self._open.close()

    def _find(self) -> Iterator[tuple[str, Values]]:
        name = next((one for one in _NAMES if (self.path / one).exists()), None)
        if name is None:
            raise CheckpointError(self._why_nothing())
        if not name.endswith(_INDEX):
            yield from self._file(name).values.items()
            return
        place_of = self._index(name)
        for file_name in dict.fromkeys(place_of.values()):
            if not (self.path / file_name).exists():
                raise CheckpointError(f"{self.path}/{name} names {file_name}, which is missing; {AGAIN}")
        for key, file_name in place_of.items():
            if key not in self._file(file_name).values:
                raise CheckpointError(
                    f"{self.path}/{name} says that '{key}' is in {file_name}, which does not have it; {AGAIN}"
                )
            yield key, self._file(file_name).values[key]
        for file_name in dict.fromkeys(place_of.values()):
            for key, values in self._file(file_name).values.items():
                if key not in place_of:
                    yield key, values

    def _why_nothing(self) -> str:
        if not self.path.is_dir():
            return (
                f"{self.path} is no folder; give the folder of a model, such as save_pretrained() writes and "
                "huggingface_hub's snapshot_download() returns"
            )
        adapter = next((name for name in _ADAPTERS if (self.path / name).exists()), None)
        if adapter is not None:
            return (
                f"{self.path} holds an adapter alone ({adapter}): load the folder of the base model, and the "
                "adapter with PEFT's PeftModel.from_pretrained() before initialize()"
            )
        held = ", ".join(sorted(os.listdir(self.path))[:5]) or "nothing"
        return f"{self.path} has none of {', '.join(_NAMES)}; it holds {held}"

    def _file(self, name: str) -> SafetensorsFile | TorchFile:
        if name not in self._files:
            path = self.path / name
            is_torch = name.endswith(".bin")
            self._files[name] = TorchFile(path) if is_torch else SafetensorsFile(path, self._open)
        return self._files[name]

    def _index(self, name: str) -> dict[str, str]:
        """Return the file of each tensor."""
        weight_map = self._json(name).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(one, str) for one in weight_map.values()):
            raise CheckpointError(
                f"{self.path}/{name} has no weight_map with a file for each tensor; {AGAIN}"
            )
        for key, file_name in weight_map.items():
            parts = PurePosixPath(file_name).parts
            if not parts or parts[0] == "/" or ".." in parts or "\\" in file_name or "\0" in file_name:
                raise CheckpointError(
                    f"{self.path}/{name} says that '{key}' is in {file_name!r}, outside of the folder, where "
                    "nothing is read; write the name of a file beside it"
                )
        return weight_map

    def _check_not_quantized(self) -> None:
        if (self.path / _CONFIG).exists():
            found = self._json(_CONFIG).get("quantization_config")
            if found is not None:
                kind = found.get("quant_method") if isinstance(found, dict) else found
                raise CheckpointError(
                    f"{self.path}/{_CONFIG}: the weights are quantized ({kind}), for transformers "
                    "alone: give initialize() the model that from_pretrained() makes"
                )

    def _json(self, name: str) -> dict[str, object]:
        path = self.path / name
        try:
            with open_regular(path) as file:
                if os.fstat(file.fileno()).st_size > _MAX_JSON_BYTES:
                    raise CheckpointError(f"{path} is too large to be what its name says")
                value = json.loads(file.read())
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} is no JSON ({error}); {AGAIN}") from error
        if not isinstance(value, dict):
            raise CheckpointError(f"{path} is no table of names; {AGAIN}")
        return value
