"""One file of a DeepSpeed checkpoint: read without running anything that it names, its tensors left on the
disk until they are used.
"""

from __future__ import annotations

import argparse
import pickle
import re
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointError
from ..storage.regular_file import open_regular

_ZIP = b"PK\x03\x04"  # start of the files of torch.save since 1.6; only these can be mapped


class Attributes:
    """Stand-in for an object of DeepSpeed's: its attributes, without its methods."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def _number(value: int = 0) -> int:
    """Stand-in for an enumeration whose members are numbers."""
    return int(value)


def _path(*parts: str) -> str:
    return str(Path(*parts))


# All classes that a file may name beside those of torch.load(weights_only=True), and their stand-ins.
_STAND_INS: dict[str, Callable[..., Any]] = {
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": Attributes,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": Attributes,
    "deepspeed.runtime.fp16.loss_scaler.LossScalerBase": Attributes,
    "deepspeed.runtime.zero.config.ZeroStageEnum": _number,
    "deepspeed.utils.tensor_fragment.fragment_address": Attributes,
    "deepspeed.checkpoint.universal_checkpoint.SubparamShape": Attributes,
    "argparse.Namespace": argparse.Namespace,
    "collections.OrderedDict": OrderedDict,
    "collections.defaultdict": defaultdict,
    "pathlib.PosixPath": _path,
    "pathlib._local.PosixPath": _path,  # its name in Python 3.13
    "torch.torch_version.TorchVersion": str,
}
_NAMED = re.compile(r"GLOBAL (\S+)")


def load_file(path: Path) -> Any:
    """Return the content of a file of torch.save; tensors are read when they are used.

    Errors: CheckpointError that names the file if it cannot be read, and the class if it holds one
            that is not known here
    """
    try:
        with open_regular(path) as file:
            is_mapped = file.read(len(_ZIP)) == _ZIP
        with torch.serialization.safe_globals(_allowed()):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_mapped)
    except pickle.UnpicklingError as error:
        named = _NAMED.search(str(error))
        if named is None:
            raise CheckpointError(f"{path} cannot be read: {_first_line(error)}") from error
        raise CheckpointError(
            f"{path} holds a {named[1]}, which is none of the classes that DeepSpeed's checkpoints are made "
            "of; a class in a file can run any program, so it is not loaded: if you trust the file, load it "
            "with DeepSpeed and save it without that object, which is often in client_state"
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror or error}; load another checkpoint"
        ) from error
    except (RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {_first_line(error)}") from error


def _allowed() -> list[Any]:
    """Return each as torch wants it: with the name that files have for it."""
    return [*((stand_in, name) for name, stand_in in _STAND_INS.items()), *_numpy_numbers()]


def _numpy_numbers() -> list[Any]:
    """Return the classes of numpy's arrays and numbers, which client_state may hold; none without numpy."""
    if find_spec("numpy") is None:
        return []
    import numpy

    array, number = numpy.zeros(1).__reduce__()[0], numpy.float64(1).__reduce__()[0]
    names = {"_reconstruct": array, "scalar": number}
    # numpy 2 has moved them; a file names the place of the version that wrote it
    moved = [
        (made, f"numpy.{core}.multiarray.{name}")
        for name, made in names.items()
        for core in ("core", "_core")
    ]
    kinds = {type(numpy.dtype(code)) for code in "?bBhHiIlLqQefdFD"}
    return [*moved, numpy.ndarray, (numpy.dtype, "numpy.dtype"), *kinds]


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
